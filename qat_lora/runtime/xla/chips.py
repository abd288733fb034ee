"""Several TPU chips, one process each: torch_xla's multiprocessing and its collectives.

`launch` starts the processes; in each of them `ChipsRuntime` is the runtime of its chip. What crosses the wire is the
gradient of what is trained, once per optimizer step.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from qat_lora.config import Sync
from qat_lora.errors import ConfigError, DeviceError
from qat_lora.runtime.ranks import GlooControl, join
from qat_lora.runtime.xla.device import CHIPS_VARIABLE, XlaRuntime, why_absent

# Parts of a host's chips that are a mesh of their own (chip n of a host is process n), as torch_xla reads them.
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
# Variables of the user's that torch_xla reads first.
_LIMITING = (
    *("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS"),
    *("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID"),
)


class ChipsRuntime(XlaRuntime):
    """`Runtime` for one of several chips: an `XlaRuntime` that has found the others.

    Attributes:
        reduced_bytes: of gradients that this rank has given to the sums over ranks so far.
    """

    def __init__(
        self, *, dtype: str = "auto", sync: Sync = "phase", cache_dir: Path | None = None, barrier_timeout: int = 600
    ) -> None:
        """`barrier_timeout`: seconds after which a barrier gives up on the others."""
        super().__init__(dtype=dtype, sync=sync, cache_dir=cache_dir)
        expected = int(os.environ.get("WORLD_SIZE", self.world_size))
        if self.world_size != expected:
            raise DeviceError(
                f"WORLD_SIZE={expected}, but torch_xla knows of {self.world_size} chip(s); start several with "
                "--num-chips instead of torchrun."
            )
        self.control = self._joined(barrier_timeout)
        self.reduced_bytes = 0

    def _joined(self, barrier_timeout: int) -> GlooControl:
        """Gloo between the hosts' processes: torch_xla's own rendezvous waits for ever, and names nobody."""
        remedy = "look at their messages first, or give another MASTER_PORT"
        join("gloo", barrier_timeout, init_method="xla://", remedy=remedy)
        return GlooControl(barrier_timeout)

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """The sum is in place, of clones.

        Where several backward passes have added to a gradient, that of a Linear's weight is a view, and torch_xla 2.9
        forgets the sum as soon as the view is made anew, when it is clipped, say: each rank would silently continue
        with its own gradient. A clone is no view.
        """
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad.clone()
                    self.reduced_bytes += p.grad.numel() * p.grad.element_size()
        self._xm.reduce_gradients(optimizer)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        # with its group given, torch_xla orders it before and after the other sums of a graph, on all ranks alike
        total: Tensor = self._xm.all_reduce(self._xm.REDUCE_SUM, x, groups=[list(range(self.world_size))])
        return total


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
    added = {name: value for name, value in (settings | _master_port()).items() if name not in os.environ}
    os.environ |= added
    try:
        return main(argv) if count == 1 else _start(main, argv, count)
    finally:
        for name in added:
            del os.environ[name]


def _start(main: Callable[[list[str]], int], argv: list[str], count: int) -> int:
    ranks = start_processes(_run_rank, (count, main, argv), count, join=False, start_method="spawn")
    earlier = _end_with_us(ranks.processes)
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
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    return 0


def _end_with_us(processes: Sequence[Any]) -> dict[int, Any]:
    """Have SIGINT and SIGTERM end the ranks: one in a sum would not listen. Returns the handlers of before."""

    def end(number: int, frame: Any) -> None:
        for process in processes:
            process.kill()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        os._exit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    return {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM) if is_main}


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
    """How many processes to start, and the variables that limit torch_xla to them, which are printed.

    It reads neither TPU_NUM_DEVICES nor a number given to ``xmp.spawn`` other than 1, but the bounds.
    """
    from torch_xla._internal import tpu

    on_tpu = _is_on_tpu()
    there = tpu.num_available_chips() if on_tpu else 1
    where = "on this host" if on_tpu else f"with PJRT_DEVICE={os.environ['PJRT_DEVICE']}"
    if not there:
        raise DeviceError("no TPU chip is on the PCI bus, where torch_xla counts them; run on a TPU machine.")
    wanted = _chips_wanted(chips) or there
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
    """As torch_xla sees it: by its variables, or by the metadata of a cloud's machine; elsewhere there is one host."""
    from torch_xla._internal import tpu

    try:
        return _is_on_tpu() and int(tpu.num_tpu_workers()) > 1
    except (OSError, KeyError, ValueError):  # no metadata server
        return False


def _chips_wanted(chips: int) -> int:
    """The number that the flag or the variable gives; 0 where neither does."""
    by_variable = os.environ.get(CHIPS_VARIABLE, "")
    if not by_variable:
        return chips
    if not by_variable.isdecimal() or int(by_variable) < 1:
        raise ConfigError(f"{CHIPS_VARIABLE}={by_variable!r} is no number of chips; use 1 or more, or unset it.")
    if chips not in (0, int(by_variable)):
        raise ConfigError(f"--num-chips {chips} contradicts {CHIPS_VARIABLE}={by_variable}; drop one of them.")
    return int(by_variable)


def _master_port() -> dict[str, str]:
    """Where the ranks of this host find each other; those of several hosts use the port that torch_xla knows."""
    if "MASTER_PORT" in os.environ or _is_one_of_several_hosts():
        return {}
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return {"MASTER_PORT": str(probe.getsockname()[1])}
