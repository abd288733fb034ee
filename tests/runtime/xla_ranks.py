"""Two XLA devices as two ranks: PJRT's CPU client has its devices in one process, a thread for each.

Each program returns a list over ranks.

On a TPU each rank is a process. What is different here is in `ThreadRank` alone: ranks take turns, since torch_xla is
not made for threads that trace at once (it was seen to crash), and each would compile its own graph; a rank that waits
lets the next one go on. The step, the loop, the sums and the runs are the real ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat_lora.config import ExecutionConfig, QatRun
from qat_lora.runtime.xla.chips import ChipsRuntime
from qat_lora.train.opening import Opening
from qat_lora.train.run import run_qat, run_recovery
from tests.runtime import ranks

TURN = threading.Lock()
# Python 3.11 computes a cached property of any object under one lock, with which rank 0 would wait for the others.
vars(Opening)["loaded"].lock = contextlib.nullcontext()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Let another rank go on within the block."""
    TURN.release()
    try:
        yield
    finally:
        TURN.acquire()


class ThreadControl:
    """`GlooControl` between threads."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._digests: dict[int, bytes] = {}

    def barrier(self, tag: str) -> None:
        with waiting():
            self._barrier.wait(timeout=120)

    def all_equal(self, digest: bytes) -> bool:
        self._digests[threading.get_ident()] = digest
        self.barrier("agree")
        agreed = len(set(self._digests.values())) == 1
        self.barrier("agreed")  # before anybody asks again
        return agreed


class ThreadRank(ChipsRuntime):
    """The runtime of a rank that is a thread."""

    shared: dict[str, ThreadControl] = {}

    def _joined(self, barrier_timeout: int) -> ThreadControl:
        return self.shared.setdefault("control", ThreadControl(self.world_size))

    def _execute(self, *, wait: bool) -> None:
        self._xla.sync()
        self._wait()  # for the other rank, too, which it does not do while it reads a value

    def _wait(self) -> None:
        with waiting():
            self._xm.wait_device_ops(self._xm.xla_real_devices([self.device]))

    def synchronize(self) -> None:
        self._wait()
        self._make_calls()

    def wrap_loader(self, loader):
        return (self.to_device(batch) for batch in loader)  # in the thread of the rank, which has the turn


def on_every_device(rank_program: Callable[[], Any]) -> list[Any]:
    """What each rank returns, in order; an exception of one ends the process, since the others would wait."""
    from torch_xla._internal import pjrt

    def guarded() -> Any:
        try:
            with TURN:
                return rank_program()
        except BaseException:
            traceback.print_exc()
            os._exit(3)

    found = pjrt._run_thread_per_device(0, 1, guarded, pjrt.initialize_multiprocess)
    return [found[rank] for rank in sorted(found)]


def train(folder: str, stage: str, cache: str, student: str, sync: str = "phase") -> list[Any]:
    """The run of `tests.runtime.ranks.train`, on all XLA devices, with --max-recompiles 0."""

    def rank_program() -> dict[str, Any]:
        runtime = ThreadRank(dtype="fp32", sync=sync)
        run = ranks.settings(stage, Path(cache), Path(folder) / "run", Path(student), runtime.world_size)
        run = dataclasses.replace(run, execution=ExecutionConfig(sync=sync, max_recompiles=0))
        result = run_qat(run, runtime) if isinstance(run, QatRun) else run_recovery(run, runtime)
        runtime.synchronize()
        return ranks.outcome(result, runtime)

    return on_every_device(rank_program)


def sums(folder: str) -> list[Any]:
    """`tests.runtime.ranks.sums`, by torch_xla's own reduction and by ours."""

    def rank_program() -> dict[str, Any]:
        runtime = ThreadRank(dtype="fp32")
        return {
            "naive": reduced(runtime, lambda optimizer: runtime._xm.reduce_gradients(optimizer)),
            "ours": reduced(runtime, runtime.reduce_gradients),
            "reduced_bytes": runtime.reduced_bytes,
        }

    def reduced(runtime: ThreadRank, reduce: Callable[[torch.optim.Optimizer], None]) -> dict[str, Any]:
        layer, frozen = nn.Linear(3, 2).to(runtime.device), nn.Parameter(torch.ones(2, device=runtime.device))
        optimizer = torch.optim.SGD([*layer.parameters(), frozen])
        for part in (1.0, 2.0):
            x = torch.full((1, 3), part * (runtime.rank + 1)).to(runtime.device)
            layer(x).sum().backward()
        own = torch.full((1,), 1.0 + runtime.rank).to(runtime.device)
        total = runtime.all_reduce_sum(own)
        reduce(optimizer)
        norm = nn.utils.clip_grad_norm_(layer.parameters(), 1e9)
        runtime.mark_step("optimizer")
        runtime.synchronize()
        return {
            "own": own.tolist(), "total": total.tolist(), "grad": layer.weight.grad.tolist(), "norm": norm.item(),
            "frozen": frozen.grad is None,
        }  # fmt: skip

    return on_every_device(rank_program)


def script(path: str, *argv: str) -> None:
    """A script as its command line runs it."""
    logging.getLogger().handlers.clear()  # a warning of torch_xla's has set up one
    sys.argv = [path, *argv]
    runpy.run_path(path, run_name="__main__")
