"""Parts and ranks write side by side; what they leave, in whatever state, becomes the cache of one process."""

from __future__ import annotations

import os
import random
import shutil
import socket

import pytest

from qat_lora.cache import CacheWriter, KDCacheDataset, Part, build_cache, load_cache, verify, write
from qat_lora.cache.index import scan
from qat_lora.cache.manifest import WHOLE
from qat_lora.errors import CacheError, CacheMismatch, ConfigError
from tests.cache.conftest import TinyTeacher, blocks_of, build, manifest_of
from tests.cache.test_build import Interrupted, contents, stop_after

ROWS = 14
BLOCKS = blocks_of(ROWS, last_length=3)  # 5 shards of 3 rows, the last of 2


def writer_of(directory, **options):
    changes = {k: options.pop(k) for k in list(options) if k not in ("part", "rank", "world_size")}
    return CacheWriter(directory, manifest_of(BLOCKS, **changes), **options)


def run(writer, **options) -> TinyTeacher:
    teacher = TinyTeacher()
    build_cache(teacher, teacher.head, BLOCKS, writer, batch_size=2, chunk_tokens=4, **options)
    return teacher


def build_part(directory, number, count, **changes):
    writer = writer_of(directory, part=Part(number, count), **changes)
    run(writer)
    return writer.finish()


def build_by_ranks(directory, world_size, *, part=WHOLE):
    """All ranks of a job, one after the other."""
    writers = [writer_of(directory, part=part, rank=rank, world_size=world_size) for rank in range(world_size)]
    for writer in writers:
        run(writer)
    return [writer.finish() for writer in writers]


@pytest.fixture
def whole(tmp_path):
    build(tmp_path / "whole", rows=ROWS)
    return contents(tmp_path / "whole")


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
def test_ranks_share_the_shards_and_leave_what_one_process_leaves(tmp_path, whole, world_size):
    indices = build_by_ranks(tmp_path / "c", world_size)
    assert contents(tmp_path / "c") == whole
    assert all(index == load_cache(tmp_path / "c") for index in indices)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_parts_copied_together_are_the_cache(tmp_path, whole, count):
    for number in range(count, 0, -1):
        build_part(tmp_path / str(number), number, count)
        assert "index.json" not in contents(tmp_path / str(number))
        shutil.copytree(tmp_path / str(number), tmp_path / "c", dirs_exist_ok=True)
    assert contents(tmp_path / "c") == {name: data for name, data in whole.items() if name != "index.json"}
    assert load_cache(tmp_path / "c").content() == whole["index.json"]
    verify(tmp_path / "c")
    KDCacheDataset(tmp_path / "c", preload=True)
    assert run(writer_of(tmp_path / "c")).shapes == []
    writer_of(tmp_path / "c").finish()
    assert contents(tmp_path / "c") == whole


def test_two_builds_in_one_folder_share_the_work_and_neither_breaks(tmp_path, whole):
    """One is ahead by a shard, then the other overtakes it: nothing is lost, removed or computed for nothing."""
    first, second = writer_of(tmp_path / "c"), writer_of(tmp_path / "c")
    shapes = {}

    def overtaken(done, total):
        if done == 3:  # the first builds its second shard as the other builds all the rest
            shapes["second"] = len(run(second).shapes)
            second.finish()

    shapes["first"] = len(run(first, progress=overtaken).shapes)
    first.finish()
    assert shapes["first"] + shapes["second"] < 2 * 9
    assert contents(tmp_path / "c") == whole


def test_a_temporary_file_goes_when_its_shard_is_there(tmp_path, whole):
    """Until then its builder may be alive; from then on nobody needs it."""
    living = tmp_path / "c" / ".shard-00001.safetensors.here.7.1.tmp"
    living.parent.mkdir()
    living.write_bytes(b"half")
    build_part(tmp_path / "c", 1, 2)
    assert living.exists()
    build_part(tmp_path / "c", 2, 2)
    assert contents(tmp_path / "c") == whole


