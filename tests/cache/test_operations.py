"""Merging, splitting and converting: what is made equals what a build makes, and each act can be continued."""

from __future__ import annotations

import gc
import shutil
import tracemalloc

import numpy as np
import pytest
import torch

from qat_lora.cache import (
    CacheWriter,
    KDCacheDataset,
    Part,
    build_cache,
    convert,
    load_cache,
    load_manifest,
    merge,
    operations,
    source_digest,
    split_parts,
    split_rows,
    verify,
)
from qat_lora.cache.operations import StoredRows
from qat_lora.errors import CacheError, CacheMismatch, ConfigError
from qat_lora.kd import targets
from tests.cache.blocks import Blocks
from tests.cache.conftest import TinyTeacher, blocks_of, build, manifest_of
from tests.cache.test_build import Interrupted, contents
from tests.cache.test_parts import BLOCKS, ROWS, build_part, run, writer_of


@pytest.fixture
def whole(tmp_path):
    build(tmp_path / "whole", rows=ROWS)
    return tmp_path / "whole"


def built_of(folder, blocks, **changes):
    """Build a cache row by row, so that a row's bytes do not depend on which rows are beside it."""
    teacher = TinyTeacher()
    writer = CacheWriter(folder, manifest_of(blocks, **changes))
    build_cache(teacher, teacher.head, blocks, writer, batch_size=1, chunk_tokens=blocks.input_ids_RT.shape[1])
    writer.finish()
    return folder


@pytest.fixture
def by_row(tmp_path):
    return built_of(tmp_path / "by_row", BLOCKS)


def shards_of(folder):
    return {name: data for name, data in contents(folder).items() if name.startswith("shard")}


def fields_of(folder):
    rows = StoredRows([folder])
    return rows.fields(range(rows.manifest.rows))


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(
        np.array_equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a
    )


# ---- merging


def test_parts_in_folders_of_their_own_merge_to_the_files_of_one_build(tmp_path, whole):
    for number in (3, 1, 2):
        build_part(tmp_path / str(number), number, 3)
    before = {n: contents(tmp_path / str(n)) for n in (1, 2, 3)}
    seen = []
    merge([tmp_path / "2", tmp_path / "1", tmp_path / "3"], tmp_path / "m", progress=lambda *x: seen.append(x))
    assert contents(tmp_path / "m") == contents(whole)
    assert seen == [(n, 5) for n in range(1, 6)]
    assert {n: contents(tmp_path / str(n)) for n in (1, 2, 3)} == before


def test_parts_that_overlap_and_the_whole_cache_beside_them_are_one_cache(tmp_path, whole):
    build_part(tmp_path / "1", 1, 2)
    merge([tmp_path / "1", whole, whole], tmp_path / "m")
    assert contents(tmp_path / "m") == contents(whole)


def test_caches_of_one_teacher_are_laid_end_to_end_as_if_built_from_all_their_rows(tmp_path):
    """Byte for byte, the digest of the rows included; a short row stays where it is."""
    a, b = blocks_of(5, last_length=2, seed=1), blocks_of(9, last_length=4, seed=2)
    both = Blocks(torch.cat([a.input_ids_RT, b.input_ids_RT]), torch.cat([a.lengths_R, b.lengths_R]))
    built_of(tmp_path / "a", a, source="one")
    built_of(tmp_path / "b", b, source="two", rows_per_shard=4)
    built_of(tmp_path / "both", both, source="one + two")
    assert (
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m").manifest.source_digest
        == manifest_of(both).source_digest
    )
    assert contents(tmp_path / "m") == contents(tmp_path / "both")
    built_of(tmp_path / "other", both, source="one + two", rows_per_shard=4)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "n", rows_per_shard=4)
    assert contents(tmp_path / "n") == contents(tmp_path / "other")
    reverse = merge([tmp_path / "b", tmp_path / "a"], tmp_path / "r").manifest
    assert (
        reverse.source_digest != manifest_of(both).source_digest and reverse.rows == 14 and reverse.rows_per_shard == 4
    )
    KDCacheDataset(tmp_path / "r", preload=True)


def test_a_cache_in_parts_is_merged_with_another_cache(tmp_path):
    more = blocks_of(4, seed=3)
    for number in (1, 2):
        build_part(tmp_path / str(number), number, 2)
    built_of(tmp_path / "more", more)
    found = merge([tmp_path / "1", tmp_path / "more", tmp_path / "2"], tmp_path / "m")
    assert found.rows == ROWS + 4
    ids_RT = np.concatenate([BLOCKS.input_ids_RT.numpy(), more.input_ids_RT.numpy()])
    assert np.array_equal(fields_of(tmp_path / "m")["input_ids"], ids_RT)


