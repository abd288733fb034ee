"""torch_xla: a TPU, or whatever PJRT_DEVICE names. The only file that imports torch_xla, when a runtime is made.

What differs from an eager device: work is traced lazily and cut into graphs by `mark_step`, and each graph that was
not seen before is compiled, which takes seconds to minutes. So gradients stay tensors (a None is another graph), what
changes from step to step comes in as data, and nothing reads a value in the middle of a step.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qat_lora.config import Sync
from qat_lora.errors import DeviceError, first_line
from qat_lora.models.lean import static_graph
from qat_lora.models.lean.loops import Body, in_turn
from qat_lora.runtime.base import CompiledGraph, Phase, Runtime
from qat_lora.runtime.device import enable_transparent_hugepages, is_tpu_available
from qat_lora.runtime.memory import MemoryUse, device_memory, process_memory
from qat_lora.runtime.precision import lower_frozen, precision_for
from qat_lora.runtime.prefetch import prefetched
from qat_lora.runtime.xla.graphs import Compilations, compile_log, cuts
from qat_lora.runtime.xla.scan import Step, as_numbers, scan_layers

log = logging.getLogger(__name__)

CACHE_VARIABLE = "QAT_LORA_XLA_CACHE"
CHIPS_VARIABLE = "TPU_NUM_DEVICES"  # torch_xla names it and reads it nowhere


def why_absent() -> str:
    """Say what is missing for torch_xla to offer a device; empty where nothing is."""
    if importlib.util.find_spec("torch_xla") is None:
        return "torch_xla is not installed; run pip install 'qat_lora[tpu]' on a machine with a TPU"
    if not is_tpu_available() and not os.environ.get("PJRT_DEVICE"):
        return "torch_xla finds no TPU; start a TPU machine, or set PJRT_DEVICE=CPU to try without one"
    if os.environ.get("PJRT_DEVICE", "").upper() != "CPU" and importlib.util.find_spec("libtpu") is None:
        return "the TPU's own library is missing; run pip install 'qat_lora[tpu]'"
    return ""


class XlaRuntime(Runtime):
    """`Runtime` for one XLA device.

    Args:
        dtype: auto, fp32 or bf16.
        sync: see `ExecutionConfig`.
        cache_dir: where compiled programs are kept, one folder per rank; the environment's QAT_LORA_XLA_CACHE has
            precedence. Without the variable only a TPU keeps them: PJRT's CPU client cannot read them back.
    """

    static_graph = True
    _input_sharding: Any = None

    def __init__(self, *, dtype: str = "auto", sync: Sync = "phase", cache_dir: Path | None = None) -> None:
        log_path = compile_log(os.environ)
        enable_transparent_hugepages()
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as metrics
        import torch_xla.runtime as xr
        from torch_xla.backends import get_mat_mul_precision, set_mat_mul_precision

        static_graph.register("xla", xm.optimization_barrier_)
        self._configure()
        # A backward on a thread of autograd's own lets go of its last tensors a little later than it returns; what is
        # still alive when the graph is cut becomes an output of it, so the graphs would depend on timing.
        torch.autograd.set_multithreading_enabled(False)
        self._xla, self._xm, self._metrics = torch_xla, xm, metrics
        self._is_tpu = xr.device_type() == "TPU"
        self.rank, self.world_size, self.sync = xr.global_ordinal(), xr.world_size(), sync
        kept_in = os.environ.get(CACHE_VARIABLE) or (cache_dir if self._is_tpu else None)
        if kept_in and torch_xla._XLAC._xla_computation_cache_is_initialized():
            log.info("compiled programs are kept where this process began, not in %s", kept_in)
        elif kept_in:
            xr.initialize_cache(str(Path(kept_in) / f"rank{self.rank}"), readonly=False)
        try:
            self.device = torch_xla.device()
        except (RuntimeError, OSError) as error:
            raise DeviceError(
                f"the XLA device cannot be started ({first_line(error)}); end other processes that hold it."
            ) from None
        self.precision = precision_for("tpu" if self._is_tpu else "xla", dtype)
        # a TPU multiplies float32 in one pass of bf16 unless it is told otherwise
        wanted = "highest" if self.precision.compute is torch.float32 else "default"
        if get_mat_mul_precision() != wanted:
            # it warns of setting this twice at the first time, too
            logging.getLogger("torch_xla.backends").setLevel(logging.ERROR)
            set_mat_mul_precision(wanted)
        # found neither in memory nor, where there is one, in the cache on disk
        self._compilations = Compilations(lambda: int(metrics.counter_value("UncachedCompile") or 0), log_path)
        self._later: list[tuple[Callable[..., None], tuple[Tensor, ...]]] = []

    def _configure(self) -> None:
        """What must be said to torch_xla before its first computation: nothing for one device."""

    def mark_step(self, phase: Phase) -> None:
        """Cut the lazy graph where `sync` has a cut and start its execution; wait for a phase's first time."""
        if not cuts(self.sync, phase):
            return
        with self._compilations.at(phase) as first_time:
            self._execute(wait=first_time)
        if phase in ("optimizer", "evaluation", "set-up"):
            self._make_calls()

    def _execute(self, *, wait: bool) -> None:
        """Compile what is pending, where that was not done before, and start it."""
        self._xla.sync(wait=wait)
        if wait:
            self._xm.wait_device_ops()

    def synchronize(self) -> None:
        self._xm.wait_device_ops()
        self._make_calls()

    def log_later(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        """Call at the next step's end, at an evaluation, or before a save: the device is past the values by then."""
        self._later.append((fn, tensors))

    def _make_calls(self) -> None:
        due, self._later = self._later, []
        for fn, tensors in due:
            super().log_later(fn, *tensors)

    def scalar(self, value: float) -> Tensor:
        """It goes up as a vector of one.

        XLA takes scalars that were uploaded with equal values for one input, and 0 and 1 for constants, so that a
        number which changes would change the graph.
        """
        return torch.tensor([value], dtype=torch.float32).to(self.device).squeeze(0)

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._xm.set_rng_state(seed)  # which the device takes as data

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Set them to zero tensors; the first time, let all else be as after a step, too.

        A tensor that was changed in place is traced otherwise than one that never was, and scalars that were uploaded
        with equal values are one input until they are computed.
        """
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                    for x in (p, *optimizer.state[p].values()):
                        x.detach().mul_(1)
        optimizer.zero_grad(set_to_none=False)

    def checkpoint(self, layer: Callable[..., Tensor], *args: Any) -> Tensor:
        """torch_xla's own: torch's crashes here, and without barriers XLA merges the recomputation away."""
        from torch_xla.utils.checkpoint import checkpoint

        output: Tensor = checkpoint(layer, *args, use_reentrant=True)
        return output

    def loop(self, body: Body, carry: list[Tensor], xs: list[Tensor], size: int) -> tuple[list[Tensor], list[Tensor]]:
        """A loop of the device over equal parts, as long as `size` or a little shorter; few rows are one part."""
        rows = xs[0].shape[0]
        part = self._rows_per_turn(rows, size)
        if part == rows:
            return in_turn(body, carry, xs, size)
        dtypes = [x.dtype for x in (*carry, *xs)]

        def step(carry: Sequence[Tensor], x: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            given = [tensor.to(dtype) for tensor, dtype in zip((*carry, *x), dtypes, strict=True)]
            last, outputs = body(given[: len(carry)], given[len(carry) :])
            return as_numbers(last), as_numbers(outputs)

        parts = [self._split_rows(x, part) for x in as_numbers(xs)]
        last, outputs = self._device_loop(step, as_numbers(carry), parts)
        return last, [self._join_rows(output) for output in outputs]

    def _rows_per_turn(self, rows: int, size: int) -> int:
        """How many rows a turn of a loop takes; all where their number does not divide well."""
        part = next(length for length in range(min(size, rows), 0, -1) if rows % length == 0)
        return rows if part < size // 4 else part

    def _split_rows(self, x: Tensor, part: int) -> Tensor:
        """[rows, ...] -> [turns, part, ...]."""
        return x.unflatten(0, (-1, part))

    def _join_rows(self, x: Tensor) -> Tensor:
        """[turns, part, ...] -> [rows, ...]."""
        return x.flatten(0, 1)

    def scan(self, layers: nn.ModuleList, hidden_BTH: Tensor, shared: dict[str, Any]) -> Tensor:
        return scan_layers(list(layers), hidden_BTH, shared, self._device_loop)

    @torch.no_grad()
    def _device_loop(
        self, step: Step, carry: list[Tensor], xs: list[Tensor], *, reverse: bool = False
    ) -> tuple[list[Tensor], list[Tensor]]:
        from torch_xla.experimental.scan import _scan_impl_flat  # `scan` around it traces through AOTAutograd

        last, outputs = _scan_impl_flat(step, carry, xs, reverse=reverse)
        return list(last), list(outputs)

    def place(self, model: nn.Module) -> nn.Module:
        """As promised: `.to` by itself would make other parameters and untie those that are tied."""
        lower_frozen(model, self.precision.frozen)
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.to(self.device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
        self.mark_step("set-up")
        return model

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """In one piece: of what a thread has half moved, a graph that is cut meanwhile makes another output."""
        return self._xm.send_cpu_data_to_device(batch, self.device, self._input_sharding)

    def wrap_loader(self, loader: Iterable[dict[str, Tensor]]) -> Generator[dict[str, Tensor]]:
        """Read and upload ahead in a thread.

        Not by torch_xla's own loader: it cuts the graph before each batch, and ends in silence where reading fails.
        """
        return prefetched(loader, self.to_device)

    def memory(self) -> MemoryUse:
        # of a chip that is not counted nothing is known to be free
        return device_memory("xla") or (MemoryUse(0, 0, 0, free_bytes=0) if self._is_tpu else process_memory())

    def metrics(self) -> dict[str, float]:
        """torch_xla's counters, and the totals of its timers and sizes."""
        found = {name: float(self._metrics.counter_value(name)) for name in self._metrics.counter_names()}
        for name in self._metrics.metric_names():
            data = self._metrics.metric_data(name)
            if data is not None:
                found[f"{name}.count"], found[f"{name}.total"] = float(data[0]), float(data[1])
        return found

    def compilations(self) -> Sequence[CompiledGraph]:
        return self._compilations.all()
