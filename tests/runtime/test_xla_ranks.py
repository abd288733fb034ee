"""Several XLA devices: the real runs on two devices of PJRT's CPU client, and the processes that a TPU's chips get."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qat_lora.errors import QatLoraError
from qat_lora.runtime import LocalRuntime
from qat_lora.runtime.xla import chips as xla_chips
from qat_lora.train.run import run_recovery
from tests.runtime import programs, ranks
from tests.runtime.forked import Done, forked
from tests.runtime.test_xla_spmd import left_at_15

pytestmark = [
    pytest.mark.xla,
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
]
TWO_DEVICES = {"CPU_NUM_DEVICES": "2", "PJRT_CPU_ASYNC_CLIENT": "0", "XLA_THREAD_POOL_SIZE": "16"}
SCRIPT = "scripts/train_v2_tpu_multi.py"
run_program = functools.partial(programs.run_apart, module="tests.runtime.xla_ranks")


@pytest.mark.parametrize(("stage", "sync"), [("recover", "phase"), ("qat", "step"), ("recover", "optimizer")])
def test_two_devices_hold_equal_bits_and_what_one_cpu_would_hold(
    stage, sync, tmp_path, cache_dir, student, alone
) -> None:
    """20 steps with accumulation 2, clipping that clips, anchor rows, averages, evaluations; --max-recompiles 0."""
    first, second = run_program("train", tmp_path, stage, cache_dir, student, sync, **TWO_DEVICES)
    assert [first["rank"], second["rank"]] == [0, 1]
    for part in ("trained", "ema", "losses", "kl", "grad_norms"):
        assert second[part] == first[part], part
    for part in ("losses", "grad_norms", "kl"):  # 4.3e-7 of a norm seen
        assert first[part] == pytest.approx(alone[stage][part], rel=1e-5), part
    for name, values in alone[stage]["trained"].items():  # 1e-5 of an adapter's largest entry seen
        assert first["trained"][name] == pytest.approx(values, abs=1e-3 * max(map(abs, values))), name
    parameters = sum(len(values) for values in alone[stage]["trained"].values())
    assert first["reduced_bytes"] == ranks.STEPS * 4 * parameters, "gradients of what is trained, once per step"
    if (stage, sync) == ("recover", "phase"):  # and one device goes on where two were
        folder = left_at_15(tmp_path / "run", tmp_path / "resumed")
        run, runtime = ranks.settings(stage, cache_dir, folder, student, 1), LocalRuntime("cpu")
        resumed = ranks.outcome(run_recovery(run, runtime, launch="resume"), runtime)
        assert resumed["losses"] == pytest.approx(alone[stage]["losses"], rel=1e-5)
        for name, values in alone[stage]["trained"].items():
            assert resumed["trained"][name] == pytest.approx(values, abs=1e-3 * max(map(abs, values))), name


def test_a_gradient_that_was_accumulated_is_summed_which_torch_xlas_own_sum_is_forgotten(tmp_path) -> None:
    found = run_program("sums", tmp_path, **TWO_DEVICES)
    naive = [each["naive"]["grad"][0][0] for each in found]
    assert naive == [3.0, 6.0], "the trap is gone: torch_xla's sum in place outlives clipping"
    for rank, each in enumerate(found):
        assert each["reduced_bytes"] == 4 * 8
        ours = each["ours"]
        assert ours["own"] == [1.0 + rank]
        assert ours["total"] == [3.0]
        assert ours["grad"] == [[4.5] * 3] * 2, "the mean of 3 and 6"
        assert ours["norm"] == pytest.approx((6 * 4.5**2 + 2 * 2.0**2) ** 0.5)
        assert ours["frozen"]


@pytest.mark.parametrize(
    ("flag", "variable", "there", "expected"),
    [
        (0, "", 8, {}),
        (8, "", 8, {}),
        (2, "", 8, {"TPU_PROCESS_BOUNDS": "1,2,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}),
        (0, "4", 8, {"TPU_PROCESS_BOUNDS": "2,2,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}),
        (
            1,
            "",
            4,
            {
                "TPU_PROCESS_BOUNDS": "1,1,1",
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
                "TPU_VISIBLE_CHIPS": "0",
            },
        ),
        (5, "", 4, "TPU chips asked for: 5, chips on this host: 4; use --num-chips 4"),
        (0, "5", 4, "TPU chips asked for: 5, chips on this host: 4; use --num-chips 4"),
        (3, "", 4, "3 of 4 TPU chips are no mesh of their own; use --num-chips 1, 2, 4 or 8"),
        (2, "4", 8, "--num-chips 2 contradicts TPU_NUM_DEVICES=4; drop one of them"),
        (0, "many", 8, "TPU_NUM_DEVICES='many' is no number of chips; use 1 or more, or unset it"),
    ],
)
def test_chips_are_limited_by_the_bounds_that_torch_xla_reads(
    flag, variable, there, expected, monkeypatch, capsys
) -> None:
    """No TPU: what is counted is made up, and what would be set is looked at."""
    from torch_xla._internal import tpu

    environment = {"PJRT_DEVICE": "TPU"} | ({"TPU_NUM_DEVICES": variable} if variable else {})
    monkeypatch.setattr(xla_chips.os, "environ", environment.copy())
    monkeypatch.setattr(tpu, "num_available_chips", lambda: there)
    if isinstance(expected, str):
        with pytest.raises(QatLoraError, match=re.escape(expected)):
            xla_chips._limits(flag)
        return
    assert xla_chips._limits(flag) == (flag or int(variable or there), expected)
    said = capsys.readouterr().out
    assert said.startswith(f"{flag or variable} of {there} TPU chips: ") if expected else not said
    assert all(f"{name}={value}" in said for name, value in expected.items())
    assert xla_chips.os.environ == environment, "only what is started sees them"


@pytest.mark.parametrize(
    ("chips", "there", "own", "words"),
    [
        (
            2,
            4,
            {"TPU_PROCESS_BOUNDS": "2,1,1"},
            "2 chips contradict TPU_PROCESS_BOUNDS=2,1,1 in the environment",
        ),
        (
            4,
            4,
            {"TPU_PROCESS_BOUNDS": "1,2,1"},
            "4 chips contradict TPU_PROCESS_BOUNDS=1,2,1 in the environment",
        ),
        (2, 4, {"TPU_VISIBLE_CHIPS": "2,3"}, "2 chips contradict TPU_VISIBLE_CHIPS=2,3 in the environment"),
        (2, 4, {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "a,b"}, "this host is one of several of a slice"),
        (0, 0, {}, "no TPU chip is on the PCI bus"),
        (0, 4, {"WORLD_SIZE": "2"}, "WORLD_SIZE=2 says that torchrun has started some"),
    ],
)
def test_what_the_environment_says_is_not_overruled(chips, there, own, words, monkeypatch) -> None:
    from torch_xla._internal import tpu

    monkeypatch.setattr(xla_chips, "why_absent", lambda: "")
    monkeypatch.setattr(xla_chips.os, "environ", {"PJRT_DEVICE": "TPU"} | own)
    monkeypatch.setattr(tpu, "num_available_chips", lambda: there)
    with pytest.raises(QatLoraError, match=re.escape(words)):
        xla_chips.launch(print, [], chips=chips)


@pytest.mark.parametrize("chips", [1, 2])
def test_a_launch_leaves_variables_and_handlers_as_they_were(chips, monkeypatch) -> None:
    """So a second one may take another number of chips; no rank is started here."""
    environment = {"PJRT_DEVICE": "TPU", "MINE": "1"}
    seen, handlers = [], [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    class Ranks:
        processes: tuple = ()

        def join(self) -> bool:
            return bool(seen.append(dict(os.environ))) or True

    monkeypatch.setattr(xla_chips.os, "environ", environment.copy())
    monkeypatch.setattr(xla_chips, "why_absent", lambda: "")
    monkeypatch.setattr(xla_chips, "_limits", lambda chips: (chips, {"TPU_PROCESS_BOUNDS": "1,2,1"}))
    monkeypatch.setattr(xla_chips, "start_processes", lambda *given, **words: Ranks())
    launched = [xla_chips.launch(lambda argv: bool(seen.append(dict(os.environ))), [], chips=chips)]
    elsewhere = threading.Thread(target=lambda: launched.append(xla_chips.launch(lambda argv: 0, [], chips=2)))
    elsewhere.start()  # signals are the main thread's
    elsewhere.join()
    assert launched == [0, 0] and {each["TPU_PROCESS_BOUNDS"] for each in seen} == {"1,2,1"}
    assert xla_chips.os.environ == environment
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_the_scripts_for_many_chips_run_on_the_one_that_is_there_and_refuse_more(tmp_path, cache_dir) -> None:
    def arguments(*more: str, launch: str = "--from-scratch") -> list[str]:
        return [
            *(launch, "--cache-dir", str(cache_dir), "--config", "q4_r32", "--batch-size", "2"),
            *("--accumulation-steps", "2", "--max-steps", "1", "--output", str(tmp_path / "qat"), "--eval-rows", "4"),
            *("--dtype", "fp32", *more),
        ]

    def script(*more: str, launch: str = "--from-scratch") -> Done:
        return forked("tests.runtime.xla_ranks:script", SCRIPT, *arguments(*more, launch=launch), **device)

    device = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": programs.XLA_FLAGS}
    environment = os.environ | device | {"PYTHONPATH": str(programs.ROOT)}
    command = [sys.executable, SCRIPT, *arguments()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=programs.ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "effective batch: 2 rows x 2 micro-batches x 1 devices = 4 rows" in done.stderr
    assert done.stdout.count("held-out KL") == 1
    assert "device xla:0" in done.stderr
    again = script("--max-steps", "2", launch="--resume")
    assert again.returncode == 0 and "resuming" in again.stderr, again.stderr[-3000:]
    for more, words in {
        ("--num-chips", "2"): "TPU chips asked for: 2, chips with PJRT_DEVICE=CPU: 1; use --num-chips 1",
        ("--device", "cpu"): "--num-chips=0 with --device cpu: it counts TPU chips",
        ("--batch-size", "0"): "batch_size",
        ("--shard", "spmd"): "--num-chips starts a process per chip with a model on each, but shard=spmd",
    }.items():
        refused = script(*more)
        assert refused.returncode == 2 and refused.stderr.count("qat-lora: error: ") == 1, refused.stderr
        assert words in refused.stderr


class Job:
    """Ranks that `launch` starts, as a new process starts them or as forks, by `tests.runtime.chip_processes`."""

    def __init__(self, how: str, folder: Path, forks: subprocess.Popen[str] | None = None) -> None:
        self._folder, self._forks = folder, forks
        if forks is None:
            environment = os.environ | {"PJRT_DEVICE": "CPU", "PYTHONPATH": str(programs.ROOT), "HOW": how}
            command = [sys.executable, "-m", "tests.runtime.chip_processes", str(folder)]
            with (folder / "errors").open("w") as errors:
                self._process = subprocess.Popen(command, env=environment, stderr=errors, cwd=programs.ROOT)
            self.pid = self._process.pid
        else:
            forks.stdin.write(json.dumps([how, str(folder)]) + "\n")
            forks.stdin.flush()
            self.pid = int(forks.stdout.readline())

    def ended(self) -> tuple[int, str]:
        """Wait for its exit code and its errors."""
        if self._forks is None:
            code = self._process.wait(timeout=120)
        else:
            assert select.select([self._forks.stdout], [], [], 120)[0], f"process {self.pid} does not end"
            code = int(self._forks.stdout.readline())
        return code, (self._folder / "errors").read_text()


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PJRT_DEVICE": "CPU", "PYTHONPATH": str(programs.ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.runtime.chip_processes"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=programs.ROOT, **pipes) as server:
        yield server
        server.stdin.close()


def pids(folder: Path, count: int) -> list[int]:
    """The ranks' processes, once they are all there."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = [path.read_text() for path in sorted(folder.glob("pid-*"))]
        if len(found) == count and all(found):
            return [int(pid) for pid in found]
        time.sleep(0.1)
    raise AssertionError(f"{folder} has {len(found)} ranks")


