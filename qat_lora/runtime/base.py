"""The machine behind one small protocol, and the words for it that the outside knows.

Code above this folder never asks which device it runs on: it calls the protocol, and what a device does not need is
nothing there. `qat_lora.runtime.select` picks the implementation; only `qat_lora.runtime.xla.device` imports torch_xla.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from qat_lora.models.lean.loops import Body, in_turn

# Where the lazy graph may be cut: set-up, between the acts of a step, in an evaluation, in a cache build.
Phase = Literal[
    "set-up",
    "counts",
    "anchor forward",
    "forward",
    "anchor backward",
    "backward",
    "micro-batch",
    "optimizer",
    "anchor rows",
    "evaluation",
    "cache",
]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use now and at the highest, on the device where it counts, else of the process.

    `free_bytes` are what is left to take, which on a host depends on other processes too; None where it is not known.
    """

    used_bytes: int
    peak_bytes: int
    total_bytes: int
    free_bytes: int | None = None


@dataclass(frozen=True)
class Precision:
    """What a runtime computes in, and why.

    Attributes:
        compute: dtype of matrix products; by autocast where it differs from `frozen`.
        frozen: dtype of parameters that are not trained. Those that are trained are float32 everywhere.
        reason: one clause, printed at start.
    """

    compute: torch.dtype
    frozen: torch.dtype
    reason: str


class Runtime(Protocol):
    """One device and its place among the ranks.

    Attributes:
        device: where tensors live.
        rank: 0-based. world_size: 1 when alone; callers never branch on it.
        devices: among which this rank's batches are divided: 1, but where one program runs on all of them.
        precision: see `Precision`.
        static_graph: whether whole graphs are compiled ahead, without fused attention and with expensive scatters: then
            models use `models.lean`, and losses get their candidates' logits apart.
    """

    device: torch.device
    rank: int
    world_size: int
    devices: int
    precision: Precision
    static_graph: bool

    def mark_step(self, phase: Phase) -> None:
        """Say that a phase is traced: XLA may cut its lazy graph here and run it; nothing elsewhere."""

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given, and make the calls that `log_later` put off."""

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace every gradient by its mean over the ranks, once per optimizer step."""

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, without reading it on the host."""

    def joint_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all tensors together, 0-d on the device, over all parts where ranks hold parts of them."""

    def gather(self, x: Tensor) -> Tensor:
        """The tensor on the host, detached, put together where ranks hold parts of it.

        Every rank calls, for the same tensors in the same order, and gets the same.
        """

    def scatter_like(self, whole: Tensor, like: Tensor) -> Tensor:
        """Of a whole tensor, the same on every rank, what this rank holds of `like`: in its form and on its device."""

    def barrier(self, tag: str) -> None:
        """Wait until every rank has come to the barrier of that name."""

    def all_equal(self, digest: Callable[[], bytes]) -> bool:
        """Whether all ranks have equal digests; where there is one rank, it is not asked."""

    def rank_zero_first(self, tag: str) -> contextlib.AbstractContextManager[None]:
        """The context in which rank 0 does something before the others do: they wait at the barrier of that name."""

    def save(self, obj: Any, path: Path) -> None:
        """Write with torch.save, atomically; every rank calls, rank 0 writes."""

    def seed(self, seed: int) -> None:
        """Start the random numbers of host and device anew."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context a forward runs in."""

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the gradients: to None, or to zero tensors where the graph must not change. Also before step 0."""

    def loop(self, body: Body, carry: list[Tensor], xs: list[Tensor], size: int) -> tuple[list[Tensor], list[Tensor]]:
        """Run `body` over parts of `size` rows (see `lean.loops`), compiled once where graphs are compiled."""

    def checkpoint(self, layer: Callable[..., Tensor], *args: Any) -> Tensor:
        """Run a layer so that backward computes it again instead of keeping its activations."""

    def scan(self, layers: nn.ModuleList, hidden_BTH: Tensor, shared: dict[str, Any]) -> Tensor:
        """Run equal layers one after the other as one loop on the device, each called with `shared` as keywords.

        Backward keeps of each layer its input alone, as with `checkpoint`.
        """

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move a batch to the device."""

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, frozen parameters in the precision's dtype; parameters and ties are kept."""

    def wrap_loader(self, loader: Iterable[dict[str, Tensor]]) -> Generator[dict[str, Tensor]]:
        """Yield the loader's batches on the device, in order; when this is closed, nothing reads in the background."""

    def memory(self) -> MemoryUse:
        """Bytes in use."""

    def log_later(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        """Call fn with the tensors' values as floats, when reading them no longer stalls the device."""

    def scalar(self, value: float) -> Tensor:
        """A float32 number on the device, as data that may differ at every step."""

    def metrics(self) -> dict[str, float]:
        """The device's own counters by name; none on the CPU."""

    def compiled(self) -> int:
        """How many graphs were compiled so far; 0 on eager devices."""

    def compilations(self) -> Sequence[CompiledGraph]:
        """The graphs that were compiled so far, in order; none on eager devices."""


@dataclass(frozen=True)
class CompiledGraph:
    """One compilation.

    Attributes:
        phase: at which cut it happened; "a host read" where something read a tensor before any.
        hash: torch_xla's hash of the graph; equal hashes are one program. Empty where it is not known.
        inputs, outputs: how many tensors. bytes_by_use: argument, output, alias, temporary, program.
        frames: the innermost Python frames of ours that asked for it.
    """

    phase: str
    hash: str = ""
    inputs: int = 0
    outputs: int = 0
    bytes_by_use: dict[str, int] = field(default_factory=dict)
    frames: tuple[str, ...] = ()


class SingleProcess:
    """The part of `Runtime` that a single process without peers shares whatever its device."""

    device: torch.device
    rank = 0
    world_size = 1
    devices = 1

    def seed(self, seed: int) -> None:
        """Start the random numbers of host and device anew; torch knows every eager device."""
        torch.manual_seed(seed)

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing: the mean over one rank is the gradient itself."""

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the tensor: one rank."""
        return x

    def joint_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all tensors together."""
        return torch.nn.utils.get_total_norm(tensors)

    def gather(self, x: Tensor) -> Tensor:
        """The tensor on the host: it is whole here."""
        return x.detach().cpu()

    def scatter_like(self, whole: Tensor, like: Tensor) -> Tensor:
        """All of it, on the device."""
        return whole.to(like.device)

    def barrier(self, tag: str) -> None:
        """Nothing: nobody to wait for."""

    def all_equal(self, digest: Callable[[], bytes]) -> bool:
        """Nobody to disagree with."""
        return True

    def rank_zero_first(self, tag: str) -> contextlib.AbstractContextManager[None]:
        """Nothing: nobody to wait for."""
        return contextlib.nullcontext()

    def loop(self, body: Body, carry: list[Tensor], xs: list[Tensor], size: int) -> tuple[list[Tensor], list[Tensor]]:
        """One part after the other."""
        return in_turn(body, carry, xs, size)

    def scalar(self, value: float) -> Tensor:
        """A float32 number on the device, written there by a kernel: an upload would wait for the device."""
        return torch.full((), value, dtype=torch.float32, device=self.device)

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move a batch to the device. Only a copy from pinned memory may go on by itself: others lose their source."""
        on_cuda = self.device.type == "cuda"
        return {name: x.to(self.device, non_blocking=on_cuda and x.is_pinned()) for name, x in batch.items()}

    def wrap_loader(self, loader: Iterable[dict[str, Tensor]]) -> Generator[dict[str, Tensor]]:
        """Yield the batches on the device."""
        return (self.to_device(batch) for batch in loader)
