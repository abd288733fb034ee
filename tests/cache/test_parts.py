"""Parts and ranks write side by side; what they leave, in whatever state, becomes the cache of one process."""

from __future__ import annotations

import json
import os
import random
import shutil

import pytest

from qat_lora.cache import (
    CacheManifest,
    CacheWriter,
    KDCacheDataset,
    Part,
    build_cache,
    load_manifest,
)
from qat_lora.cache.format import sealed
from qat_lora.cache.parts import WHOLE, named, record_name
from qat_lora.errors import CacheError, CacheMismatch, ConfigError
from tests.cache.conftest import TinyTeacher, blocks_of, build, edit_record, manifest_of
from tests.cache.test_writer import Interrupted, contents, stop_after

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
    manifests = build_by_ranks(tmp_path / "c", world_size)
    assert contents(tmp_path / "c") == whole
    assert all(manifest == load_manifest(tmp_path / "c") for manifest in manifests)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_parts_copied_together_are_the_cache_and_are_made_one(tmp_path, whole, count):
    for number in range(count, 0, -1):
        build_part(tmp_path / str(number), number, count)
        shutil.copytree(tmp_path / str(number), tmp_path / "c", dirs_exist_ok=True)
    parts = [name for name in contents(tmp_path / "c") if name.startswith("manifest")]
    assert parts == [f"manifest.part-{number}-of-{count}.json" for number in range(1, count + 1)]
    assert sealed(load_manifest(tmp_path / "c").to_json()) == whole["manifest.json"]
    KDCacheDataset(tmp_path / "c", preload=True).verify()
    assert run(writer_of(tmp_path / "c")).shapes == []
    assert contents(tmp_path / "c") == whole


def test_parts_may_be_built_into_one_folder_at_the_same_time(tmp_path, whole):
    first = writer_of(tmp_path / "c", part=Part(1, 2))
    writing = tmp_path / "c" / ".shard-00002.safetensors.77.tmp"
    recording = tmp_path / "c" / ".manifest.part-1-of-2.json.77.tmp"
    for path in (writing, recording):
        path.write_bytes(b"half")
    run(writer_of(tmp_path / "c", part=Part(2, 2)))
    assert writing.exists() and recording.exists(), "another part's writer may be alive"
    run(first)
    first = writer_of(tmp_path / "c", part=Part(1, 2))
    assert first.missing == [] and not writing.exists() and not recording.exists()
    writer_of(tmp_path / "c").finish()
    assert contents(tmp_path / "c") == whole


@pytest.mark.parametrize("seed", range(12))
def test_jobs_that_die_at_any_moment_are_gone_on_with_by_any_number_of_ranks(tmp_path, whole, seed):
    """Each job: some ranks stop after some batches, or between any two files that rank 0 writes or removes."""
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
                (tmp_path / "c" / f".shard-{writer.missing[0]:05d}.safetensors.{writer.rank}.tmp").write_bytes(b"half")
        now = {record.file for record in load_manifest(tmp_path / "c").shards}
        assert recorded <= now
        recorded = now
    build_by_ranks(tmp_path / "c", chance.randint(1, 4), part=part)
    if part != WHOLE:
        run(writer_of(tmp_path / "c"))
    assert contents(tmp_path / "c") == whole


def test_a_record_that_another_job_takes_away_while_we_read_is_no_damage(tmp_path, monkeypatch):
    """Two parts in one folder that end together: one unites its ranks' records as the other reads them all."""
    other = [writer_of(tmp_path, part=Part(2, 2), rank=rank, world_size=2) for rank in range(2)]
    for writer in other:
        run(writer)
    writer = writer_of(tmp_path, part=Part(1, 2))
    run(writer)
    read, others = CacheManifest.read, [other[0]]

    def reading(path):
        if "part-2-of-2.rank" in path.name and others:
            others.pop().finish()
        return read(path)

    monkeypatch.setattr(CacheManifest, "read", reading)
    writer.finish()
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.glob("manifest*")) == [record_name(Part(n, 2)) for n in (1, 2)]
    assert load_manifest(tmp_path).complete


def test_consolidating_loses_no_record_wherever_it_stops(tmp_path, whole, monkeypatch):
    """The union is written before its sources go."""
    writers = [writer_of(tmp_path / "c", rank=rank, world_size=3) for rank in range(3)]
    for writer in writers:
        run(writer)
    unlink = type(tmp_path).unlink
    left = 1

    def stopping(path, **options):
        nonlocal left
        if path.name.startswith("manifest"):
            left -= 1
            if left < 0:
                raise Interrupted
        unlink(path, **options)

    monkeypatch.setattr(type(tmp_path), "unlink", stopping)
    with pytest.raises(Interrupted):
        writers[0].finish()
    monkeypatch.undo()
    assert len(load_manifest(tmp_path / "c").shards) == 5
    assert run(writer_of(tmp_path / "c")).shapes == []
    assert contents(tmp_path / "c") == whole


def test_a_shard_without_a_record_or_that_is_cut_short_is_built_again(tmp_path, whole):
    build_part(tmp_path / "c", 1, 2)
    (tmp_path / "c" / "shard-00001.safetensors").write_bytes(b"unnamed")
    os.truncate(tmp_path / "c" / "shard-00002.safetensors", 50)
    assert writer_of(tmp_path / "c").missing == [1, 2, 3]
    run(writer_of(tmp_path / "c"))
    assert contents(tmp_path / "c") == whole


