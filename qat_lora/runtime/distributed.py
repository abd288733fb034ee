"""torch.distributed: one process per device, launched by torchrun; NCCL between GPUs, gloo between CPUs.

Each rank holds the whole model and reads its own rows. What crosses the wire is the gradient of what is trained, once
per optimizer step: for recovery only the adapters'.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from qat_lora.errors import DeviceError, first_line
from qat_lora.runtime.local import LocalRuntime
from qat_lora.runtime.memory import MemoryUse
from qat_lora.runtime.ranks import GlooControl, join


class DistributedRuntime(LocalRuntime):
    """`Runtime` for one of several ranks, of the group that torchrun's variables describe.

    Attributes:
        reduced_bytes: of gradients that this rank has given to the sums over ranks so far.
    """

    def __init__(self, device_type: str, *, dtype: str = "auto", threads: int = 0, barrier_timeout: int = 600) -> None:
        """`barrier_timeout`: seconds after which a barrier or a sum over ranks gives up on the others."""
        super().__init__(device_type, dtype=dtype, threads=threads)
        if device_type == "cuda":
            self.device = _own_gpu()
            torch.cuda.set_device(self.device)
        backend = "nccl" if device_type == "cuda" else "gloo"
        join(backend, barrier_timeout, remedy="start all of them with torchrun")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.control = GlooControl(barrier_timeout)
        self.reduced_bytes = 0

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self._average([p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None])

    def _average(self, grads: Iterable[Tensor]) -> None:
        """Replace each by its mean over the ranks: one sum over one buffer per dtype, equal bits on all."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            by_dtype.setdefault(grad.dtype, []).append(grad)
        for same in by_dtype.values():
            flat = _flatten_dense_tensors(same)
            self._sum(flat)
            flat /= self.world_size
            self.reduced_bytes += flat.numel() * flat.element_size()
            for grad, mean in zip(same, _unflatten_dense_tensors(flat, same), strict=True):
                grad.copy_(mean)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        total = x.clone()
        self._sum(total)
        return total

    def _sum(self, x: Tensor) -> None:
        """Replace a tensor by its sum over all ranks; raises DeviceError where another rank is gone."""
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            raise DeviceError(
                f"rank {self.rank} lost another rank in a sum over all of them ({first_line(error)}); look at their "
                "messages first; --resume continues from the last checkpoint."
            ) from None

    def memory(self) -> MemoryUse:
        """Of the host's free memory the share of one of the ranks on it."""
        use = super().memory()
        if self.device.type == "cuda" or use.free_bytes is None:
            return use
        return replace(use, free_bytes=use.free_bytes // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _own_gpu() -> torch.device:
    """The GPU of the local rank."""
    number, there = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if not number.isdecimal() or int(number) >= there:
        raise DeviceError(
            f"LOCAL_RANK={number or 'unset'}, but there are {there} GPUs; start with torchrun, with at most {there} "
            "processes per node."
        )
    return torch.device("cuda", int(number))