def test_merging_one_cache_with_other_shards_keeps_its_rows_and_their_digest(tmp_path, by_row):
    merge([by_row], tmp_path / "m", rows_per_shard=5)
    built_of(tmp_path / "again", BLOCKS, rows_per_shard=5)
    assert contents(tmp_path / "m") == contents(tmp_path / "again")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"top_k": 5}, "top_k: 4 there, 5 here"),
        ({"teacher_digest": "u" * 64}, "teacher_digest"),
        ({"temperatures": (1.0,)}, "temperatures"),
        ({"normalizer": "estimated"}, "normalizer: 'exact' there, 'estimated' here"),
    ],
)
def test_caches_of_different_kinds_are_not_merged(tmp_path, whole, changes, word):
    build(tmp_path / "other", rows=4, **changes)
    with pytest.raises(CacheMismatch, match="cannot be merged .*convert") as caught:
        merge([whole, tmp_path / "other"], tmp_path / "m")
    assert word in str(caught.value) and str(whole) in str(caught.value)
    assert not (tmp_path / "m").exists()


def test_a_cache_that_is_incomplete_or_damaged_is_not_merged(tmp_path, whole):
    build_part(tmp_path / "1", 1, 3)
    build_part(tmp_path / "2", 2, 3)
    with pytest.raises(CacheError, match="4 of the 5 shards of one cache; give the folders of all its parts"):
        merge([tmp_path / "1", tmp_path / "2"], tmp_path / "m")
    with pytest.raises(CacheError, match=r"No manifest.json in .*nowhere"):
        merge([whole, tmp_path / "nowhere"], tmp_path / "m")
    with pytest.raises(ConfigError, match="is one of the folders that are read"):
        merge([whole, tmp_path / "1"], whole)
    build(tmp_path / "b", rows=6, last_length=2)
    path = tmp_path / "b" / "shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for folders in ([whole, tmp_path / "b"], [tmp_path / "b"]):
        with pytest.raises(CacheError, match=r"b/shard-00001.safetensors' is damaged"):
            merge(folders, tmp_path / "m")
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
    path.unlink()
    with pytest.raises(CacheError, match="lacks its shard"):
        merge([tmp_path / "b"], tmp_path / "m")


def test_the_digest_of_rows_is_that_of_a_build(whole):
    rows = StoredRows([whole])
    assert source_digest(rows.keys(), 5) == rows.manifest.source_digest == manifest_of(BLOCKS).source_digest


# ---- splitting


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_parts_of_a_cache_are_those_that_would_have_been_built(tmp_path, whole, count):
    for number in range(1, count + 1):
        build_part(tmp_path / "built" / str(number), number, count)
    seen = []
    made = split_parts(whole, tmp_path / "s", count, progress=lambda *x: seen.append(x))
    assert [folder.name for folder, _ in made] == [f"part-{number}-of-{count}" for number in range(1, count + 1)]
    for number, (folder, index) in enumerate(made, 1):
        assert contents(folder) == contents(tmp_path / "built" / str(number))
        assert [shard.index for shard in index.shards] == list(
            Part(number, len(made)).shards(index.manifest.shard_count)
        )
        shutil.copytree(folder, tmp_path / "together", dirs_exist_ok=True)
    assert seen == [(n, 5) for n in range(1, 6)]
    verify(tmp_path / "together")
    assert load_cache(tmp_path / "together").complete
    merge([folder for folder, _ in made], tmp_path / "m")
    assert contents(tmp_path / "m") == contents(whole)


@pytest.mark.parametrize("rows", [1, 3, 7, 13])
def test_two_caches_of_one_are_those_of_their_rows_and_merge_to_it(tmp_path, by_row, rows):
    (first, _), (rest, index) = split_rows(by_row, tmp_path / "s", rows)
    manifest = index.manifest
    assert (first.name, rest.name) == ("first", "rest") and manifest.rows == ROWS - rows
    assert manifest.source == f"made up (rows {rows + 1} to 14 of 14)"
    side = Blocks(BLOCKS.input_ids_RT[rows:], BLOCKS.lengths_R[rows:])
    built_of(tmp_path / "built", side)
    assert shards_of(rest) == shards_of(tmp_path / "built"), "as a build of these rows would have it"
    merge([first, rest], tmp_path / "m")
    assert shards_of(tmp_path / "m") == shards_of(by_row)
    assert not load_manifest(tmp_path / "m").differing(load_manifest(by_row))