@pytest.mark.parametrize("name", ["shard-00002.safetensors", "index.json"])
def test_a_builder_whose_temporary_file_is_removed_since_another_was_first_goes_on(tmp_path, whole, monkeypatch, name):
    first, second = writer_of(tmp_path / "c"), writer_of(tmp_path / "c")
    sync, half = os.fsync, f".{name}."

    def overtaken(descriptor):
        sync(descriptor)
        if any(left.startswith(half) for left in os.listdir(tmp_path / "c")):
            monkeypatch.undo()
            run(second)
            second.finish()
            assert contents(tmp_path / "c") == whole, "no temporary file either"

    monkeypatch.setattr(os, "fsync", overtaken)
    run(first)
    first.finish()
    assert contents(tmp_path / "c") == whole and os.fsync is sync


def test_of_two_builders_that_round_otherwise_the_first_file_stays_and_the_cache_is_sound(tmp_path):
    one, other = writer_of(tmp_path), writer_of(tmp_path)
    rounded = TinyTeacher()
    rounded.embedding_VH = rounded.embedding_VH * (1 + 1e-6)
    other.is_there = lambda index: False  # it has looked before the first one wrote
    build_cache(TinyTeacher(), TinyTeacher().head, BLOCKS, one, batch_size=2, chunk_tokens=4)
    before = contents(tmp_path)
    build_cache(rounded, rounded.head, BLOCKS, other, batch_size=2, chunk_tokens=4)
    assert contents(tmp_path) == before
    for writer in (other, one):
        writer.finish()
        verify(tmp_path)
        KDCacheDataset(tmp_path, preload=True)


@pytest.mark.parametrize("damaged", [False, True])
def test_what_another_builder_finishes_while_a_folder_is_scanned_stays(tmp_path, monkeypatch, damaged):
    """New shards, or one in the place of a damaged file: both were not sound when the scan began."""
    other, rounded = writer_of(tmp_path), TinyTeacher()
    rounded.embedding_VH = rounded.embedding_VH * (1 + 1e-6)
    path = tmp_path / "shard-00000.safetensors"
    if damaged:
        path.write_bytes(b"no shard")
        other = writer_of(tmp_path)

    def scan_and_wait(*given):
        monkeypatch.undo()
        found = scan(*given)
        build_cache(rounded, rounded.head, BLOCKS, other, batch_size=2, chunk_tokens=4)
        other.finish()
        return found

    monkeypatch.setattr(write, "scan", scan_and_wait)
    writer = writer_of(tmp_path)
    before = contents(tmp_path)
    assert writer.missing == [0, 1, 2, 3, 4] and path.stat().st_size > 100
    run(writer)
    assert contents(tmp_path) == before
    verify(tmp_path)


@pytest.mark.parametrize("seed", range(12))
def test_jobs_that_die_at_any_moment_are_continued_by_any_number_of_ranks(tmp_path, whole, seed):
    """Each job: some ranks stop after some batches."""
    chance = random.Random(seed)
    part = Part(chance.randint(1, 2), 2) if seed % 3 == 0 else WHOLE
    recorded: set[str] = set()
    for _ in range(3):
        world_size = chance.randint(1, 4)
        writers = [writer_of(tmp_path / "c", part=part, rank=r, world_size=world_size) for r in range(world_size)]
        for writer in writers:
            try:
                run(writer, progress=stop_after(chance.randint(1, 4)))
            except Interrupted:
                half = f".shard-{writer.missing[0]:05d}.safetensors.{socket.gethostname()}.{2**22 + 5}.1.tmp"
                (tmp_path / "c" / half).write_bytes(b"half")
        now = {shard.file for shard in load_cache(tmp_path / "c").shards}
        assert recorded <= now
        recorded = now
    build_by_ranks(tmp_path / "c", chance.randint(1, 4), part=part)
    if part != WHOLE:
        build_by_ranks(tmp_path / "c", 1)
    assert contents(tmp_path / "c") == whole


def test_a_file_that_is_no_shard_or_is_cut_short_is_built_again(tmp_path, whole):
    build_part(tmp_path / "c", 1, 2)
    (tmp_path / "c" / "shard-00001.safetensors").write_bytes(b"unnamed")
    os.truncate(tmp_path / "c" / "shard-00002.safetensors", 50)
    assert writer_of(tmp_path / "c").missing == [1, 2, 3]
    build_by_ranks(tmp_path / "c", 1)
    assert contents(tmp_path / "c") == whole


