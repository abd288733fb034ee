"""CPU, CUDA or MPS, one process: what of a GPU differs from the eager device that `Runtime` describes."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from qat_lora.runtime.base import Runtime
from qat_lora.runtime.precision import precision_for
from qat_lora.runtime.prefetch import prefetched


class LocalRuntime(Runtime):
    """`Runtime` for one local device; `dtype` is auto, fp32 or bf16, `threads` 0 leaves torch's own choice."""

    def __init__(self, device_type: str, *, dtype: str = "auto", threads: int = 0) -> None:
        self.device = torch.device(device_type)
        if device_type == "cuda":  # torch.cuda takes no device without its number
            self.device = torch.device(device_type, torch.cuda.current_device())
        self.precision = precision_for(device_type, dtype)
        if threads:
            torch.set_num_threads(threads)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def wrap_loader(self, loader: Iterable[dict[str, Tensor]]) -> Generator[dict[str, Tensor]]:
        """Read batches ahead in a thread, for CUDA into pinned memory, from which a copy need not be waited for."""
        with contextlib.closing(prefetched(loader, self._staged)) as batches:
            for batch in batches:
                yield self.to_device(batch)

    def _staged(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch where the device can copy it from by itself; called by the thread that reads."""
        if self.device.type != "cuda":
            return batch
        torch.cuda.set_device(self.device)  # of this thread, which would begin on GPU 0 otherwise
        return {name: x.pin_memory() for name, x in batch.items()}

    def metrics(self) -> dict[str, float]:
        return dict(torch.cuda.memory_stats(self.device)) if self.device.type == "cuda" else {}
