"""What is said of a cache: counted on disk, and against the formulas in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from qat_lora.cache import (
    CacheWriter,
    Part,
    load_manifest,
    summarise,
    verify,
)
from qat_lora.cache.codec import decoded
from qat_lora.errors import CacheError
from tests.cache.conftest import TinyTeacher, blocks_of, build
from tests.cache.test_parts import BLOCKS, ROWS, build_part, manifest_of, run, writer_of


@pytest.fixture
def folder(tmp_path):
    build(tmp_path / "c", rows=ROWS)
    return tmp_path / "c"


def by_hand(folder) -> tuple[list[float], list[float], int]:
    """Kept mass and entropy of every valid position, and how many positions there are."""
    kept, entropies = [], []
    for path in sorted(folder.glob("shard-*")):
        fields = load_file(path)
        for row, length in enumerate(fields["lengths"]):
            for t in range(length):
                p = np.exp(fields["topk_logprobs"][row, t].astype(np.float64))
                tail = float(fields["tail"][row, t, 0])
                kept.append(1 - tail)
                buckets = [*p, tail]
                entropies.append(-sum(x * np.log(x) for x in buckets if x > 0))
    return kept, entropies, len(kept)


def test_the_numbers_are_those_of_the_files(folder) -> None:
    found = summarise(folder)
    kept, entropies, tokens = by_hand(folder)
    assert (found.index.rows, found.tokens) == (ROWS, tokens)
    assert found.kept_mass == pytest.approx(np.mean(kept), abs=1e-9)
    assert found.entropy == pytest.approx(np.mean(entropies), abs=1e-6)
    assert 0.1 < found.kept_mass < 1 and found.entropy > 0
    assert found.index.size_bytes == sum(path.stat().st_size for path in folder.glob("shard-*"))
    assert sum(found.bytes_per_token.values()) == pytest.approx(found.index.size_bytes / tokens)
    assert found.bytes_per_token["overhead"] > 0
    size = load_file(folder / "shard-00000.safetensors")["tail"][0].nbytes
    assert found.bytes_per_token["tail"] == pytest.approx(size * ROWS / tokens)


def test_the_numbers_of_a_finished_cache_are_in_its_index(folder) -> None:
    found = summarise(folder)
    for path in folder.glob("shard-*"):
        path.unlink()
    assert summarise(folder) == found


def test_an_unfinished_cache_is_described_as_far_as_it_is_there(tmp_path) -> None:
    build_part(tmp_path, 2, 3)
    found = summarise(tmp_path)
    assert not found.index.complete
    assert found.index.rows == sum(len(found.index.manifest.shard_rows(index)) for index in Part(2, 3).shards(5)) < ROWS
    with pytest.raises(CacheError, match="has no finished shard yet"):
        CacheWriter(tmp_path / "begun", manifest_of(BLOCKS))
        summarise(tmp_path / "begun")


@pytest.mark.parametrize("place", [0, 9, 200, -1])
def test_a_flipped_byte_is_found_and_named(folder, place) -> None:
    assert len(verify(folder).shards) == 5
    for name in ("shard-00001.safetensors", "shard-00004.safetensors"):
        data = bytearray((folder / name).read_bytes())
        data[place] ^= 1
        (folder / name).write_bytes(data)
    with pytest.raises(CacheError, match=r"shard-00001.safetensors' is damaged.*shard-00004.safetensors' is "):
        verify(folder)


def test_a_lost_or_cut_shard_is_one_sentence(folder) -> None:
    path = folder / "shard-00002.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CacheError, match=r"shard-00002.safetensors' has 40 bytes .*delete it and run the build"):
        verify(folder)
    path.unlink()
    with pytest.raises(CacheError, match="lacks its shard .*shard-00002.safetensors'"):
        verify(folder)
    run(writer_of(folder))
    verify(folder)


def test_what_the_grid_costs_is_that_of_the_levels_that_are_stored(tmp_path) -> None:
    """1/2 sum_k p (1 - p) d^2 / 12, d the distance of the levels beside each candidate's, at every valid position."""
    build(tmp_path / "c", rows=ROWS, logprob_bits=5)
    manifest, costs = load_manifest(tmp_path / "c"), []
    for path in sorted((tmp_path / "c").glob("shard-*")):
        fields = decoded(manifest, load_file(path))
        for row, length in enumerate(fields["lengths"]):
            for t in range(length):
                cost = 0.0
                for level, logp in zip(fields["levels"][row, t], fields["topk_logprobs"][row, t, 1:], strict=True):
                    below, above = max(int(level) - 1, 0), int(level) + 1
                    distance = float(fields["largest_gap"][row, t]) * (above**2 - below**2) / 31**2 / (above - below)
                    p = np.exp(np.float64(logp))
                    cost += p * (1 - p) * distance**2 / 24 if level < 31 else 0.0
                costs.append(cost)
    assert np.mean(costs) > 1e-6
    assert summarise(tmp_path / "c").grid_kl == pytest.approx(np.mean(costs), rel=1e-4)


def test_the_entropy_of_a_sampled_cache_is_the_teachers_at_temperature_1(tmp_path) -> None:
    blocks, teacher = blocks_of(ROWS, last_length=3), TinyTeacher()
    for temperatures in ((1.0, 4.0), (1.0, 0.5, 2.0)):
        folder = tmp_path / str(len(temperatures))
        build(folder, blocks=blocks, store="sampled", top_k=0, samples=8, temperatures=temperatures)
        z = teacher.head(teacher(blocks.input_ids_RT.long())).numpy().astype(np.float64)
        p = np.exp(z - np.log(np.exp(z).sum(-1, keepdims=True)))
        is_token = np.arange(z.shape[1]) < blocks.lengths_R.numpy()[:, None]
        wanted = -(p * np.log(p)).sum(-1)[is_token].mean()
        assert summarise(folder).entropy == pytest.approx(wanted, rel=1e-3), "in float16"