def all_gone(processes: list[int]) -> bool:
    """Whether the processes end within a while; they are children of a process that has ended."""
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(Path(f"/proc/{pid}").exists() for pid in processes)


OWN_WORDS = {
    "raises": "ValueError: only rank 1 knows what is wrong",
    "refuses": "qat-lora: error (rank 1): what a user must mend\n",
    "no chip": "RuntimeError: the chip is held by another process",
    "unplaced": "qat-lora: error: 2 processes were started, but torch_xla gives this one 1 of 1 devices",
    "killed": "qat-lora: rank 1 ended with SIGKILL, so the others were ended",
}
CODES = {"done": 0, "refuses": 2, "unplaced": 2, "terminated": 143, "interrupted": -signal.SIGINT, "orphaned": -9}
SENT = {"terminated": signal.SIGTERM, "interrupted": signal.SIGINT, "orphaned": signal.SIGKILL}


@pytest.mark.parametrize("how", ["done", *SENT, *OWN_WORDS])
def test_the_processes_of_the_chips_end_together(how, tmp_path, forks) -> None:
    job = Job(how, tmp_path, None if how == "interrupted" else forks)  # one is new all the way down
    processes = pids(tmp_path, 2) if how not in ("no chip", "unplaced") else []
    if how == "killed":
        os.kill(processes[1], signal.SIGKILL)
    elif how in SENT:
        os.kill(job.pid, SENT[how])
    begun = time.monotonic()
    code, words = job.ended()
    assert time.monotonic() - begun < 60
    assert code == CODES.get(how, 1), words
    if how in OWN_WORDS:
        assert OWN_WORDS[how] in words
    if how == "refuses":
        assert words.index(OWN_WORDS[how]) < words.index("qat-lora: rank 1 ended with code 2, so the others were ended")
    if how == "done":
        assert [path.read_text() for path in sorted(tmp_path.glob("places-*"))] == ["0 of 2", "1 of 2"]
    assert all_gone(processes)


def test_the_processes_of_the_chips_meet_by_torch_xlas_own_address(tmp_path, forks) -> None:
    """Gloo between them: names of barriers, who is missing, digests, and rank 0 first."""
    code, words = Job("meets", tmp_path, forks).ended()
    assert code == 0, words
    first, second = (json.loads(path.read_text()) for path in sorted(tmp_path.glob("found-*.json")))
    assert first[:4] == [0, 2, True, False] and second[:4] == [1, 2, True, False]
    assert second[4] - first[4] >= 0.2, "rank 0 goes first"
    assert first[5].startswith("rank 0 lost the others at barrier 'late' after 4 s (") and "Ranks 1 failed" in first[5]
