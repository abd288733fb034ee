"""CPU, CUDA or MPS, one process: everything that only lazy or replicated devices need is nothing here."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qat_lora.errors import ConfigError
from qat_lora.files import write_atomically
from qat_lora.runtime.base import CompiledGraph, MemoryUse, Phase, SingleProcess
from qat_lora.runtime.precision import precision_for
from qat_lora.runtime.prefetch import prefetched


class LocalRuntime(SingleProcess):
    """`Runtime` for one local device; see `qat_lora.runtime.base.Runtime` for what each method promises."""

    static_graph = False

    def __init__(self, device_type: str, *, dtype: str = "auto", threads: int = 0) -> None:
        """Take the device; `dtype` is auto, fp32 or bf16, `threads` 0 leaves torch's own choice."""
        self.device = _device_of(device_type)
        self.precision = precision_for(device_type, dtype)
        if threads:
            torch.set_num_threads(threads)

    def mark_step(self, phase: Phase) -> None:
        """Nothing: local devices are eager."""

    def synchronize(self) -> None:
        """Wait for a GPU's stream; a CPU is done when a call returns."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def save(self, obj: Any, path: Path) -> None:
        """torch.save, atomically."""
        write_atomically(path, lambda stream: torch.save(obj, stream))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 autocast where the policy computes in bf16."""
        if self.precision.compute is self.precision.frozen:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision.compute)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients; they are allocated anew, which costs nothing on an eager device."""
        optimizer.zero_grad(set_to_none=True)

    def checkpoint(self, layer: Callable[..., Tensor], *args: Any) -> Tensor:
        """Torch's own."""
        output: Tensor = checkpoint(layer, *args, use_reentrant=False)
        return output

    def scan(self, layers: nn.ModuleList, hidden_BTH: Tensor, shared: dict[str, Any]) -> Tensor:
        """Refused: an eager device compiles nothing that a loop would shorten."""
        raise ConfigError(f"scan_layers=True needs torch_xla, but the device is {self.device}; drop --scan-layers.")

    def wrap_loader(self, loader: Iterable[dict[str, Tensor]]) -> Generator[dict[str, Tensor]]:
        """Read batches ahead in a thread, for CUDA into pinned memory, from which a copy keeps nobody waiting."""
        with contextlib.closing(prefetched(loader, self._staged)) as batches:
            for batch in batches:
                yield self.to_device(batch)

    def _staged(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch where the device can copy it from by itself; called by the thread that reads."""
        if self.device.type != "cuda":
            return batch
        torch.cuda.set_device(self.device)  # of this thread, which would begin on GPU 0 otherwise
        return {name: x.pin_memory() for name, x in batch.items()}

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device; ties survive on eager devices."""
        return model.to(self.device)

    def memory(self) -> MemoryUse:
        """Device memory on CUDA, resident memory of the process elsewhere."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return MemoryUse(total - free, torch.cuda.max_memory_allocated(self.device), total, free)
        return process_memory()

    def log_later(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        """Call at once: reading a value costs little here."""
        fn(*(t.item() for t in tensors))

    def metrics(self) -> dict[str, float]:
        """CUDA's allocator statistics."""
        return dict(torch.cuda.memory_stats(self.device)) if self.device.type == "cuda" else {}

    def compiled(self) -> int:
        """0."""
        return 0

    def compilations(self) -> Sequence[CompiledGraph]:
        """None."""
        return ()


def _device_of(device_type: str) -> torch.device:
    """The device with its number where it has one: torch.cuda takes no device without."""
    return (
        torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    )


def process_memory() -> MemoryUse:
    """Resident bytes of this process and its peak, the machine's total and what is available of it."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's peak is inherited from the parent process there
        total, free = (_kib_field(Path("/proc/meminfo"), name) for name in ("MemTotal", "MemAvailable"))
        return MemoryUse(_kib_field(status, "VmRSS"), _kib_field(status, "VmHWM"), total, free)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
    return MemoryUse(peak, peak, 0)


def _kib_field(path: Path, name: str) -> int:
    """Bytes of a line such as ``VmRSS:  1234 kB``."""
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