def test_a_split_that_leaves_nothing_to_one_side_is_refused(tmp_path, whole):
    for rows in (0, ROWS, ROWS + 1):
        with pytest.raises(ConfigError, match="has 14 rows; give 1 to 13"):
            split_rows(whole, tmp_path / "s", rows)
    with pytest.raises(ConfigError, match="part='1/6'.* 5 shards"):
        split_parts(whole, tmp_path / "s", 6)
    build_part(tmp_path / "p", 1, 2)
    with pytest.raises(CacheError, match="3 of the 5 shards"):
        split_rows(tmp_path / "p", tmp_path / "s", 3)
    assert not (tmp_path / "s").exists()


# ---- other settings


def test_fewer_candidates_and_temperatures_are_what_the_reader_makes_of_the_whole(tmp_path, whole):
    """The targets with K = 2 from the smaller cache are those that `targets(top_k=2)` takes from the larger one."""
    manifest = convert(whole, tmp_path / "c", top_k=2, temperatures=(2.0,), rows_per_shard=4).manifest
    assert (manifest.top_k, manifest.temperatures, manifest.rows_per_shard) == (2, (1.0, 2.0), 4)
    large, small = KDCacheDataset(whole), KDCacheDataset(tmp_path / "c")
    for temperature in (1.0, 2.0):
        batches = [next(iter(cache.eval_batches(ROWS))) for cache in (large, small)]
        wanted = targets(batches[0], temperature, large.manifest.target_spec, top_k=2)
        found = targets(batches[1], temperature, small.manifest.target_spec)
        assert torch.equal(wanted.ids_SK, found.ids_SK)
        torch.testing.assert_close(found.logprobs_SK, wanted.logprobs_SK, rtol=0, atol=2e-6)


def test_fewer_candidates_are_those_of_a_build_up_to_rounding(tmp_path, whole):
    convert(whole, tmp_path / "c", top_k=2)
    build(tmp_path / "built", rows=ROWS, top_k=2)
    found, wanted = fields_of(tmp_path / "c"), fields_of(tmp_path / "built")
    for name in ("input_ids", "lengths", "topk_ids", "topk_logprobs"):
        assert np.array_equal(found[name], wanted[name]), name
    np.testing.assert_allclose(found["tail"], wanted["tail"], atol=1e-6)
    assert load_manifest(tmp_path / "c").differing(load_manifest(tmp_path / "built")) == {}


def test_one_temperature_and_shorter_floats_are_those_of_a_build_bit_for_bit(tmp_path, whole):
    build(tmp_path / "three", rows=ROWS, temperatures=(1.0, 2.0, 4.0))
    convert(tmp_path / "three", tmp_path / "c", temperatures=(1.0, 4.0), logprob_bits=16)
    build(tmp_path / "built", rows=ROWS, temperatures=(1.0, 4.0), logprob_bits=16)
    assert contents(tmp_path / "c") == contents(tmp_path / "built")


def test_what_a_cache_does_not_have_is_not_made_up(tmp_path, whole):
    build(tmp_path / "short", rows=ROWS, logprob_bits=16)
    for folder, changes, words in (
        (whole, {"top_k": 5}, "stores 4 candidates, but top_k=5"),
        (whole, {"temperatures": (1.0, 3.0)}, r"serves temperatures \[1.0, 2.0\].*leave out 3.0"),
        (tmp_path / "short", {"logprob_bits": 32}, "in 16 bits, but logprob_bits=32"),
    ):
        with pytest.raises(ConfigError, match=words):
            convert(folder, tmp_path / "c", **changes)
    assert not (tmp_path / "c").exists()


# ---- going on, memory


def acts(tmp_path, whole):
    build(tmp_path / "more", rows=5, last_length=2)
    return {
        "merge": lambda out, **o: merge([whole, tmp_path / "more"], out, rows_per_shard=2, **o),
        "copy": lambda out, **o: merge([whole], out, **o),
        "parts": lambda out, **o: split_parts(whole, out, 2, **o),
        "rows": lambda out, **o: split_rows(whole, out, 6, **o),
        "convert": lambda out, **o: convert(whole, out, top_k=1, **o),
    }


