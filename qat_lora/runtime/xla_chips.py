"""Several TPU chips, one process each: torch_xla's multiprocessing and its collectives.

`launch` starts the processes; in each of them `ChipsRuntime` is the runtime of its chip. What crosses the wire is the
gradient of what is trained, once per optimizer step.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qat_lora.config import Sync
from qat_lora.errors import ConfigError, DeviceError
from qat_lora.runtime.distributed import leave
from qat_lora.runtime.ranks import AmongRanks, Control, GlooControl
from qat_lora.runtime.xla import XlaRuntime, why_absent

CHIPS_VARIABLE = "TPU_NUM_DEVICES"
# Parts of a host's chips that are a mesh of their own (chip n of a host is process n), as torch_xla reads them.
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


class ChipsRuntime(AmongRanks, XlaRuntime):
    """`Runtime` for one of several chips; see `qat_lora.runtime.base.Runtime` for what each method promises.

    Attributes:
        reduced_bytes: of gradients that this rank has given to the sums over ranks so far.
    """

    def __init__(
        self, *, dtype: str = "auto", sync: Sync = "phase", cache_dir: Path | None = None, barrier_timeout: int = 600
    ) -> None:
        """Take the chip of this process and find the others.

        Args:
            dtype: see `XlaRuntime`.
            sync: see `XlaRuntime`.
            cache_dir: see `XlaRuntime`.
            barrier_timeout: seconds after which a barrier gives up on the others.
        """
        super().__init__(dtype=dtype, sync=sync, cache_dir=cache_dir)
        expected = int(os.environ.get("WORLD_SIZE", self.world_size))
        if self.world_size != expected:
            raise DeviceError(
                f"WORLD_SIZE={expected}, but torch_xla knows of {self.world_size} chip(s); start several with "
                "--num-chips instead of torchrun."
            )
        self.control = self._joined(barrier_timeout)
        self.reduced_bytes = 0

    def _joined(self, barrier_timeout: int) -> Control:
        """Gloo between the hosts' processes: torch_xla's own rendezvous waits for ever, and names nobody."""
        if not dist.is_initialized():
            timeout = datetime.timedelta(seconds=barrier_timeout)
            dist.init_process_group("gloo", init_method="xla://", timeout=timeout)
            atexit.register(leave)
        return GlooControl(barrier_timeout)

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace every gradient by its mean over the ranks, once per optimizer step.

        The sum is in place. Where several backward passes have added to a gradient, that of a Linear's weight is a
        view, and torch_xla 2.9 forgets the sum as soon as the view is made anew, when it is clipped, say: each rank
        would silently go on with its own gradient. A clone is no view.
        """
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad.clone()
                    self.reduced_bytes += p.grad.numel() * p.grad.element_size()
        self._xm.reduce_gradients(optimizer)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, as part of the graph."""
        # with the group named, torch_xla orders it before and after the other sums of a graph, on all ranks alike
        total: Tensor = self._xm.all_reduce(self._xm.REDUCE_SUM, x, groups=[list(range(self.world_size))])
        return total

    def save(self, obj: Any, path: Path) -> None:
        """torch.save on rank 0, atomically, of CPU copies; the others hold the same and write nothing."""
        if self.rank == 0:
            super().save(obj, path)
        else:  # as rank 0 does: where ranks trace different graphs, their sums do not meet
            self.mark_step("set-up")
            self.synchronize()


def launch(main: Callable[[list[str]], int], argv: list[str], *, chips: int) -> int:
    """Run ``main(argv)`` in one process per chip and return the exit code: 0 when all ranks returned 0.

    A rank that fails, or is killed, ends the others; its own words come first.

    Args:
        main: a function of a module, which the processes import.
        argv: its arguments.
        chips: how many of this host's chips; 0 takes as many as TPU_NUM_DEVICES says, or all.
    """
    if reason := why_absent():
        raise DeviceError(f"--num-chips counts TPU chips, and {reason}; on GPUs and CPUs use torchrun.")
    if _limit_chips(chips) == 1:
        return main(argv)
    import torch_xla

    _choose_port()
    with _children_end_together():
        try:
            torch_xla.launch(_run_rank, args=(main, argv))
        except BrokenProcessPool:
            print("qat-lora: a rank has failed (its words are above), so the others were ended", file=sys.stderr)
            return 1
    return 0


def _run_rank(rank: int, main: Callable[[list[str]], int], argv: list[str]) -> None:
    import torch_xla.runtime as xr

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(xr.world_size())}
    logging.getLogger().handlers.clear()  # a warning of torch_xla's has set up one before `main` could
    try:
        code = main(argv)
    except BaseException:  # whatever it is, the other ranks wait for this one
        traceback.print_exc()
        code = 1
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an exception would wait in a queue for all ranks to end


def _limit_chips(chips: int) -> int:
    """Have torch_xla start so many processes, and say how; return how many.

    It knows TPU_NUM_DEVICES by name alone, and ``xmp.spawn`` takes None or 1: what it reads are the bounds.
    """
    from torch_xla._internal import tpu

    on_tpu = os.environ.get("PJRT_DEVICE", "TPU").upper() == "TPU"
    there = tpu.num_available_chips() if on_tpu else 1
    wanted = _chips_named(chips) or there
    if wanted > there:
        where = "on this host" if on_tpu else f"with PJRT_DEVICE={os.environ['PJRT_DEVICE']}"
        raise DeviceError(f"{wanted} TPU chips are asked for, but {where} there is {there}; use --num-chips {there}.")
    if wanted == there:
        return wanted
    if wanted not in _BOUNDS:
        raise ConfigError(f"{wanted} of {there} TPU chips are no mesh of their own; use --num-chips 1, 2, 4 or 8.")
    settings = {"TPU_PROCESS_BOUNDS": _BOUNDS[wanted], "TPU_CHIPS_PER_PROCESS_BOUNDS": _BOUNDS[1]}
    if wanted == 1:
        settings["TPU_VISIBLE_CHIPS"] = "0"  # of several, torch_xla gives each process its own
    if given := [
        f"{name}={os.environ[name]}" for name in settings if os.environ.get(name, settings[name]) != settings[name]
    ]:
        raise ConfigError(f"--num-chips {wanted} contradicts {' '.join(given)} in the environment; drop one of them.")
    os.environ |= settings
    print(f"{wanted} of {there} TPU chips: " + " ".join(f"{name}={value}" for name, value in settings.items()))
    return wanted


def _chips_named(chips: int) -> int:
    """The number that the flag or the variable gives; 0 where neither does."""
    by_variable = os.environ.get(CHIPS_VARIABLE, "")
    if not by_variable:
        return chips
    if not by_variable.isdecimal() or int(by_variable) < 1:
        raise ConfigError(f"{CHIPS_VARIABLE}={by_variable!r} is no number of chips; use 1 or more, or unset it.")
    if chips not in (0, int(by_variable)):
        raise ConfigError(f"--num-chips {chips} contradicts {CHIPS_VARIABLE}={by_variable}; drop one of them.")
    return int(by_variable)


@contextlib.contextmanager
def _children_end_together() -> Iterator[None]:
    """End the ranks when one of them has failed, and when we are interrupted or terminated.

    The executor that torch_xla starts them in waits for all of them; of one that dies it learns by chance, if it began
    to wait before that one was started.
    """
    ended = threading.Event()

    def watch() -> None:
        children: set[Any] = set()
        while not ended.wait(0.5):
            children.update(multiprocessing.active_children())
            if any(child.exitcode for child in children):
                _kill(children)

    def end(number: int, frame: Any) -> None:
        _kill(multiprocessing.active_children())
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        os._exit(128 + number)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    earlier = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _kill(children: Iterable[Any]) -> None:
    for child in children:
        child.kill()


def _choose_port() -> None:
    """Where the ranks of this host meet; those of several hosts keep to the port that torch_xla knows."""
    if "," not in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))
