"""The device behind one small class: what code above this folder may ask of it, and what one eager process answers.

Code above never asks which device it runs on. `qat_lora.runtime.select` picks the implementation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from qat_lora.errors import ConfigError
from qat_lora.files import write_atomically
from qat_lora.models.lean.loops import Body, in_turn
from qat_lora.runtime.memory import MemoryUse, device_memory, process_memory
from qat_lora.runtime.ranks import GlooControl

# Where the lazy graph may be cut: set-up, between the acts of a step, in an evaluation, in a cache build.
Phase = Literal[
    "set-up", "counts", "anchor forward", "forward", "anchor backward", "backward", "micro-batch", "optimizer",
    "anchor rows", "evaluation", "cache",
]  # fmt: skip


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


class Runtime:
    """One device and its place among the ranks; here for one process on an eager device, which others override.

    Attributes:
        device: where tensors live.
        rank: 0-based. world_size: 1 without others; callers never branch on it.
        devices: among which this rank's batches are divided: 1, but where one program runs on all of them.
        precision: see `Precision`.
        static_graph: whether whole graphs are compiled ahead, without fused attention and with expensive scatters: then
            models use `models.lean`, and losses get their candidates' logits apart.
        control: how the processes of several ranks talk to each other beside their devices.
    """

    device: torch.device
    precision: Precision
    rank = 0
    world_size = 1
    devices = 1
    static_graph = False
    control: GlooControl | None = None

    def mark_step(self, phase: Phase) -> None:
        """Say that a phase is traced: XLA may cut its lazy graph here and run it; nothing elsewhere."""

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given, and make the calls that `log_later` put off."""

    def log_later(self, fn: Callable[..., None], *tensors: Tensor) -> None:
        """Call fn with the tensors' values as floats, when reading them no longer stalls the device."""
        fn(*(t.item() for t in tensors))

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace every gradient by its mean over the ranks, once per optimizer step."""

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, without reading it on the host."""
        return x

    def joint_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """The 2-norm of all tensors together, 0-d on the device, over all parts where ranks hold parts of them."""
        return torch.nn.utils.get_total_norm(tensors)

    def gather(self, x: Tensor) -> Tensor:
        """The tensor on the host, detached, put together where ranks hold parts of it.

        Every rank calls, for the same tensors in the same order, and gets the same.
        """
        return x.detach().cpu()

    def scatter_like(self, whole: Tensor, like: Tensor) -> Tensor:
        """Of a whole tensor, the same on every rank, what this rank holds of `like`: in its form and on its device."""
        return whole.to(like.device)

    def barrier(self, tag: str) -> None:
        """Wait for every rank; raises DeviceError, naming the tag and who is missing, after the timeout."""
        if self.control is not None:
            self.control.barrier(tag)

    def all_equal(self, digest: Callable[[], bytes]) -> bool:
        """Whether the first eight bytes of all ranks' digests are equal; where there is one rank, it is not asked."""
        return self.control is None or self.control.all_equal(digest())

    @contextlib.contextmanager
    def rank_zero_first(self, tag: str) -> Iterator[None]:
        """The context in which rank 0 does something before the others do: they wait at the barrier of that name."""
        if self.rank:
            self.barrier(tag)
        yield
        if not self.rank:
            self.barrier(tag)

    def save(self, obj: Any, path: Path) -> None:
        """Write with torch.save, atomically, of CPU copies; every rank calls, rank 0 writes.

        Ranks that trace different graphs would wait for each other's sums, so all of them cut the graph here.
        """
        self.mark_step("set-up")  # else each tensor that is still pending is read by a graph of its own
        self.synchronize()
        if self.rank == 0:
            on_cpu = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, obj)
            write_atomically(path, lambda stream: torch.save(on_cpu, stream))

    def seed(self, seed: int) -> None:
        """Start the random numbers of host and device anew."""
        torch.manual_seed(seed)  # of every eager device

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context a forward runs in."""
        if self.precision.compute is self.precision.frozen:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision.compute)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Clear the gradients: to None, or to zero tensors where the graph must not change. Also before step 0."""
        optimizer.zero_grad(set_to_none=True)

    def loop(self, body: Body, carry: list[Tensor], xs: list[Tensor], size: int) -> tuple[list[Tensor], list[Tensor]]:
        """Run `body` over parts of `size` rows (see `lean.loops`), compiled once where graphs are compiled."""
        return in_turn(body, carry, xs, size)

    def checkpoint(self, layer: Callable[..., Tensor], *args: Any) -> Tensor:
        """Run a layer so that backward computes it again instead of keeping its activations."""
        output: Tensor = checkpoint(layer, *args, use_reentrant=False)
        return output

    def scan(self, layers: nn.ModuleList, hidden_BTH: Tensor, shared: dict[str, Any]) -> Tensor:
        """Run equal layers one after the other as one loop on the device, each called with `shared` as keywords.

        Backward keeps only the input of each layer, as with `checkpoint`. Refused where nothing is compiled.
        """
        raise ConfigError(f"scan_layers=True needs torch_xla, but the device is {self.device}; drop --scan-layers.")

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, frozen parameters in the precision's dtype; parameters and ties are kept."""
        return model.to(self.device)

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move a batch to the device. A copy may end later only from pinned memory: others lose their source."""
        on_cuda = self.device.type == "cuda"
        return {name: x.to(self.device, non_blocking=on_cuda and x.is_pinned()) for name, x in batch.items()}

    def wrap_loader(self, loader: Iterable[dict[str, Tensor]]) -> Generator[dict[str, Tensor]]:
        """Yield the loader's batches on the device, in order; when this is closed, nothing reads in the background."""
        return (self.to_device(batch) for batch in loader)

    def scalar(self, value: float) -> Tensor:
        """A float32 number on the device, as data that may differ at every step."""
        # written there by a kernel: an upload would wait for the device
        return torch.full((), value, dtype=torch.float32, device=self.device)

    def memory(self) -> MemoryUse:
        """Bytes in use."""
        return device_memory(self.device.type, self.device) or process_memory()

    def metrics(self) -> dict[str, float]:
        """The device's own counters by name; none on the CPU."""
        return {}

    def compilations(self) -> Sequence[CompiledGraph]:
        """The graphs that were compiled so far, in order; none on eager devices."""
        return ()
