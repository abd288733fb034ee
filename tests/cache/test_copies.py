"""Copies of remote shards: fetched once, checked, named by their content, limited, shared and fetched ahead."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import os
import pickle
import threading
import time
from pathlib import Path

import pytest

from qat_lora.cache import copies as fetch_module
from qat_lora.cache.copies import DiskCache, ShardFetcher
from qat_lora.cache.index import Shard
from qat_lora.cache.manifest import shard_name
from qat_lora.errors import CacheError, ConfigError, OutputError, RemoteError
from qat_lora.urls import Url
from tests.elsewhere import Elsewhere

FOLDER = Url("elsewhere://bucket/cache")


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    Elsewhere.reset()
    monkeypatch.setenv("QAT_LORA_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("QAT_LORA_DISK_CACHE_GB", raising=False)


def record_of(index: int, data: bytes) -> Shard:
    end = 8 + int.from_bytes(data[:8], "little")
    header, content = (hashlib.sha256(part).hexdigest() for part in (data[:end], data[end:]))
    return Shard(index, content, 1, 1, 0.0, 0.0, 0.0, {}, "", "", header, len(data))


def shards_there(count: int, size: int = 100, folder: Url = FOLDER) -> list[Shard]:
    records = []
    for index in range(count):
        data = bytes([index]) * size
        (folder / shard_name(index)).write_bytes(data)
        records.append(record_of(index, data))
    return records


def held(disk: DiskCache) -> set[str]:
    return {path.stem for path in (disk.home / "shards").glob("*/*.safetensors")}


def names(records, *indices) -> set[str]:
    return {records[i].sha256 for i in indices}


def test_a_shard_is_fetched_once(tmp_path) -> None:
    (record,) = shards_there(1)
    for disk in (DiskCache(), DiskCache(), DiskCache(home=tmp_path / "home")):
        assert disk.get(FOLDER, record).read_bytes() == b"\0" * 100
    assert Elsewhere.calls["get_file", record.file] == 1
    assert disk.get(FOLDER, record).is_relative_to(tmp_path / "home")


def test_a_shard_that_was_written_anew_and_one_of_another_url_are_other_files() -> None:
    disk = DiskCache()
    (old,) = shards_there(1)
    first = disk.get(FOLDER, old)
    (FOLDER / old.file).write_bytes(b"x" * 100)
    assert disk.get(FOLDER, record_of(0, b"x" * 100)).read_bytes() == b"x" * 100
    assert first.read_bytes() == b"\0" * 100
    (twin,) = shards_there(1, folder=Url("elsewhere://bucket/other"))
    assert twin == old and disk.path(Url("elsewhere://bucket/other"), twin) != first


@pytest.mark.parametrize(
    ("there", "words"),
    [(b"x" * 99, "has 99 bytes instead of 100"), (b"x" * 100, "is damaged: sha256"), (None, "lacks its shard")],
)
def test_what_comes_is_checked_and_not_kept_where_it_is_wrong(there, words) -> None:
    (record,) = shards_there(1)
    (FOLDER / record.file).unlink()
    if there is not None:
        (FOLDER / record.file).write_bytes(there)
    disk = DiskCache()
    with pytest.raises(CacheError, match=words) as caught:
        disk.get(FOLDER, record)
    assert str(FOLDER / record.file) in str(caught.value) and "\n" not in str(caught.value)
    assert held(disk) == set() and list(disk.home.glob("shards/*/.*")) == []
    (FOLDER / record.file).write_bytes(b"\0" * 100)
    assert disk.get(FOLDER, record).read_bytes() == b"\0" * 100


def test_a_copy_that_was_cut_short_is_fetched_again() -> None:
    (record,) = shards_there(1)
    os.truncate(DiskCache().get(FOLDER, record), 10)
    assert DiskCache().get(FOLDER, record).read_bytes() == b"\0" * 100


def test_a_failing_line_leaves_nothing() -> None:
    (record,) = shards_there(1)
    Elsewhere.failing["get_file", record.file] = TimeoutError("no answer")
    with pytest.raises(RemoteError, match="no answer"):
        DiskCache().get(FOLDER, record)
    Elsewhere.failing.clear()
    assert DiskCache().get(FOLDER, record).exists()


def test_those_not_used_for_longest_make_room() -> None:
    records, disk = shards_there(5), DiskCache(limit_gb=300e-9)
    for index in (0, 1, 2):
        disk.get(FOLDER, records[index])
    assert held(disk) == names(records, 0, 1, 2)
    disk.get(FOLDER, records[0])
    disk.get(FOLDER, records[3])
    assert held(disk) == names(records, 0, 2, 3)
    disk.get(FOLDER, records[4])
    assert held(disk) == names(records, 0, 3, 4)
    assert [Elsewhere.calls["get_file", r.file] for r in records] == [1] * 5


def test_copies_of_other_caches_make_room_too() -> None:
    other = Url("elsewhere://bucket/other")
    records, disk = shards_there(2), DiskCache(limit_gb=200e-9)
    (theirs,) = shards_there(1, folder=other)
    disk.get(other, theirs)
    for record in records:
        disk.get(FOLDER, record)
    assert held(disk) == names(records, 0, 1)


def parts_of_copies(disk: DiskCache) -> list[Path]:
    return list(disk.home.glob("shards/*/.*.tmp"))


@pytest.mark.parametrize("others", [0, 4])
def test_what_killed_fetches_left_makes_room_and_is_not_waited_for(others) -> None:
    records, disk = shards_there(8), DiskCache(limit_gb=350e-9)
    for record in records[others : others + 4]:
        copy = disk.path(FOLDER, record)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.with_name(f".{copy.name}.77.100.tmp").write_bytes(b"x" * 60)
    for record in records[:4]:
        disk.get(FOLDER, record)
    assert held(disk) == names(records, 1, 2, 3) and parts_of_copies(disk) == []


def test_what_a_killed_fetch_left_of_a_shard_goes_when_that_comes() -> None:
    (record,), disk = shards_there(1), DiskCache()
    copy = disk.get(FOLDER, record)
    copy.rename(copy.with_name(f".{copy.name}.77.100.tmp"))
    assert disk.get(FOLDER, record) == copy and parts_of_copies(disk) == []


def test_copies_make_room_for_what_another_is_fetching() -> None:
    records, disk = shards_there(4), DiskCache(limit_gb=350e-9)
    for record in records[:3]:
        disk.get(FOLDER, record)
    begins, waits = threading.Event(), threading.Event()

    def slow(_: Url, target: Path) -> None:
        begins.set()
        assert waits.wait(20)
        target.write_bytes(bytes([3]) * 100)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Url, "download", slow)
        other = threading.Thread(target=DiskCache(limit_gb=350e-9).get, args=(FOLDER, records[3]))
        other.start()
        assert begins.wait(20)
    assert len(parts_of_copies(disk)) == 1 and held(disk) == names(records, 1, 2)
    (more,) = shards_there(1, size=101)
    disk.get(FOLDER, more)
    assert held(disk) == {records[2].sha256, more.sha256} and len(parts_of_copies(disk)) == 1
    waits.set()
    other.join()
    assert held(disk) == {records[2].sha256, records[3].sha256, more.sha256}


def test_a_line_that_takes_its_part_away_is_told_as_it_is(monkeypatch) -> None:
    (record,) = shards_there(1)

    def download(source: Url, target: Path) -> None:
        target.unlink()
        raise FileNotFoundError(source)

    monkeypatch.setattr(Url, "download", download)
    with pytest.raises(CacheError, match="lacks its shard 'elsewhere://bucket/cache/shard-00000.safetensors'"):
        DiskCache().get(FOLDER, record)


def test_a_shard_larger_than_the_limit_is_one_clear_error() -> None:
    (record,) = shards_there(1)
    with pytest.raises(ConfigError, match="may hold 9e-08 GB, but shard-00000.safetensors has 1e-07 GB; raise --disk"):
        DiskCache(limit_gb=90e-9).get(FOLDER, record)


def test_without_a_limit_a_tenth_of_the_disk_stays_free(monkeypatch) -> None:
    records, disk = shards_there(3), DiskCache()
    free = 350

    def usage(_):
        taken = sum(path.stat().st_size for path in disk.home.glob("shards/*/*.safetensors"))
        return fetch_module.shutil._ntuple_diskusage(1000, 0, free - taken)

    monkeypatch.setattr(fetch_module.shutil, "disk_usage", usage)
    assert disk.capacity(100) == 2
    for record in records:
        disk.get(FOLDER, record)
    assert held(disk) == names(records, 1, 2) and disk.capacity(100) == 2


@pytest.mark.parametrize("limit_gb", [0, 250e-9])
def test_no_copy_gives_way_to_a_shard_that_is_not_as_large_as_the_index_says(limit_gb) -> None:
    records, disk = shards_there(3), DiskCache(limit_gb=limit_gb)
    for record in records[:2]:
        disk.get(FOLDER, record)
    claimed = dataclasses.replace(records[2], size_bytes=10**18 if not limit_gb else 200)
    with pytest.raises(CacheError, match=rf"has 100 bytes instead of {claimed.size_bytes} \(cut short\?\); restore"):
        disk.get(FOLDER, claimed)
    assert held(disk) == names(records, 0, 1)


def test_limit_and_folder_come_from_the_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("QAT_LORA_DISK_CACHE_GB", "2.5")
    assert DiskCache().limit_bytes == 2_500_000_000 and DiskCache(1.0).limit_bytes == 1_000_000_000
    monkeypatch.delenv("QAT_LORA_CACHE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert DiskCache().home == tmp_path / "qat_lora"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert DiskCache().home == Path.home() / ".cache" / "qat_lora"
    for wrong in ("lots", "-1", "inf"):
        monkeypatch.setenv("QAT_LORA_DISK_CACHE_GB", wrong)
        with pytest.raises(ConfigError, match=f"QAT_LORA_DISK_CACHE_GB='{wrong}' is no number of GB"):
            DiskCache()


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path) -> None:
    (record,) = shards_there(1)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OutputError, match="QAT_LORA_CACHE_HOME"):
        DiskCache(home=tmp_path / "file").get(FOLDER, record)


def _fetch_in_a_process(folder, record, start, results) -> None:
    start.wait()
    results.put(DiskCache().get(folder, record).read_bytes())


def test_processes_that_want_the_same_shard_do_not_disturb_each_other(tmp_path) -> None:
    folder = Url(f"file://{tmp_path}/there")
    (record,) = shards_there(1, size=100_000, folder=folder)
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(3), spawn.Queue()
    ranks = [spawn.Process(target=_fetch_in_a_process, args=(folder, record, start, results)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    assert [results.get(timeout=60) for _ in ranks] == [b"\0" * 100_000] * 3
    for rank in ranks:
        rank.join()
    assert len(list(DiskCache().home.glob("shards/*/*"))) == 1


def test_threads_that_want_the_same_shard_fetch_it_once() -> None:
    (record,) = shards_there(1)
    Elsewhere.gate.clear()
    disks = [DiskCache() for _ in range(3)]
    threads = [threading.Thread(target=disk.get, args=(FOLDER, record)) for disk in disks]
    for thread in threads:
        thread.start()
    Elsewhere.gate.set()
    for thread in threads:
        thread.join()
    assert Elsewhere.calls["get_file", record.file] == 1


def wait_until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def no_fetching_threads() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "qat_lora-fetch"]


def test_expected_shards_come_in_the_background_and_the_threads_end() -> None:
    records = shards_there(6)
    fetcher = ShardFetcher(FOLDER, records, DiskCache())
    fetcher.expect([4, 1, 3])
    wait_until(lambda: held(fetcher.disk) == names(records, 1, 3, 4))
    wait_until(no_fetching_threads)
    for index in (1, 3, 4):
        assert fetcher.path(index).read_bytes() == bytes([index]) * 100
    assert {name for method, name in Elsewhere.calls if method == "get_file"} == {records[i].file for i in (1, 3, 4)}
    assert max(count for (method, _), count in Elsewhere.calls.items() if method == "get_file") == 1


def test_what_is_no_longer_expected_is_not_begun_and_what_is_asked_for_does_not_queue() -> None:
    records = shards_there(12)
    fetcher = ShardFetcher(FOLDER, records, DiskCache())
    Elsewhere.gate.clear()
    fetcher.expect(range(10))
    wait_until(lambda: sum(n for (method, _), n in Elsewhere.calls.items() if method == "get_file") == 4)
    fetcher.expect([11])
    asked = threading.Thread(target=fetcher.path, args=(9,))
    asked.start()
    wait_until(lambda: Elsewhere.calls["get_file", records[9].file] == 1)
    Elsewhere.gate.set()
    asked.join()
    wait_until(no_fetching_threads)
    fetched = {int(name[6:11]) for (method, name) in Elsewhere.calls if method == "get_file"}
    assert fetched == {0, 1, 2, 3, 9, 11}


def test_a_failure_ahead_is_told_to_who_needs_the_shard() -> None:
    records = shards_there(2)
    Elsewhere.failing["get_file", records[0].file] = TimeoutError("no answer")
    fetcher = ShardFetcher(FOLDER, records, DiskCache())
    fetcher.expect([0, 1])
    wait_until(no_fetching_threads)
    with pytest.raises(RemoteError, match="no answer"):
        fetcher.path(0)
    Elsewhere.failing.clear()
    assert fetcher.path(0).exists() and fetcher.path(1).exists()


def test_fetching_ahead_takes_half_of_the_disk_cache_at_most() -> None:
    records = shards_there(8)
    fetcher = ShardFetcher(FOLDER, records, DiskCache(limit_gb=400e-9))
    fetcher.expect(range(8))
    wait_until(no_fetching_threads)
    assert held(fetcher.disk) == names(records, 0, 1)


def test_a_fetcher_can_be_given_to_another_process() -> None:
    records = shards_there(2)
    fetcher = ShardFetcher(FOLDER, records, DiskCache())
    fetcher.path(0)
    other = pickle.loads(pickle.dumps(fetcher))
    assert other.path(0) == fetcher.path(0) and other.path(1).exists()