def test_a_shard_lost_in_the_middle_costs_no_other(tmp_path, whole):
    build(tmp_path / "c", rows=ROWS)
    (tmp_path / "c" / "shard-00002.safetensors").unlink()
    writer = writer_of(tmp_path / "c", rank=0, world_size=2)
    assert writer.missing == [2] and writer.rounds == 1
    assert writer_of(tmp_path / "c", rank=1, world_size=2).missing == []
    assert "interrupted after 4 of 5 shards" in message(tmp_path / "c")
    run(writer)
    writer.finish()
    assert contents(tmp_path / "c") == whole


def test_every_rank_meets_the_others_equally_often(tmp_path):
    met = [0, 0, 0]
    writers = [writer_of(tmp_path, rank=rank, world_size=3) for rank in range(3)]
    for rank, writer in enumerate(writers):

        def meet(rank=rank):
            met[rank] += 1

        run(writer, meet=meet)
    assert met == [2, 2, 2], "five shards on three ranks"


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


def test_parts_that_are_missing_or_unfinished_are_named(tmp_path):
    build_part(tmp_path, 1, 4)
    with pytest.raises(Interrupted):
        run(writer_of(tmp_path, part=Part(2, 4)), progress=stop_after(1))
    build_part(tmp_path, 4, 4)
    text = message(tmp_path)
    assert "has 3 of 5 shards: part 2/4 is unfinished, part 3/4 is missing; copy" in text
    assert "without --part" in text


@pytest.mark.parametrize("opened", [KDCacheDataset, load_manifest])
def test_parts_of_two_caches_name_both_files_and_all_that_differs(tmp_path, opened):
    build_part(tmp_path / "a", 1, 2)
    build_part(tmp_path / "b", 2, 2, top_k=5, teacher_digest="u" * 64)
    shutil.copytree(tmp_path / "b", tmp_path / "a", dirs_exist_ok=True)
    text = message(tmp_path / "a", CacheMismatch, opened)
    for word in (
        "part-1-of-2.json",
        "part-2-of-2.json",
        "top_k: 4 there, 5 here",
        f"teacher_digest: '{'t' * 64}' there",
    ):
        assert word in text, word


def test_building_in_a_folder_with_a_part_of_another_cache_changes_nothing(tmp_path):
    build_part(tmp_path, 1, 2)
    before = contents(tmp_path)
    for part in (WHOLE, Part(1, 2), Part(2, 2)):
        with pytest.raises(CacheMismatch, match=r"manifest.part-1-of-2.json: top_k: there 4, asked for 5"):
            writer_of(tmp_path, part=part, top_k=5)
    assert contents(tmp_path) == before


def test_parts_of_different_numbers_are_united_and_may_not_contradict_each_other(tmp_path, whole):
    build_part(tmp_path, 1, 2)  # 0 2 4
    build_part(tmp_path, 2, 4)  # 1
    assert "has 4 of 5 shards: part 4/4 is missing" in message(tmp_path)
    build_part(tmp_path, 3, 4)  # 2, which part 1/2 has too, and with the same bytes
    build_part(tmp_path, 4, 4)  # 3
    assert sealed(load_manifest(tmp_path).to_json()) == whole["manifest.json"]
    path = tmp_path / "manifest.part-3-of-4.json"
    data = json.loads(path.read_text())
    data["shards"][0]["sha256"] = "0" * 64
    edit_record(path, shards=data["shards"])
    text = message(tmp_path, CacheMismatch)
    for word in ("part-1-of-2.json", "part-3-of-4.json", "shard-00002.safetensors", "000000000000.. here"):
        assert word in text, word


def test_a_part_is_not_built_into_a_whole_cache(tmp_path):
    build(tmp_path, rows=ROWS)
    before = contents(tmp_path)
    with pytest.raises(CacheError, match="holds a whole cache.*part='1/2'.*without --part"):
        writer_of(tmp_path, part=Part(1, 2))
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
    assert "interrupted after 3 of 5 shards" in message(tmp_path / "a")


@pytest.mark.parametrize("files", [["x"], ["../shard-00000.safetensors"], ["shard-00005.safetensors"], [1, 0], [1, 1]])
def test_a_record_whose_shards_are_no_shards_is_damaged(tmp_path, files):
    build(tmp_path, rows=ROWS)
    data = json.loads((tmp_path / "manifest.json").read_text())
    data["shards"] = [
        {**data["shards"][0], "file": f if isinstance(f, str) else f"shard-{f:05d}.safetensors"} for f in files
    ]
    edit_record(tmp_path / "manifest.json", shards=data["shards"])
    assert "damaged (" in message(tmp_path)


def test_names_of_records_are_read_as_they_are_written():
    for part in (WHOLE, Part(3, 4)):
        for rank in (None, 0, 12):
            assert named(record_name(part, rank)) == (part, rank)
    assert record_name(Part(1, 4), 3) == "manifest.part-1-of-4.rank-3.json"
    for name in ("manifest.part-5-of-4.json", "manifest.part-0-of-0.json", "manifest.json.bak", "manifest.part-1.json"):
        assert named(name) is None, name
