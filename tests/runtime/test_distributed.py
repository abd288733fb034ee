"""Several ranks by torch.distributed: each the same model, together one device with the whole batch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qat_lora.cli import commands
from qat_lora.config import LoopConfig, QatRun
from qat_lora.errors import CheckpointError, ConfigError
from qat_lora.runtime import LocalRuntime
from qat_lora.train.checkpoint import load_checkpoint
from qat_lora.train.execution import with_global_batch
from qat_lora.train.run import run_qat, run_recovery
from tests.conftest import SEQ_LEN, cache_run, qat_run
from tests.runtime import ranks
from tests.runtime.forked import Done, forked

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]


def on_ranks(world_size: int, folder: Path, function: str, *arguments: object) -> list[dict[str, Any]]:
    """Run a function of `tests.runtime.ranks`, or of another module, on forked ranks; what each of them found."""
    done = forked_in(world_size, folder, function, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return found_in(folder)


def forked_in(world_size: int, folder: Path, function: str, *arguments: object) -> Done:
    folder.mkdir(parents=True, exist_ok=True)
    name = function if ":" in function else f"tests.runtime.ranks:{function}"
    return forked(name, folder, *arguments, ranks=world_size)


def found_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def launched(world_size: int, folder: Path, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True, exist_ok=True)
    return under_torchrun(world_size, "-m", "tests.runtime.ranks", name, folder, *arguments)


def under_torchrun(world_size: int, *words: object) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)),
        *map(str, words),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("stage", "world_size"), [("qat", 2), ("recover", 4)])
def test_ranks_hold_equal_bits_and_what_one_device_would_hold(
    stage, world_size, tmp_path, cache_dir, student, alone
) -> None:
    """20 steps with accumulation 2, clipping that clips, warm-up, anchor rows, a moving average and evaluations."""
    found = on_ranks(world_size, tmp_path, "train", stage, cache_dir, student)
    assert [each["rank"] for each in found] == list(range(world_size))
    first = found[0]
    for other in found[1:]:
        for part in ("trained", "ema", "losses", "kl"):
            assert other[part] == first[part], part
    expected = alone[stage]
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert first["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-3)  # before clipping
    assert first["kl"] == pytest.approx(expected["kl"], rel=1e-4)
    for name, values in expected["trained"].items():
        largest = max(abs(value) for value in values)
        assert first["trained"][name] == pytest.approx(values, abs=2e-3 * largest), name
    parameters = sum(len(values) for values in expected["trained"].values())
    assert first["reduced_bytes"] == ranks.STEPS * 4 * parameters, "gradients of what is trained, once per step"


def test_a_barrier_that_is_not_reached_names_itself_and_who_is_missing(tmp_path) -> None:
    forked_in(2, tmp_path, "late")
    error = found_in(tmp_path)[0]["error"]
    assert error.startswith("DeviceError: rank 0 lost the others at barrier 'before_final_save' after 3 s (")
    assert "Ranks 1 failed" in error
    assert error.endswith("look at their messages first; a slow start may need a longer --barrier-timeout.")


def test_a_rank_that_is_gone_in_the_middle_of_a_sum_is_told_of(tmp_path) -> None:
    forked_in(2, tmp_path, "lost")
    (error,) = [each["error"] for each in found_in(tmp_path)]
    assert error.startswith("DeviceError: rank 0 lost another rank in a sum over all of them (")
    assert error.endswith("look at their messages first; --resume continues from the last checkpoint.")


def test_a_killed_rank_ends_the_job_and_the_run_goes_on_with_as_many_ranks_or_one(
    tmp_path, cache_dir, student, alone
) -> None:
    whole = on_ranks(2, tmp_path / "whole", "train", "recover", cache_dir, student)[0]
    started = time.monotonic()
    done = launched(2, tmp_path / "cut off", "killed", cache_dir, student)
    seconds = time.monotonic() - started
    assert done.returncode != 0 and seconds < 60, seconds
    assert "Signal 9 (SIGKILL)" in done.stderr
    assert load_checkpoint(tmp_path / "cut off" / "run" / "last.pt")["progress"]["step"] == 5
    shutil.copytree(tmp_path / "cut off", tmp_path / "by one")
    two = on_ranks(2, tmp_path / "cut off", "resumed", cache_dir, student)[0]
    assert two["trained"] == whole["trained"]
    assert two["losses"] == pytest.approx(whole["losses"], rel=1e-8), "the part before was read back from loss.csv"
    assert json.loads((tmp_path / "cut off" / "run" / "summary.json").read_text())["launch_steps"] == 15
    (one,) = on_ranks(1, tmp_path / "by one", "resumed", cache_dir, student)
    for name, values in alone["recover"]["trained"].items():
        largest = max(abs(value) for value in values)
        assert one["trained"][name] == pytest.approx(values, abs=2e-3 * largest), name


def test_ranks_that_were_given_different_settings_are_told_before_the_first_step(tmp_path, cache_dir, student) -> None:
    earlier = [tmp_path / "run" / name for name in ("last.pt", "loss.csv")]
    (tmp_path / "run").mkdir()
    for path in earlier:
        path.write_text("of an earlier run")
    for each in on_ranks(2, tmp_path, "disagreeing", cache_dir, student):
        assert each["error"].startswith("the ranks do not start from the same: their settings, caches, models, weights")
    assert [path.read_text() for path in earlier] == ["of an earlier run"] * 2, "a run that is refused replaces nothing"


@pytest.mark.parametrize("what", ["cache", "student"])
def test_ranks_that_find_other_files_are_told_before_the_first_step(
    what, tmp_path, cache_dir, student, teacher_dir, text_file
) -> None:
    """Adapters begin equal whatever they are put on: nothing else would notice."""
    commands.cache(cache_run(teacher_dir, text_file, tmp_path / "other", top_k=8, max_rows=40))
    longer = run_qat(qat_run(cache_dir, tmp_path / "longer", loop={"max_steps": 4}), LocalRuntime("cpu")).best
    caches, students = f"{cache_dir},{tmp_path / 'other'}", f"{student},{longer}"
    for each in on_ranks(2, tmp_path, "elsewhere", what, caches, students):
        assert each["error"].startswith("the ranks do not start from the same: their settings, caches, models, weights")


def test_a_rank_that_fails_takes_the_job_down_with_its_own_words(tmp_path) -> None:
    started = time.monotonic()
    done = launched(2, tmp_path, "refused")
    assert done.returncode != 0 and time.monotonic() - started < 60
    assert "ValueError: only rank 1 knows what is wrong" in done.stderr


def test_the_script_runs_under_torchrun_and_only_rank_0_speaks(tmp_path, cache_dir) -> None:
    done = under_torchrun(
        2, "scripts/train_qat.py", "--cache-dir", cache_dir, "--output", tmp_path / "qat", "--device", "cpu",
        "--preset", "q2_g32", "--max-steps", 2, "--batch-size", 2, "--global-batch-size", 8, "--eval-rows", 4,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("held-out KL") == 1
    assert done.stderr.count("effective batch: 2 rows x 2 micro-batches x 2 devices = 8 rows") == 1
    assert done.stderr.count("qat ") == 1, "one bar"
    rows = (tmp_path / "qat" / "loss.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "0", "2"], "each row once"
    summary = json.loads((tmp_path / "qat" / "summary.json").read_text())
    assert summary["tokens"] == 2 * 8 * SEQ_LEN


def test_a_command_that_cannot_share_its_work_says_so(tmp_path) -> None:
    words = ["eval", "--model", "embedded", "--output", str(tmp_path / "f.json")]
    done = forked("qat_lora.cli.main:main", words, ranks=2)
    assert done.returncode != 0
    assert "qat-lora: error (rank 0): WORLD_SIZE=2, but this command runs on one device" in done.stderr


def test_a_run_is_resumed_with_as_many_rows_per_step_or_refused(tmp_path, cache_dir, student) -> None:
    def launch(how: str, **loop):
        run = ranks.settings("recover", cache_dir, tmp_path, student, 1, **loop)
        return run_recovery(run, LocalRuntime("cpu"), launch=how).state

    launch("new", max_steps=2)
    with pytest.raises(
        CheckpointError, match=r"batch_size=8 x accumulation_steps=2 x 1 rank\(s\) = 16 rows per step, .*24"
    ):
        launch("resume", max_steps=3, batch_size=12)
    assert launch("resume", max_steps=3, batch_size=4, accumulation_steps=4).step == 3


@pytest.mark.parametrize(
    ("batch_size", "accumulation_steps", "total", "ranks_", "expected"),
    [
        (4, 1, 32, 2, 4),
        (4, 4, 32, 2, 4),
        (3, 1, 0, 2, 1),
        (4, 1, 30, 2, "use 24"),
        (8, 1, 4, 1, "use 8"),
        (4, 2, 32, 2, "drop one"),
    ],
)
def test_a_global_batch_is_made_up_of_micro_batches_or_refused(
    batch_size, accumulation_steps, total, ranks_, expected
) -> None:
    runtime = LocalRuntime("cpu")
    runtime.world_size = ranks_
    loop = LoopConfig(batch_size=batch_size, accumulation_steps=accumulation_steps, global_batch_size=total)
    if isinstance(expected, int):
        assert with_global_batch(QatRun(loop=loop), runtime).loop.accumulation_steps == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            with_global_batch(QatRun(loop=loop), runtime)
