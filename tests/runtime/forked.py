"""Ranks and programs as forks of one process that has imported everything: each starts in no time.

`python -m tests.runtime.forked` is that process. It takes jobs as lines of JSON and answers each with a line. A job is
a function by name ("module:function"), its arguments, and how many ranks run it at once; each rank finds torchrun's
variables around it. As with torchrun, a rank that fails ends the others. torch_xla takes its device in the fork.

What forks cannot show, the start by torchrun itself, has tests of its own.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRELOADED = (
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3", "transformers.integrations.sdpa_attention", "peft",
    "torch.distributed.fsdp", "torch.distributed.tensor", "torch.optim.adamw", "torch._dynamo", "matplotlib.pyplot",
    "rich.progress", "qat_lora.cli.main", "qat_lora.cli.commands", "qat_lora.cli.progress", "qat_lora.train.run",
    "qat_lora.runtime.fsdp", "tests.conftest",
)  # fmt: skip
PRELOADED_XLA = ("torch_xla", "torch_xla.core.xla_model", "torch_xla.debug.metrics", "torch_xla.experimental.scan")
ENDING_SECONDS = 5.0


@dataclass(frozen=True)
class Done:
    """What the ranks of a job left: their exit codes (minus the signal of one that was killed) and their words."""

    codes: list[int]
    stdout: str
    stderr: str

    @property
    def returncode(self) -> int:
        return next((code for code in self.codes if code), 0)


def forked(function: str, *arguments: object, ranks: int = 0, timeout: float = 120.0, **environment: str) -> Done:
    """Run ``module:function`` with arguments of JSON in a process of its own, or in one for each of `ranks` ranks.

    What the function returns is printed as a line of JSON, or written into rankR.json of the folder that the first
    argument names, where there are ranks.
    """
    job = {"function": function, "arguments": [_plain(x) for x in arguments], "ranks": ranks, "timeout": timeout,
           "environment": environment}  # fmt: skip
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that forks has ended"
    return Done(**json.loads(answer))


def _plain(x: object) -> object:
    return str(x) if isinstance(x, Path) else x


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.runtime.forked"]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    atexit.register(server.kill)
    return server


def _serve() -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what is imported may print
        for name in PRELOADED + (PRELOADED_XLA if importlib.util.find_spec("torch_xla") else ()):
            importlib.import_module(name)
        import torch

        torch.set_num_threads(1)
        for line in sys.stdin:
            answers.write(json.dumps(_run(json.loads(line))) + "\n")
            answers.flush()


def _run(job: dict[str, Any]) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    importlib.import_module(job["function"].split(":")[0])
    folder = Path(tempfile.mkdtemp(prefix="forked"))  # not TemporaryDirectory: each fork would remove it at its end
    ranks = range(max(1, job["ranks"]))
    codes = _wait([_start(job, rank, port, folder) for rank in ranks], time.monotonic() + job["timeout"])
    out, err = ("".join((folder / f"{name}{rank}").read_text() for rank in ranks) for name in ("out", "err"))
    shutil.rmtree(folder)
    return {"codes": codes, "stdout": out, "stderr": err}


def _start(job: dict[str, Any], rank: int, port: int, folder: Path) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        import torch

        # torch makes its pool of threads anew at the first call after a fork; two threads that make it at once (XLA's
        # devices in their backward passes) end the process with "Invalid thread pool!".
        torch.set_num_threads(1)
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        if job["ranks"]:
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_WORLD_SIZE": job["ranks"]}
            os.environ |= {name: str(value) for name, value in places.items()}
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        os.environ |= job["environment"]
        importlib.reload(sys.modules["qat_lora.cli.progress"])  # it asks once who speaks
        code = _called(job, rank)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _called(job: dict[str, Any], rank: int) -> int:
    module, name = job["function"].split(":")
    found = getattr(importlib.import_module(module), name)(*job["arguments"])
    if isinstance(found, int):
        return found
    if job["ranks"]:
        Path(job["arguments"][0], f"rank{rank}.json").write_text(json.dumps(found))
    else:
        print(json.dumps(found))
    return 0


def _wait(pids: list[int], late: float) -> list[int]:
    """The exit codes of all ranks; the first that fails, or the clock, ends the others."""
    codes: dict[int, int] = {}
    is_ending = False
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                codes |= {pid: os.waitstatus_to_exitcode(status)} if ended else {}
        has_failed = any(codes.values())
        if (has_failed and not is_ending) or time.monotonic() > late:
            number = signal.SIGKILL if time.monotonic() > late else signal.SIGTERM
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, number)
            late, is_ending = time.monotonic() + ENDING_SECONDS, True
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    _serve()
