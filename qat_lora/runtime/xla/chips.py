"""Several TPU chips, one process each: torch_xla's multiprocessing and its collectives.

`launch` starts the processes; in each of them `ChipsRuntime` is the runtime of its chip. What crosses the wire is the
gradient of what is trained, once per optimizer step.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from qat_lora.config import Sync
from qat_lora.errors import ConfigError, DeviceError
from qat_lora.runtime.distributed import leave
from qat_lora.runtime.ranks import Control, GlooControl, RankedProcess
from qat_lora.runtime.xla.device import CHIPS_VARIABLE, XlaRuntime, why_absent

# Parts of a host's chips that are a mesh of their own (chip n of a host is process n), as torch_xla reads them.
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
# Variables of the user's that torch_xla would heed before what it is told.
_LIMITING = (
    *("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS"),
    *("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID"),
)


class ChipsRuntime(RankedProcess, XlaRuntime):
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
            try:
                timeout = datetime.timedelta(seconds=barrier_timeout)
                dist.init_process_group("gloo", init_method="xla://", timeout=timeout)
            except (RuntimeError, ValueError) as error:
                reason = (str(error).splitlines() or [""])[0][:160]
                raise DeviceError(
                    f"rank {self.rank} of {self.world_size} cannot meet the others ({reason}); look at their messages "
                    "first, or give another MASTER_PORT."
                ) from None
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

    A rank that fails, or is killed, ends the others; its own words come first. As ``torch_xla.launch``, but that one's
    executor learns by chance of a rank that dies.

    Args:
        main: a function of a module, which the processes import.
        argv: its arguments.
        chips: how many of this host's chips; 0 takes as many as TPU_NUM_DEVICES says, or all.
    """
    if reason := why_absent():
        raise DeviceError(f"--num-chips counts TPU chips, and {reason}; on GPUs and CPUs use torchrun.")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"--num-chips starts a process per chip, but WORLD_SIZE={os.environ['WORLD_SIZE']} says that torchrun has "
            "started some; run without torchrun."
        )
    count, settings = _limits(chips)
    with _environment(settings | _meeting_point()):
        if count == 1:
            return main(argv)
        ranks = start_processes(_run_rank, (count, main, argv), count, join=False, start_method="spawn")
        with _ending_together(ranks.processes):
            try:
                while not ranks.join():
                    pass
            except ProcessRaisedException as error:
                print(error, file=sys.stderr)
                return 1
            except ProcessExitedException as error:
                how = error.signal_name or f"code {error.exit_code}"
                print(f"qat-lora: rank {error.error_index} ended with {how}, so the others were ended", file=sys.stderr)
                return error.exit_code if error.exit_code > 0 else 1
    return 0


def _run_rank(process: int, count: int, main: Callable[[list[str]], int], argv: list[str]) -> None:
    import torch_xla.runtime as xr
    from torch_xla._internal import pjrt

    # what we are sent when the parent is killed or interrupted; a rank in a sum does not come back to Python
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    pjrt.initialize_multiprocess(process, count)
    devices, ranks = xr.addressable_device_count(), xr.world_size()
    if devices != 1 or ranks % count:
        print(
            f"qat-lora: error: {count} processes were started, but torch_xla gives this one {devices} of {ranks} "
            "devices; each must have one: unset TPU_PROCESS_BOUNDS and TPU_CHIPS_PER_PROCESS_BOUNDS; chips of two "
            "devices (v2, v3) need --shard spmd_data instead.",
            file=sys.stderr,
        )
        sys.exit(2)
    os.environ |= {"RANK": str(xr.global_ordinal()), "WORLD_SIZE": str(ranks)}
    logging.getLogger().handlers.clear()  # a warning of torch_xla's has set up one before `main` could
    sys.exit(main(argv))


def _limits(chips: int) -> tuple[int, dict[str, str]]:
    """How many processes to start, and the environment that limits torch_xla to them, which is printed.

    It knows TPU_NUM_DEVICES by name alone, and ``xmp.spawn`` takes None or 1: what it reads are the bounds.
    """
    from torch_xla._internal import tpu

    on_tpu = _is_on_tpu()
    there = tpu.num_available_chips() if on_tpu else 1
    where = "on this host" if on_tpu else f"with PJRT_DEVICE={os.environ['PJRT_DEVICE']}"
    if not there:
        raise DeviceError("no TPU chip is on the PCI bus, where torch_xla counts them; run on a TPU machine.")
    wanted = _chips_named(chips) or there
    if wanted > there:
        raise DeviceError(f"TPU chips asked for: {wanted}, chips {where}: {there}; use --num-chips {there}.")
    settings = {} if wanted == there else _bounds(wanted, there)
    given = {name: os.environ[name] for name in _LIMITING if name in os.environ}
    if odd := [f"{name}={value}" for name, value in given.items() if settings.get(name) != value]:
        raise ConfigError(f"{wanted} chips contradict {' '.join(odd)} in the environment; unset it.")
    if settings:
        print(f"{wanted} of {there} TPU chips: " + " ".join(f"{name}={value}" for name, value in settings.items()))
    return wanted, settings


def _bounds(wanted: int, there: int) -> dict[str, str]:
    """What torch_xla reads for a part of a host's chips."""
    if wanted not in _BOUNDS:
        raise ConfigError(f"{wanted} of {there} TPU chips are no mesh of their own; use --num-chips 1, 2, 4 or 8.")
    if _is_one_of_several_hosts():
        raise ConfigError(
            f"this host is one of several of a slice, whose chips are used whole; drop --num-chips {wanted}."
        )
    settings = {"TPU_PROCESS_BOUNDS": _BOUNDS[wanted], "TPU_CHIPS_PER_PROCESS_BOUNDS": _BOUNDS[1]}
    # of several, torch_xla gives each process its own
    return settings | ({"TPU_VISIBLE_CHIPS": "0"} if wanted == 1 else {})


def _is_on_tpu() -> bool:
    return os.environ.get("PJRT_DEVICE", "TPU").upper() == "TPU"


def _is_one_of_several_hosts() -> bool:
    """As torch_xla sees it: by its variables, or by the metadata of a cloud's machine; elsewhere a host is alone."""
    from torch_xla._internal import tpu

    try:
        return _is_on_tpu() and int(tpu.num_tpu_workers()) > 1
    except (OSError, KeyError, ValueError):  # no metadata server
        return False


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


def _meeting_point() -> dict[str, str]:
    """Where the ranks of this host find each other; those of several hosts keep to the port that torch_xla knows."""
    if "MASTER_PORT" in os.environ or _is_one_of_several_hosts():
        return {}
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return {"MASTER_PORT": str(probe.getsockname()[1])}


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables for what is started within the block."""
    earlier = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in earlier.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _ending_together(processes: Sequence[Any]) -> Iterator[None]:
    """End the ranks when we are interrupted or terminated; a rank in a sum would listen to nobody."""

    def end(number: int, frame: Any) -> None:
        for process in processes:
            process.kill()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's alone
        yield
        return
    earlier = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
