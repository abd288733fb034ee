"""A cache at a URL: built, continued, read, streamed and verified as one in a folder is."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from qat_lora.cache import (
    CacheWriter,
    KDCacheDataset,
    Part,
    build_cache,
    load_cache,
    summarise,
    verify,
)
from qat_lora.cache import shards as shards_module
from qat_lora.cli.main import main
from qat_lora.errors import CacheError, CacheMismatch, RemoteError
from qat_lora.urls import Url, file_sizes
from tests.cache.conftest import TinyTeacher, blocks_of, build, manifest_of
from tests.cache.test_copies import no_fetching_threads, wait_until
from tests.elsewhere import Elsewhere

URL = "elsewhere://bucket/cache"


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    fsspec.filesystem("memory").store.clear()
    Elsewhere.reset()
    monkeypatch.setenv("QAT_LORA_CACHE_HOME", str(tmp_path / "home"))


def contents(url: str) -> dict[str, bytes]:
    folder = Url(url)
    return {name: (folder / name).read_bytes() for name in sorted(folder.sizes())}


def local(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def forget_copies() -> None:
    shutil.rmtree(os.environ["QAT_LORA_CACHE_HOME"], ignore_errors=True)
    Elsewhere.calls.clear()


def put(directory: Path, url: str = URL) -> None:
    """Copy a cache to a URL, as a person would."""
    for path in directory.iterdir():
        (Url(url) / path.name).write_bytes(path.read_bytes())
    Elsewhere.calls.clear()


def same(batch, other) -> bool:
    return batch.keys() == other.keys() and all(torch.equal(batch[name], other[name]) for name in batch)


def fetched() -> dict[int, int]:
    return {int(name[6:11]): n for (method, name), n in Elsewhere.calls.items() if method == "get_file"}


@pytest.mark.parametrize("scheme", ["memory", "elsewhere", "file", "local"])
def test_a_cache_built_at_a_url_has_the_bytes_of_one_in_a_folder(tmp_path, scheme) -> None:
    url = f"{scheme}://{tmp_path}/there/cache"
    build(tmp_path / "here")
    build(url)
    assert contents(url) == local(tmp_path / "here")
    assert build(url).shapes == [], "finished shards are not computed again"


def test_the_manifest_comes_first_and_the_index_last(monkeypatch) -> None:
    order = []
    move = Elsewhere.mv

    def noted(self, source, target):
        if ".probe" not in target:
            order.append(target.rsplit("/", 1)[1])
        move(self, source, target)

    monkeypatch.setattr(Elsewhere, "mv", noted)
    build(URL)
    assert order == ["manifest.json", *(f"shard-0000{n}.safetensors" for n in range(3)), "index.json"]


@pytest.mark.parametrize("method", ["mv", "pipe_file"])
@pytest.mark.parametrize("name", ["shard-00001", "manifest", "index"])
def test_a_build_whose_line_breaks_goes_on_to_the_same_bytes(tmp_path, method, name) -> None:
    build(tmp_path / "whole")
    folder = Url(URL)
    Elsewhere.failing[method, name] = OSError("the line is down")
    with pytest.raises(RemoteError, match="the line is down"):
        build(URL)
    assert not [name for name in folder.sizes() if name.endswith(".tmp")]
    Elsewhere.failing.clear()
    build(URL)
    assert contents(URL) == local(tmp_path / "whole")


@pytest.mark.parametrize("rows_done", [2, 3, 5, 7])
def test_a_killed_build_at_a_url_goes_on_to_the_same_bytes(tmp_path, rows_done) -> None:
    url = f"file://{tmp_path}/killed"
    build(tmp_path / "whole")
    script = (
        "import os, signal\n"
        "from tests.cache.conftest import build\n"
        "def progress(done, total):\n"
        f"    if done == {rows_done}: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"build({url!r}, progress=progress)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    (tmp_path / "killed" / ".shard-00001.safetensors.77.tmp").write_bytes(b"half a shard")
    build(url)
    assert contents(url) == local(tmp_path / "whole")


def test_opening_and_describing_cost_two_calls_and_continuing_one_per_shard() -> None:
    build(URL, rows=60)
    Elsewhere.calls.clear()
    for act in (KDCacheDataset, summarise, lambda url: KDCacheDataset(url, split="train", eval_fraction=0.1)):
        Elsewhere.calls.clear()
        act(URL)
        assert sum(Elsewhere.calls.values()) == 2, Elsewhere.calls
    Elsewhere.calls.clear()
    CacheWriter(URL, manifest_of(blocks_of(60, last_length=3)))
    assert sum(Elsewhere.calls.values()) < 20 + 12, Elsewhere.calls


def test_another_cache_at_the_url_is_refused() -> None:
    build(URL)
    with pytest.raises(CacheMismatch, match="'elsewhere://bucket/cache' holds a KD cache of something else"):
        CacheWriter(URL, manifest_of(blocks_of(7, last_length=3), top_k=5))


@pytest.mark.parametrize("preload", [False, True])
@pytest.mark.parametrize("scheme", ["memory", "elsewhere", "file"])
def test_rows_batches_and_splits_are_those_of_the_folder(tmp_path, scheme, preload) -> None:
    build(tmp_path / "here", rows=31)
    url = f"{scheme}://{tmp_path}/there"
    put(tmp_path / "here", url)
    for split in ("train", "eval"):
        ours = KDCacheDataset(url, preload=preload, split=split, eval_fraction=0.3, seed=4)
        theirs = KDCacheDataset(tmp_path / "here", split=split, eval_fraction=0.3, seed=4)
        assert len(ours) == len(theirs)
        assert all(map(same, itertools.islice(ours.batches(4), 20), theirs.batches(4)))
        assert all(map(same, ours.eval_batches(4), theirs.eval_batches(4)))
        assert same(ours[2], theirs[2])
    wait_until(no_fetching_threads)


def test_each_shard_is_fetched_once_over_epochs_ranks_and_programs(tmp_path) -> None:
    build(tmp_path, rows=31)
    put(tmp_path)
    for rank in range(2):
        dataset = KDCacheDataset(URL, rank=rank, world_size=2)
        for _ in itertools.islice(dataset.batches(3), 12):
            pass
    wait_until(no_fetching_threads)
    assert fetched() == dict.fromkeys(range(11), 1)


def test_a_small_disk_streams_a_large_cache(tmp_path) -> None:
    build(tmp_path / "here", rows=60)
    put(tmp_path / "here")
    size = load_cache(URL).shards[0].size_bytes
    home = tmp_path / "home" / "shards"
    dataset = KDCacheDataset(URL, shuffle_shards=2, disk_cache_gb=4 * size / 1e9)
    most, rows = 0, []
    for batch in itertools.islice(dataset.batches(3), 18):  # from the next on, the next epoch is fetched
        rows += [tuple(row) for row in batch["input_ids"].tolist()]
        most = max(most, *(sum(file_sizes(folder).values()) for folder in home.iterdir()))
    assert len(set(rows)) == 54 and most <= 4 * size
    wait_until(no_fetching_threads)
    assert max(fetched().values()) == 1, "within a window a shard is fetched once"
    assert len(fetched()) == 20


def test_a_window_that_does_not_fit_is_said_and_served(tmp_path, caplog) -> None:
    build(tmp_path / "here", rows=31)
    put(tmp_path / "here")
    size = load_cache(URL).shards[0].size_bytes
    with caplog.at_level(logging.WARNING):
        dataset = KDCacheDataset(URL, disk_cache_gb=2 * size / 1e9)
    for words in ("needs 11 shards", "holds 2", "--shuffle-shards to at most 1"):
        assert words in caplog.text
    theirs = KDCacheDataset(tmp_path / "here")
    assert all(map(same, itertools.islice(dataset.batches(4), 16), theirs.batches(4)))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        KDCacheDataset(URL, shuffle_shards=1, disk_cache_gb=2 * size / 1e9)
    assert not caplog.text
    wait_until(no_fetching_threads)


def test_the_next_shard_is_on_its_way_while_one_is_read(tmp_path) -> None:
    build(tmp_path, rows=60)
    put(tmp_path)
    batches = KDCacheDataset(URL).eval_batches(1)
    next(batches)
    wait_until(lambda: fetched().keys() >= {0, 1})
    assert fetched() == {0: 1, 1: 1}
    for _ in range(3):
        next(batches)
    wait_until(lambda: 2 in fetched())
    wait_until(no_fetching_threads)


def test_a_shard_that_was_written_anew_is_never_mistaken(tmp_path) -> None:
    build(tmp_path / "old")
    build(tmp_path / "new", teacher=None, top_k=3)
    for folder in ("old", "new"):
        put(tmp_path / folder)
        ours, theirs = KDCacheDataset(URL), KDCacheDataset(tmp_path / folder)
        assert all(map(same, ours.eval_batches(2), theirs.eval_batches(2)))
    wait_until(no_fetching_threads)


def spoil(name: str, change) -> None:
    path = Url(URL) / name
    path.write_bytes(change(path.read_bytes()))


def test_a_damaged_shard_is_found_when_it_comes_by_verify_and_by_cache_info(tmp_path, capsys) -> None:
    build(tmp_path)
    put(tmp_path)
    assert verify(URL).complete
    verify(URL)
    spoil("shard-00001.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    dataset = KDCacheDataset(URL)
    for act in (lambda: verify(URL), lambda: dataset[4], lambda: KDCacheDataset(URL, preload=True)):
        with pytest.raises(CacheError, match="'elsewhere://bucket/cache/shard-00001.safetensors' is damaged: sha256"):
            act()
    assert main(["cache", "info", URL, "--verify"]) == 2
    assert "shard-00001.safetensors' is damaged" in capsys.readouterr().err


def test_a_copy_that_has_gone_bad_is_fetched_again_where_it_is_checked(tmp_path) -> None:
    build(tmp_path)
    put(tmp_path)
    first = KDCacheDataset(URL)
    whole, path = first[0], first._shards._path(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    again = KDCacheDataset(URL)[0]
    assert all(torch.equal(whole[name], x) for name, x in again.items())


@pytest.mark.parametrize("step", ["check_shard", "read_header", "safe_open", "load_file"])
def test_a_copy_that_makes_room_before_it_is_opened_is_fetched_again(tmp_path, monkeypatch, step) -> None:
    build(tmp_path)
    put(tmp_path)
    act, lost = getattr(shards_module, step), []

    def after_a_loss(path, *args, **kwargs):
        if not lost:
            lost.append(path)
            path.unlink()
        return act(path, *args, **kwargs)

    monkeypatch.setattr(shards_module, step, after_a_loss)
    dataset = KDCacheDataset(URL, preload=step == "load_file")
    assert same(dataset[0], KDCacheDataset(tmp_path)[0]) and lost
    assert fetched()[0] == 2


@pytest.mark.parametrize("url", ["elsewhere://nobucket/x", "memory://nothing"])
def test_where_nothing_is_there_is_no_cache(url) -> None:
    for act in (KDCacheDataset, summarise, verify):
        with pytest.raises(CacheError, match=f"No manifest.json in '{url}'"):
            act(url)


def test_a_shard_that_is_gone_is_said_when_it_is_needed(tmp_path) -> None:
    build(tmp_path)
    put(tmp_path)
    (Url(URL) / "shard-00001.safetensors").unlink()
    with pytest.raises(CacheError, match="lacks its shard 'elsewhere://bucket/cache/shard-00001.safetensors'"):
        KDCacheDataset(URL)[4]


def test_what_is_said_of_a_cache_is_what_is_said_of_its_folder_and_fetches_no_shard(tmp_path, capsys) -> None:
    build(tmp_path, rows=31)
    put(tmp_path)
    assert summarise(URL) == summarise(tmp_path)
    assert main(["cache", "info", URL]) == 0
    assert URL in capsys.readouterr().out
    assert fetched() == {}


def test_a_dataset_can_be_given_to_a_worker(tmp_path) -> None:
    build(tmp_path)
    put(tmp_path)
    dataset = KDCacheDataset(URL)
    before = dataset[0]
    assert same(pickle.loads(pickle.dumps(dataset))[0], before)


def test_what_was_built_here_is_not_fetched(tmp_path) -> None:
    build(URL)
    assert len(list(itertools.islice(KDCacheDataset(URL).batches(2), 8))) == 8
    assert fetched() == {}


def rows_into(writer, teacher) -> None:
    build_cache(teacher, teacher.head, blocks_of(13, last_length=3), writer, batch_size=2, chunk_tokens=4)


def test_ranks_and_parts_make_one_cache_at_a_url(tmp_path) -> None:
    build(tmp_path / "whole", rows=13)
    manifest, teacher = manifest_of(blocks_of(13, last_length=3)), TinyTeacher()
    for number in (1, 2):
        writers = [CacheWriter(URL, manifest, part=Part(number, 2), rank=rank, world_size=2) for rank in range(2)]
        for writer in writers:
            rows_into(writer, teacher)
        for writer in writers:
            writer.finish()
    ours, theirs = KDCacheDataset(URL), KDCacheDataset(tmp_path / "whole")
    assert all(map(same, ours.eval_batches(4), theirs.eval_batches(4)))
    assert CacheWriter(URL, manifest).missing == []
    assert contents(URL) == local(tmp_path / "whole")


@pytest.mark.parametrize("window", [1, 2, 3, 100])
def test_windows_of_shards_lose_and_repeat_nothing_and_resume(tmp_path, window) -> None:
    build(tmp_path, rows=33)
    dataset = KDCacheDataset(tmp_path, shuffle_shards=window, seed=1)
    epochs = [dataset.batch_rows(33, epoch).tolist() for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(33)) and epochs[0] != epochs[1]
    assert dataset.batch_rows(5, 3, 4).tolist() == (epochs[0] + epochs[1])[15:35]
    shards = [row // 3 for row in epochs[0]]
    for first in range(0, 33, 3 * window):
        assert len(set(shards[first : first + 3 * window])) == len(shards[first : first + 3 * window]) // 3
    ranks = [KDCacheDataset(tmp_path, shuffle_shards=window, seed=1, rank=r, world_size=2) for r in range(2)]
    joined = [row for m in range(3) for rank in ranks for row in rank.batch_rows(5, m).tolist()]
    assert joined == epochs[0][:30]


def test_the_order_of_windows_is_written_down_here(tmp_path) -> None:
    """Frozen, as the order over the whole cache is."""
    build(tmp_path, rows=7)
    rows = KDCacheDataset(tmp_path, shuffle_shards=1, seed=5).batch_rows(7, 0).tolist()
    source = np.random.RandomState([5, 0])
    shards, keys = source.permutation(3).tolist(), source.permutation(7).tolist()
    assert rows == sorted(range(7), key=lambda row: (shards.index(row // 3), keys[row]))


def test_a_copy_that_has_gone_bad_is_not_uploaded_and_not_kept(tmp_path) -> None:
    build(tmp_path / "whole")
    build(URL)
    (copy,) = (tmp_path / "home").glob(f"shards/*/{load_cache(URL).shards[1].sha256}.safetensors")
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    (Url(URL) / "shard-00001.safetensors").unlink()
    build(URL)
    assert contents(URL) == local(tmp_path / "whole")
    verify(URL)
    assert copy.read_bytes() == (tmp_path / "whole" / "shard-00001.safetensors").read_bytes()


def test_a_copy_whose_header_has_gone_bad_is_fetched_again(tmp_path) -> None:
    build(tmp_path / "whole")
    build(URL)
    (copy,) = (tmp_path / "home").glob(f"shards/*/{load_cache(URL).shards[1].sha256}.safetensors")
    copy.write_bytes(b"x" * copy.stat().st_size)
    ours, theirs = (next(KDCacheDataset(place).batches(7)) for place in (URL, tmp_path / "whole"))
    assert same(ours, theirs)


def test_the_split_of_a_cache_at_a_url_reads_no_shard(tmp_path) -> None:
    build(tmp_path)
    put(tmp_path)
    for shard in load_cache(URL).shards:
        (Url(URL) / shard.file).unlink()
    ours = KDCacheDataset(URL, split="train", eval_fraction=0.3)
    assert ours._rows.tolist() == KDCacheDataset(tmp_path, split="train", eval_fraction=0.3)._rows.tolist()


def test_a_cache_in_a_folder_needs_no_place_for_copies(tmp_path, monkeypatch) -> None:
    build(tmp_path)
    monkeypatch.setenv("QAT_LORA_DISK_CACHE_GB", "abc")
    assert len(KDCacheDataset(tmp_path)) == 7


def test_other_acts_on_caches_say_that_they_take_folders(capsys) -> None:
    assert main(["cache", "merge", "file:///there/c", "--output", "somewhere"]) == 2
    assert "file:///there/c is a URL, but merge, split and convert read folders" in capsys.readouterr().err