@pytest.mark.parametrize("act", ["merge", "copy", "parts", "rows", "convert"])
@pytest.mark.parametrize("after", [1, 3, 4])
def test_an_act_that_stops_continues_to_the_same_files(tmp_path, whole, act, after):
    do = acts(tmp_path, whole)[act]
    do(tmp_path / "once")
    left = after

    def progress(done, total):
        nonlocal left
        left -= 1
        if left == 0:
            raise Interrupted

    with pytest.raises(Interrupted):
        do(tmp_path / "twice", progress=progress)
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "twice").rglob("shard*")}
    do(tmp_path / "twice")
    assert len(done) == after
    assert {path: path.stat().st_mtime_ns for path in done} == done, "not written twice"
    files = [sorted(p.relative_to(tmp_path / t) for p in (tmp_path / t).rglob("*.*")) for t in ("once", "twice")]
    assert files[0] == files[1]
    assert all((tmp_path / "once" / f).read_bytes() == (tmp_path / "twice" / f).read_bytes() for f in files[0])


def test_one_shard_is_held_at_a_time_and_each_is_read_as_seldom_as_can_be(tmp_path, monkeypatch):
    build(tmp_path / "c", rows=60, top_k=1)
    loads = []
    load = operations.load_file

    def loading(path):
        loads.append(int(path.stem[6:]))
        return load(path)

    monkeypatch.setattr(operations, "load_file", loading)
    convert(tmp_path / "c", tmp_path / "d", rows_per_shard=7)
    assert loads == list(range(20))


def test_memory_does_not_grow_with_the_cache(tmp_path):
    """Four times the rows in as large shards cost less than one shard: their keys and what the index says of them."""
    peaks = []
    for rows in (60, 240):
        folders = [tmp_path / f"{rows} {seed}" for seed in (1, 2)]
        for seed, folder in enumerate(folders):
            built_of(folder, blocks_of(rows, seq_len=100, seed=seed), rows_per_shard=20, top_k=20)
        gc.collect()
        tracemalloc.start()
        merge(folders, tmp_path / f"{rows}", rows_per_shard=14)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + load_cache(folders[0]).shards[0].size_bytes


@pytest.mark.parametrize("act", ["merge", "copy", "convert"])
def test_an_output_that_holds_something_else_is_refused(tmp_path, whole, act):
    build(tmp_path / "there", rows=4)
    before = contents(tmp_path / "there")
    with pytest.raises(CacheMismatch, match="holds a KD cache of something else"):
        acts(tmp_path, whole)[act](tmp_path / "there")
    assert contents(tmp_path / "there") == before


def test_a_build_may_finish_what_a_split_has_copied(tmp_path, whole):
    (part, _), _ = split_parts(whole, tmp_path / "s", 2)
    run(writer_of(part))
    writer_of(part).finish()
    assert contents(part) == contents(whole)


SAMPLED = {"store": "sampled", "samples": 8}


@pytest.mark.parametrize(
    "changes", [SAMPLED, SAMPLED | {"proposal_temperature": 0.8}, {"store": "full"}, {"logprob_bits": 5}]
)
def test_rows_of_every_store_are_moved_bit_for_bit(tmp_path, changes):
    """Split and merged, or into shards of another size and back: the same bytes."""
    build(tmp_path / "c", rows=ROWS, **changes)
    before = shards_of(tmp_path / "c")
    split_rows(tmp_path / "c", tmp_path / "two", 5)
    merge([tmp_path / "two" / "first", tmp_path / "two" / "rest"], tmp_path / "m")
    assert shards_of(tmp_path / "m") == before
    convert(tmp_path / "c", tmp_path / "by_two", rows_per_shard=2)
    assert shards_of(tmp_path / "by_two") != before
    convert(tmp_path / "by_two", tmp_path / "back", rows_per_shard=3)
    assert shards_of(tmp_path / "back") == before


def test_fewer_candidates_of_a_grid_keep_their_levels(tmp_path):
    build(tmp_path / "c", rows=ROWS, logprob_bits=5)
    convert(tmp_path / "c", tmp_path / "few", top_k=3)
    whole, few = (StoredRows([tmp_path / name]).fields(range(ROWS)) for name in ("c", "few"))
    assert np.array_equal(few["levels"], whole["levels"][..., :2])
    assert np.array_equal(few["largest_gap"], whole["largest_gap"])
