"""kill -9 at random moments of real commands: whoever runs them again gets the bytes of a run that nobody killed.

`make kills` kills 200 builds, and a quarter as many of each act; KILLS says how many, KILL_SEED which moments.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from qat_lora.cli.main import main
from tests.cache.killing import contents
from tests.cli.test_cache_operations import made_older

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS") or 200)


@pytest.fixture
def build_argv(teacher_dir, text_file) -> list[str]:
    """Twelve shards of a tiny transformer's predictions."""
    return [
        "cache", "--teacher", str(teacher_dir), "--data", str(text_file), "--seq-len", "24", "--top-k", "8",
        "--temperatures", "1.0,2.0", "--rows-per-shard", "4", "--max-rows", "46", "--batch-size", "2",
        "--output", "{output}", "--device", "cpu", "--quiet",
    ]  # fmt: skip


def killed(argv: list[str], folder: Path, kills: int) -> dict:
    """Run `tests.cache.killing`, print what it says, and return it."""
    seed = int(os.environ.get("KILL_SEED") or random.SystemRandom().randrange(2**32))
    print(f"KILL_SEED={seed}")
    folder.mkdir()
    job = {"argv": argv, "folder": str(folder), "kills": kills, "seed": seed}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cache.killing", json.dumps(job)],
        capture_output=True, text=True, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()[-1]
    print(said)
    return json.loads(said)


def test_builds_that_are_killed_go_on_to_the_same_bytes(build_argv, tmp_path) -> None:
    said = killed(build_argv, tmp_path / "k", 6)
    assert said["kills"] == 6 and said["files"] == 14 and said["compared"] >= 1
    assert len(contents(tmp_path / "k" / "killed")) == 14


@pytest.fixture(params=["merge", "split", "convert", "convert an older one"])
def act_argv(request, build_argv, teacher_dir, text_file, tmp_path) -> list[str]:
    """A command on caches, of as many shards."""
    assert main([arg.replace("{output}", f"{tmp_path}/c") for arg in build_argv]) == 0
    if request.param == "merge":
        assert main(["cache", "split", f"{tmp_path}/c", "--rows", "17", "--output", f"{tmp_path}/s", "--quiet"]) == 0
        act = ["merge", f"{tmp_path}/s/rest", f"{tmp_path}/s/first"]
    elif request.param == "split":
        act = ["split", f"{tmp_path}/c", "--parts", "3"]
    elif request.param == "convert":
        act = ["convert", f"{tmp_path}/c", "--top-k", "4", "--rows-per-shard", "3"]
    else:
        older = made_older(tmp_path / "older", teacher_dir, text_file)
        given = [str(older), "--teacher", str(teacher_dir), "--rows-per-shard", "1"]
        return ["convert_older_cache.py", *given, "--output", "{output}"]
    return ["cache", *act, "--output", "{output}", "--quiet"]


def test_acts_on_caches_that_are_killed_go_on_to_the_same_bytes(act_argv, tmp_path) -> None:
    said = killed(act_argv, tmp_path / "k", 3)
    assert said["kills"] == 3 and said["files"] >= 13


@pytest.mark.slow
def test_acts_on_caches_that_are_killed_often_go_on_to_the_same_bytes(act_argv, tmp_path) -> None:
    wanted = max(1, KILLS // 4)
    said = killed(act_argv, tmp_path / "k", wanted)
    assert said["kills"] == wanted and said["files"] >= 13


@pytest.mark.slow
def test_two_hundred_builds_that_are_killed_go_on_to_the_same_bytes(build_argv, tmp_path) -> None:
    said = killed(build_argv, tmp_path / "k", KILLS)
    assert said["kills"] == KILLS and said["files"] == 14
    if KILLS >= 200:  # moments at which something is half done were among them
        assert {"a file half written", "shards"} <= set(said["left"])
