"""A cache that several ranks or machines build is, byte for byte, the one that one process builds."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from qat_lora.cache import KDCacheDataset
from qat_lora.cli.main import main
from qat_lora.runtime import LocalRuntime
from qat_lora.train.run import run_qat
from tests.conftest import qat_run
from tests.runtime.cache_ranks import ROWS, arguments
from tests.runtime.forked import Done, forked

pytestmark = pytest.mark.ranks


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def inputs(teacher_dir, text_file) -> tuple[Path, Path]:
    return teacher_dir, text_file


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> Path:
    """The cache as one process builds it."""
    folder = tmp_path_factory.mktemp("whole") / "cache"
    assert main(arguments(*inputs, folder)) == 0
    assert sorted(contents(folder)) == [
        "index.json",
        "manifest.json",
        *(f"shard-{i:05d}.safetensors" for i in range(7)),
    ]
    return folder


@pytest.fixture(scope="module")
def parts(inputs, tmp_path_factory) -> list[Path]:
    """Folders of three parts that were built apart."""
    folder = tmp_path_factory.mktemp("parts")
    for number in (1, 2, 3):
        assert main(arguments(*inputs, folder / str(number), part=f"{number}/3")) == 0
    return [folder / str(number) for number in (1, 2, 3)]


def together(parts: list[Path], folder: Path) -> Path:
    for part in parts:
        shutil.copytree(part, folder, dirs_exist_ok=True)
    return folder


def by_ranks(world_size: int, *words: str) -> Done:
    """The command on several ranks, with the flags of `arguments`."""
    return forked("qat_lora.cli.main:main", words, ranks=world_size)


def by_program(world_size: int, name: str, *words: object) -> Done:
    """A function of `tests.runtime.cache_ranks` on several ranks."""
    return forked(f"tests.runtime.cache_ranks:{name}", *words, ranks=world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_build_the_bytes_that_one_process_builds(world_size, inputs, whole, tmp_path) -> None:
    if world_size == 2:
        done = by_ranks(2, *arguments(*inputs, tmp_path / "c"))
    else:
        done = by_program(3, "slow", *inputs, tmp_path / "c")
    assert done.returncode == 0, done.stderr[-3000:]
    assert contents(tmp_path / "c") == contents(whole)
    said = f"{tmp_path / 'c'}: {ROWS} rows of 24 tokens, top 8\n"
    assert done.stdout.count(said) == done.stdout.count(" rows of ") == 1, "rank 0 alone speaks"
    own = {2: 28, 3: 20}[world_size]  # of rank 0: four shards, or three of which one is short
    assert done.stderr.count(f"cache (rank 0 of {world_size})") == 1
    assert f"{own}/{own}" in done.stderr


def test_a_rank_without_a_shard_waits_for_the_others(inputs, tmp_path) -> None:
    settings = arguments(*inputs, tmp_path / "one", max_rows=10)
    assert main(settings) == 0
    started = time.monotonic()
    done = by_ranks(3, *arguments(*inputs, tmp_path / "three", max_rows=10, barrier_timeout=60))
    assert done.returncode == 0 and time.monotonic() - started < 60, done.stderr[-3000:]
    assert contents(tmp_path / "three") == contents(tmp_path / "one")
    assert len(contents(tmp_path / "one")) == 4, "two shards"


@pytest.mark.parametrize("lacking", [False, True])
def test_parts_in_one_folder_are_the_cache_and_building_makes_them_one(
    lacking, inputs, whole, parts, tmp_path, capsys
) -> None:
    folder = together(parts[1:] if lacking else parts, tmp_path / "c")
    if not lacking:
        assert "index.json" not in contents(folder)
        assert KDCacheDataset(folder).index == KDCacheDataset(whole).index
    times = {path: path.stat().st_mtime_ns for path in folder.glob("shard*")}
    assert len(times) == (4 if lacking else 7)
    assert main(arguments(*inputs, folder)) == 0
    assert contents(folder) == contents(whole)
    assert {path: path.stat().st_mtime_ns for path in times} == times, "what is there is not built again"
    said = f"{folder}: {ROWS} rows of 24 tokens, top 8\nnext: qat-lora qat --cache-dir {folder}\n"
    assert capsys.readouterr().out == said


def test_a_part_says_what_it_is_and_what_remains(inputs, parts, tmp_path, capsys) -> None:
    assert main(arguments(*inputs, tmp_path / "c", part="3/3")) == 0
    assert capsys.readouterr().out == (
        f"{tmp_path / 'c'}: part 3/3, 16 of {ROWS} rows of 24 tokens, top 8; "
        "copy the files of all 3 parts into one folder, which is the cache\n"
    )
    names = ["manifest.json", "shard-00002.safetensors", "shard-00005.safetensors"]
    assert sorted(contents(tmp_path / "c")) == names


def test_ranks_build_a_part_as_one_process_builds_it(inputs, parts, tmp_path) -> None:
    done = by_ranks(2, *arguments(*inputs, tmp_path / "c", part="1/3"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert contents(tmp_path / "c") == contents(parts[0])
    assert "part 1/3, 20 of 52 rows" in done.stdout
    assert "cache 1/3 (rank 0 of 2)" in done.stderr and "12/12" in done.stderr, "shards 0 and 6"


def test_training_reads_parts_as_it_reads_the_whole(whole, parts, tmp_path) -> None:
    folder = together(parts, tmp_path / "c")
    for preload in (False, True):
        ours, theirs = (KDCacheDataset(each, preload=preload).batches(ROWS) for each in (folder, whole))
        a, b = next(ours), next(theirs)
        assert all(torch.equal(a[name], b[name]) for name in b)
    runs = [run_qat(qat_run(each, tmp_path / each.parent.name, loop={"max_steps": 2}), LocalRuntime("cpu"))
            for each in (folder, whole)]  # fmt: skip
    losses = [[row["loss"] for row in run.losses.rows] for run in runs]
    assert losses[0][1:] == losses[1][1:] and len(losses[0]) > 1


def test_a_killed_job_goes_on_with_any_number_of_ranks_to_the_same_bytes(inputs, whole, tmp_path) -> None:
    done = by_program(2, "killed", *inputs, tmp_path / "one")
    assert done.codes[1] == -signal.SIGKILL
    left = sorted(contents(tmp_path / "one"))
    assert "manifest.json" in left and any(name.startswith(".shard-00003.safetensors") for name in left)
    recorded = {name for name in left if name.startswith("shard")}
    assert {"shard-00000.safetensors", "shard-00001.safetensors"} <= recorded < set(contents(whole))
    with pytest.raises(Exception, match=f"has {len(recorded)} of 7 shards"):
        KDCacheDataset(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "three")  # keeps the times of its files
    before = {name: (tmp_path / "one" / name).stat().st_mtime_ns for name in recorded}

    assert main(arguments(*inputs, tmp_path / "one")) == 0
    done = by_ranks(3, *arguments(*inputs, tmp_path / "three"))
    assert done.returncode == 0, done.stderr[-3000:]
    for folder in (tmp_path / "one", tmp_path / "three"):
        assert contents(folder) == contents(whole), folder.name
        assert {name: (folder / name).stat().st_mtime_ns for name in recorded} == before, "no finished shard is lost"


def test_ranks_that_were_given_different_settings_are_told_before_anything_is_written(inputs, tmp_path) -> None:
    done = by_program(2, "disagreeing", *inputs, tmp_path / "c")
    assert done.returncode != 0
    for rank in (0, 1):
        sentence = f"qat-lora: error (rank {rank}): the ranks would not build the same cache in {tmp_path / 'c'}: "
        assert sentence in done.stderr
    assert not (tmp_path / "c").exists()
