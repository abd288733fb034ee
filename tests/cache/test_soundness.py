"""No byte of a cache changes unnoticed, and what is wrong with its files is said in one sentence."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from qat_lora.cache import (
    CacheManifest,
    KDCacheDataset,
    load_cache,
    load_manifest,
    summarise,
    verify,
)
from qat_lora.cache.manifest import sealed
from qat_lora.errors import CacheError, CacheMismatch
from tests.cache.conftest import TinyTeacher, build
from tests.cache.test_parts import ROWS, build_part, writer_of


@pytest.fixture
def folder(tmp_path):
    build(tmp_path / "c", rows=ROWS)
    return tmp_path / "c"


def message(act, folder, error=CacheError) -> str:
    with pytest.raises(error) as caught:
        act(folder)
    text = str(caught.value)
    assert str(folder) in text and "\n" not in text and text.endswith(".")
    return text


def unnoticed_flips(folder, path, places, chance) -> list[int]:
    """Change one byte after the other, each to another value at random, and return the places that `verify` misses."""
    whole, missed = path.read_bytes(), []
    for place in places:
        data = bytearray(whole)
        data[place] ^= chance.randint(1, 255)
        path.write_bytes(data)
        try:
            verify(folder)
            missed.append(place)
        except CacheError:
            pass
    path.write_bytes(whole)
    return missed


@pytest.mark.parametrize("name", ["manifest.json", "index.json"])
def test_every_byte_of_the_manifest_and_the_index_counts(folder, name) -> None:
    path = folder / name
    size, chance = len(path.read_bytes()), random.Random(0)
    assert size > 700
    places = range(size) if name == "manifest.json" else sorted(chance.sample(range(size), 500))
    assert unnoticed_flips(folder, path, places, chance) == []
    verify(folder)


def test_every_single_bit_of_the_digest_and_of_white_space_counts(folder) -> None:
    """Among them those that change the case of a digit, and those that turn a space into a zero."""
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for place in [*range(40), *range(len(whole) - 80, len(whole))]:
        for bit in range(8):
            data = bytearray(whole)
            data[place] ^= 1 << bit
            path.write_bytes(data)
            with pytest.raises(CacheError):
                CacheManifest.read(path)


@pytest.mark.parametrize("index", range(5))
def test_every_byte_of_a_shard_counts(folder, index) -> None:
    path = folder / f"shard-{index:05d}.safetensors"
    chance = random.Random(index)
    size = path.stat().st_size
    places = range(size) if index == 4 else sorted(chance.sample(range(size), 200))
    assert unnoticed_flips(folder, path, places, chance) == []


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text + "\n",
        lambda text: text.replace("  ", " "),
        lambda text: text.replace('"rows": 14', '"rows": 15'),
        lambda text: text.replace('"digest": "', '"digest": "0'),
        lambda text: text[: text.index(',\n  "digest"')] + "\n}\n",
        lambda text: text.replace("1.0", "1.00"),
    ],
    ids=["a line", "white space", "a value", "the digest", "no digest", "the same number"],
)
def test_a_manifest_that_was_edited_is_refused_at_once(folder, edit) -> None:
    path = folder / "manifest.json"
    text = path.read_text()
    assert edit(text) != text
    path.write_text(edit(text))
    for act in (load_manifest, KDCacheDataset, summarise, verify, writer_of):
        assert "its digest is not that of its content" in message(act, folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows_per_shard", 1.5), ("logprob_bits", 5.0), ("tail_draws", 1.5), ("rows", True), ("top_k", "4"),
        ("temperatures", [1.0, float("inf")]), ("temperatures", [float("nan")]), ("temperatures", [True]),
        ("temperatures", [-1.0]), ("temperatures", "12"), ("temperatures", [10**400]), ("eval_fraction", float("nan")),
        ("proposal_temperature", "x"), ("teacher_digest", 7), ("normalizer", "zz"), ("normalizer", []),
        ("store", {}), ("packing", 3), ("sampling_seed", "a"), ("tokenizer_size", -1), ("answers", "yes"),
        ("answers", 1), ("bos", [1.0]), ("bos", [True]), ("bos", [-1]), ("bos", 1), ("vocab_size", None),
    ],
)  # fmt: skip
def test_a_field_of_another_type_or_out_of_range_is_refused(folder, name, value) -> None:
    """The file is made as ours are, so that its digest is right."""
    data = json.loads((folder / "manifest.json").read_text()) | {name: value}
    data.pop("digest")
    (folder / "manifest.json").write_bytes(sealed(data))
    text = message(load_manifest, folder)
    assert "manifest.json' is damaged (" in text and name in text


@pytest.mark.parametrize("name", ["index", "rows", "tokens", "size_bytes"])
@pytest.mark.parametrize("value", [True, 1.0, -1, "1", None])
def test_an_index_whose_numbers_are_none_is_refused(folder, name, value) -> None:
    data = json.loads((folder / "index.json").read_text())
    data.pop("digest")
    data["shards"][1][name] = value
    (folder / "index.json").write_bytes(sealed(data))
    assert f"index.json' is damaged ({name}={value!r})" in message(load_cache, folder)


@pytest.mark.parametrize(("name", "most"), [("manifest.json", 2**26), ("index.json", 2**30)])
def test_a_record_file_beyond_all_measure_is_not_read(folder, name, most, monkeypatch) -> None:
    os.truncate(folder / name, most + 1)  # a hole: the disk holds nothing of it
    monkeypatch.setattr(Path, "read_bytes", read_small(Path.read_bytes))
    assert f"{name}' (it has more than {most} bytes); restore the file" in message(load_cache, folder)


def read_small(read):
    def act(path):
        assert path.stat().st_size < 2**20
        return read(path)

    return act


# ---- shards that are not those of the index


def test_a_missing_and_a_truncated_shard_are_told_apart_and_named(folder) -> None:
    path = folder / "shard-00003.safetensors"
    whole = path.read_bytes()
    path.unlink()
    for act in (KDCacheDataset, verify):
        assert f"lacks its shard {str(path)!r}; restore the file or run the build" in message(act, folder)
    path.write_bytes(whole[:-5])
    for act in (KDCacheDataset, verify):
        assert f"{str(path)!r} has {len(whole) - 5} bytes instead of {len(whole)}" in message(act, folder)


def test_a_foreign_shard_is_refused_and_not_written_over(folder, tmp_path) -> None:
    path = folder / "shard-00003.safetensors"
    build(tmp_path / "other", rows=ROWS, teacher=TinyTeacher(seed=1), teacher_digest="u" * 64)
    for foreign in (tmp_path / "other" / path.name, folder / "shard-00002.safetensors"):
        shutil.copy(foreign, path)
        for act in (lambda folder: KDCacheDataset(folder, preload=True), verify):
            assert f"{str(path)!r} is damaged: sha256" in message(act, folder)
        assert f"{str(path)!r} is shard " in message(writer_of, folder, CacheMismatch)
        assert path.read_bytes() == foreign.read_bytes(), "not written over"


def test_an_index_of_another_build_is_refused(folder, tmp_path) -> None:
    """Shards of the same cache, all of the right size, that another machine has rounded otherwise."""
    other = TinyTeacher()
    other.embedding_VH = other.embedding_VH * (1 + 1e-6)
    build(tmp_path / "again", rows=ROWS, teacher=other)
    shutil.copy(tmp_path / "again" / "index.json", folder / "index.json")
    text = message(verify, folder)
    assert text.count("is damaged: sha256") == 5
    assert "is damaged: sha256" in message(lambda path: KDCacheDataset(path, preload=True), tmp_path / "c")
    writer_of(folder).finish()
    verify(folder)


def test_a_manifest_of_an_earlier_build_with_other_settings(folder, tmp_path) -> None:
    build(tmp_path / "earlier", rows=ROWS, teacher_digest="u" * 64)
    shutil.copy(tmp_path / "earlier" / "manifest.json", folder / "manifest.json")
    for act in (KDCacheDataset, summarise, verify):
        assert "index.json' is of another cache than the manifest" in message(act, folder, CacheMismatch)
    with pytest.raises(CacheMismatch, match="teacher_digest"):
        writer_of(folder)
    with pytest.raises(CacheMismatch, match="of another KD cache"):
        writer_of(folder, teacher_digest="u" * 64)


def test_verifying_an_unfinished_cache_takes_what_is_there(tmp_path) -> None:
    build_part(tmp_path, 2, 2)
    (tmp_path / "shard-00000.safetensors").write_bytes(b"being made")
    assert len(verify(tmp_path).shards) == 2