def test_a_shard_lost_in_the_middle_costs_no_other(tmp_path, whole):
    build(tmp_path / "c", rows=ROWS)
    (tmp_path / "c" / "shard-00002.safetensors").unlink()
    writer = writer_of(tmp_path / "c", rank=0, world_size=2)
    assert writer.missing == [2] and writer.rounds == 3
    assert writer_of(tmp_path / "c", rank=1, world_size=2).missing == []
    assert "lacks its shard" in message(tmp_path / "c")
    run(writer)
    writer.finish()
    assert contents(tmp_path / "c") == whole


def test_every_rank_meets_the_others_equally_often(tmp_path):
    met = [0, 0, 0]
    writers = [writer_of(tmp_path, rank=rank, world_size=3) for rank in range(3)]
    for rank, writer in enumerate(writers):

        def barrier(rank=rank):
            met[rank] += 1

        run(writer, barrier=barrier)
    assert met == [3, 3, 3], "five shards on three ranks, and once at the end"


def test_progress_counts_the_rows_of_a_rank_and_of_a_part(tmp_path):
    seen = []
    writers = [writer_of(tmp_path / "ranks", rank=rank, world_size=2) for rank in range(2)]
    run(writers[1], progress=lambda *x: seen.append(x))
    assert (writers[1].rows, seen) == (6, [(2, 6), (3, 6), (5, 6), (6, 6)])
    with pytest.raises(Interrupted):
        run(writer_of(tmp_path / "part", part=Part(1, 2)), progress=stop_after(3))
    seen.clear()
    run(writer_of(tmp_path / "part", part=Part(1, 2)), progress=lambda *x: seen.append(x))
    assert seen == [(5, 8), (6, 8), (8, 8)], "with the shard that was there"


# ---- what can be wrong


def message(path, error=CacheError, opened=KDCacheDataset):
    with pytest.raises(error) as caught:
        opened(path)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text and text.endswith(".")
    return text


def test_a_cache_of_parts_says_what_is_missing(tmp_path):
    build_part(tmp_path, 1, 4)
    build_part(tmp_path, 4, 4)
    text = message(tmp_path)
    assert "has 3 of 5 shards and lacks 1, 2: " in text and "copy the files of all parts" in text


@pytest.mark.parametrize("opened", [KDCacheDataset, load_cache, writer_of])
def test_a_part_of_another_cache_is_refused(tmp_path, opened):
    build_part(tmp_path / "a", 1, 2)
    build_part(tmp_path / "b", 2, 2, teacher_digest="u" * 64)
    shutil.copy(tmp_path / "b" / "shard-00001.safetensors", tmp_path / "a")
    text = message(tmp_path / "a", CacheMismatch, opened)
    assert "shard-00001.safetensors' is shard 1 of another KD cache" in text


def test_building_in_a_folder_with_a_part_of_another_cache_changes_nothing(tmp_path):
    build_part(tmp_path, 1, 2)
    before = contents(tmp_path)
    for part in (WHOLE, Part(1, 2), Part(2, 2)):
        with pytest.raises(CacheMismatch, match=r"manifest.json: top_k: there 4, asked for 5"):
            writer_of(tmp_path, part=part, top_k=5)
    assert contents(tmp_path) == before


def test_more_parts_than_shards_are_refused_with_their_number(tmp_path):
    with pytest.raises(ConfigError, match="part='1/6'.* has 5 shards of 3 rows; use fewer .*--rows-per-shard"):
        writer_of(tmp_path / "c", part=Part(1, 6))
    assert not (tmp_path / "c").exists()


def test_a_rank_that_sees_another_folder_is_told(tmp_path):
    zero = writer_of(tmp_path / "a", rank=0, world_size=2)
    with pytest.raises(CacheError, match="rank 1 does not find .*all ranks see"):
        writer_of(tmp_path / "b", rank=1, world_size=2)
    run(zero)
    with pytest.raises(CacheError, match="lacks shard-00001.safetensors; .*all ranks see"):
        zero.finish()
    assert "has 3 of 5 shards and lacks 1, 3: " in message(tmp_path / "a")
