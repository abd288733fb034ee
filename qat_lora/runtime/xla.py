"""torch_xla: a TPU, or whatever PJRT_DEVICE names. The only file that imports torch_xla, when a runtime is made.

What differs from an eager device: work is traced lazily and cut into graphs by `mark_step`; gradients stay tensors,
since a None is another graph; `.to(device)` unties tied weights, which are tied again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from qat_lora.files import write_atomically
from qat_lora.runtime.base import Alone, MemoryUse
from qat_lora.runtime.device import is_tpu_available
from qat_lora.runtime.local import process_memory
from qat_lora.runtime.precision import precision_for


def why_absent() -> str:
    """Say what is missing for torch_xla to offer a device; empty where nothing is."""
    if importlib.util.find_spec("torch_xla") is None:
        return "torch_xla is not installed; run pip install 'qat_lora[xla]' on a machine with a TPU"
    if not is_tpu_available() and not os.environ.get("PJRT_DEVICE"):
        return "torch_xla finds no TPU; start a TPU machine, or set PJRT_DEVICE=CPU to try without one"
    return ""


class XlaRuntime(Alone):
    """`Runtime` for one XLA device; see `qat_lora.runtime.base.Runtime` for what each method promises."""

    def __init__(self, *, dtype: str = "auto") -> None:
        """Take the device that torch_xla offers; `dtype` is auto, fp32 or bf16."""
        import torch_xla
        import torch_xla.runtime as xr

        self._xla = torch_xla
        self.device = torch_xla.device()
        kind = "tpu" if xr.device_type() == "TPU" else "cpu"
        self.precision = precision_for(kind, dtype)

    def mark_step(self) -> None:
        """Cut the lazy graph and start its execution."""
        self._xla.sync()

    def save(self, obj: Any, path: Path) -> None:
        """torch.save, atomically, of CPU copies."""
        on_cpu = tree_map(_on_cpu, obj)
        write_atomically(path, lambda stream: torch.save(on_cpu, stream))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 autocast where the policy computes in bf16."""
        if self.precision.compute is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast("xla", dtype=self.precision.compute)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the gradients to zero and keep them."""
        optimizer.zero_grad(set_to_none=False)

    def place(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to the device and tie again what `.to` untied."""
        model.to(self.device)
        for module in model.modules():
            tie: Callable[[], None] | None = getattr(module, "tie_weights", None)
            if tie is not None:
                tie()
        return model

    def memory(self) -> MemoryUse:
        """Resident memory of the process."""
        return process_memory()

    def log_later(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        """Call after the pending graph: every hook comes behind a `mark_step`."""
        fn(*(t.item() for t in tensors))


def _on_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf
