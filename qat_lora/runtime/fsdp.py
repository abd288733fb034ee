"""Ranks that share one model: each holds a part of every decoder layer's parameters, by torch's FSDP2.

A layer is whole on a rank only while it runs. Its gradient is summed over the ranks as soon as its backward is done,
each rank keeping the part that belongs to the parameters that it holds; so are the optimizer's moments and the moving
averages, which are made like the parameters. What is no parameter (codes of a frozen student), and what lies outside
the layers and is not trained (embeddings, the last norm, the head), every rank has whole.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from qat_lora.models.lean.layers import trunk_and_layers
from qat_lora.runtime.distributed import DistributedRuntime

log = logging.getLogger(__name__)


class FsdpRuntime(DistributedRuntime):
    """`Runtime` for one of several ranks that share a model.

    `reduced_bytes` counts of each backward the whole gradient, padded to a multiple of the ranks.
    """

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device and keep of each of its layers a part, trained or not.

        Its parameters are other objects afterwards, of the same names and, seen from outside, shapes. Raises ModelError
        where the model has no list of layers.
        """
        trunk, layers = trunk_and_layers(model)
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for layer in layers:  # each goes to the device, is cut, and makes room for the next
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        # The trunk makes one pipeline of them: a layer's parameters travel while the one before it computes. Of its own
        # it shards only what is trained: the head reads the embeddings outside of any forward.
        frozen = {p for p in trunk.parameters() if not p.requires_grad and not isinstance(p, DTensor)}
        fully_shard(trunk, mesh=mesh, reshard_after_forward=True, ignored_params=frozen)
        for x in (*model.parameters(), *model.buffers()):
            if not isinstance(x, DTensor):
                x.data = x.data.to(self.device)
        parts = [p for p in model.parameters() if isinstance(p, DTensor)]
        for p in parts:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._count)
        whole, own = (sum(x.numel() * x.element_size() for x in xs) for xs in (parts, map(_local, parts)))
        log.info(
            "%d layers over %d ranks: %.1f of %.1f MB on each", len(layers), self.world_size, own / 1e6, whole / 1e6
        )
        return model

    def _count(self, p: Tensor) -> None:
        """Called by torch after every sum of a gradient over the ranks."""
        rows = -(-p.shape[0] // self.world_size) * self.world_size
        self.reduced_bytes += rows * (p.numel() // p.shape[0]) * p.element_size()

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Those of parts are means since their backward."""
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self._average(grad for grad in grads if grad is not None and not isinstance(grad, DTensor))

    def joint_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """One sum over ranks of a number."""
        parts = [_local(x) for x in tensors if isinstance(x, DTensor)]
        squares = self.all_reduce_sum(super().joint_norm(parts).to(self.device).square())
        others = [x for x in tensors if not isinstance(x, DTensor)]
        return (squares + super().joint_norm(others).to(self.device).square()).sqrt()

    def gather(self, x: Tensor) -> Tensor:
        return super().gather(x.full_tensor() if isinstance(x, DTensor) else x)

    def scatter_like(self, whole: Tensor, like: Tensor) -> Tensor:
        """Nothing is sent."""
        if not isinstance(like, DTensor):
            return super().scatter_like(whole, like)
        whole = whole.to(like.device)
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
