"""Gated MLPs that keep for backward only the two factors of their product.

    p = silu(g) * u,  dg = dp * u * s * (1 + g * (1 - s)),  du = dp * silu(g),  s = sigmoid(g)

Torch keeps g, silu(g) and u, and the next matrix product p: four tensors of the width of the MLP, where two give the
others again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qat_lora.models.lean.norms import Trials, replace_forwards
from qat_lora.models.lean.products import accurate, made_from, without_base


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of equal shapes and float dtypes; backward makes the product again from both.

    Once differentiable.
    """
    return made_from(_SiluTimes.apply(gate, up), _silu_times, gate, up)


def use_lean_mlps(model: nn.Module) -> None:
    """Let the model's gated MLPs with SiLU keep only the two factors of their product, in place; leave the others."""
    replace_forwards(model, "MLP", _lean_mlp, _small_mlps)


def _lean_mlp(module: Any, x: Tensor) -> Tensor:
    product: Tensor = module.down_proj(silu_times(module.gate_proj(x), module.up_proj(x)))
    return product


def _small_mlps(module: Any) -> Trials:
    small: Any = nn.Module()
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        small.gate_proj, small.up_proj, small.down_proj = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)
        x = torch.linspace(-9.0, 9.0, 24).view(3, 8)
    small.config, small.act_fn = module.config, module.act_fn
    for dtype in (torch.float32, torch.bfloat16):
        yield small.to(dtype), x.to(dtype)


def _silu_times(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class _SiluTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(without_base(gate), without_base(up))
        return _silu_times(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        wide, grad = accurate(gate), accurate(grads[0])
        sigmoid = torch.sigmoid(wide)
        grad_gate = grad * accurate(up) * sigmoid * (1 + wide * (1 - sigmoid))
        return grad_gate.to(gate.dtype), (grad * wide * sigmoid).to(up.dtype)
