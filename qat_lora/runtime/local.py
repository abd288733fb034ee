"""CPU, CUDA or MPS, one process: everything that only lazy or replicated devices need is nothing here."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat_lora.files import write_atomically
from qat_lora.runtime.base import MemoryUse, Precision

# The policy table: device type -> (compute dtype, reason). Trained tensors are float32 in every row.
_AUTO_PRECISION = {
    "cpu": (torch.float32, "the CPU computes in fp32 unless bf16 is asked for"),
    "cuda": (torch.bfloat16, "CUDA computes in bf16 autocast, weights stay fp32"),
    "mps": (torch.float32, "MPS computes in fp32: its bf16 autocast is incomplete"),
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LocalRuntime:
    """`Runtime` for one local device; see `qat_lora.runtime.base.Runtime` for what each method promises."""

    rank = 0
    world_size = 1

    def __init__(self, device_type: str, *, dtype: str = "auto", threads: int = 0) -> None:
        """Take the device; `dtype` is auto, fp32 or bf16, `threads` 0 leaves torch's own choice."""
        self.device = torch.device(device_type)
        self.precision = _precision(device_type, dtype)
        if threads:
            torch.set_num_threads(threads)

    def mark_step(self) -> None:
        """Nothing: local devices are eager."""

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing: the mean over one rank is the gradient itself."""

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the tensor: one rank."""
        return x

    def barrier(self, tag: str) -> None:
        """Nothing: nobody to wait for."""

    def save(self, obj: Any, path: Path) -> None:
        """torch.save, atomically."""
        write_atomically(path, lambda stream: torch.save(obj, stream))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 autocast where the policy computes in bf16."""
        if self.precision.compute is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision.compute)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients; they are allocated anew, which costs nothing on an eager device."""
        optimizer.zero_grad(set_to_none=True)

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move a batch to the device."""
        return {name: x.to(self.device, non_blocking=True) for name, x in batch.items()}

    def place(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to the device; ties survive on eager devices."""
        return model.to(self.device)

    def wrap_loader(self, loader: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Yield the batches on the device."""
        return (self.to_device(batch) for batch in loader)

    def memory(self) -> MemoryUse:
        """Device memory on CUDA, resident memory of the process elsewhere."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return MemoryUse(total - free, torch.cuda.max_memory_allocated(self.device), total)
        return process_memory()

    def log_later(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        """Call at once: reading a value costs little here."""
        fn(*(t.item() for t in tensors))


def process_memory() -> MemoryUse:
    """Resident bytes of this process, its peak, and the machine's total."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB on Linux, in bytes on macOS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    used, total = peak, 0
    statm = Path("/proc/self/statm")
    if statm.exists():
        page = resource.getpagesize()
        used = int(statm.read_text().split()[1]) * page
        total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    return MemoryUse(used, max(peak, used), total)


def _precision(device_type: str, dtype: str) -> Precision:
    compute, reason = _AUTO_PRECISION[device_type]
    if dtype != "auto":
        compute, reason = _DTYPES[dtype], f"--dtype {dtype}"
    return Precision(compute, torch.float32, reason)
