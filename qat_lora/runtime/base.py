"""The machine behind one small protocol, and the words for it that the outside knows.

Code above this folder never asks which device it runs on: it calls the protocol, and what a device does not need is
nothing there. `qat_lora.runtime.select` picks the implementation; only `qat_lora.runtime.xla` imports torch_xla.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use now and at the highest, on the device where it counts, else of the process."""

    used_bytes: int
    peak_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Precision:
    """What a runtime computes in, and why.

    Attributes:
        compute: dtype of matrix products, by autocast where it is not float32; tensors at rest are float32.
        reason: one clause, printed at start.
    """

    compute: torch.dtype
    reason: str


class Runtime(Protocol):
    """One device and its place among the ranks.

    Attributes:
        device: where tensors live.
        rank: 0-based. world_size: 1 when alone; callers never branch on it.
        precision: see `Precision`.
    """

    device: torch.device
    rank: int
    world_size: int
    precision: Precision

    def mark_step(self) -> None:
        """Cut the lazy graph on XLA; nothing elsewhere."""

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace every gradient by its mean over the ranks, once per optimizer step."""

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, without reading it on the host."""

    def barrier(self, tag: str) -> None:
        """Wait until every rank has come to the barrier of that name."""

    def save(self, obj: Any, path: Path) -> None:
        """Write with torch.save, atomically; every rank calls, rank 0 writes."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context a forward runs in."""

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the gradients: to None, or to zero tensors where the graph must not change."""

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move a batch to the device."""

    def place(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to the device, ties kept."""

    def wrap_loader(self, loader: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Yield the loader's batches on the device."""

    def memory(self) -> MemoryUse:
        """Bytes in use."""

    def log_later(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        """Call fn with the tensors' values as floats, when reading them no longer stalls the device."""


class Alone:
    """The part of `Runtime` that a single process without peers shares whatever its device."""

    device: torch.device
    rank = 0
    world_size = 1

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing: the mean over one rank is the gradient itself."""

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the tensor: one rank."""
        return x

    def barrier(self, tag: str) -> None:
        """Nothing: nobody to wait for."""

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move a batch to the device."""
        return {name: x.to(self.device, non_blocking=True) for name, x in batch.items()}

    def wrap_loader(self, loader: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Yield the batches on the device."""
        return (self.to_device(batch) for batch in loader)
