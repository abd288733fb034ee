"""RMS normalisation that keeps its input for backward, and no float32 copy of it.

    n = x / sqrt(mean(x^2) + eps),  y = w * n
    dx = (g w - n * mean(g w n)) / sqrt(mean(x^2) + eps),  dw = sum of g n

Computed in float32, like transformers' own, which leaves it to autograd and so keeps x and n in float32: where
activations are bf16 and kept, that is four times the bytes.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qat_lora.models.lean.products import made_from, without_base


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Normalise over the last dimension: ``[..., H]`` of any float dtype -> the same, in that dtype."""
    output, inverse = _RmsNorm.apply(x, weight_H, eps)
    return made_from(output, _normal, x, weight_H, inverse)


def use_lean_norms(model: nn.Module) -> None:
    """Let the model's RMS norms be ours, in place, where they are the same function; leave the others."""
    known: dict[type, bool] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in known:
            known[kind] = kind.__name__.endswith("RMSNorm") and _is_plain_rms_norm(kind)
        if known[kind]:
            module.forward = MethodType(_lean_norm, module)


def _lean_norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)


def _is_plain_rms_norm(kind: type) -> bool:
    """Whether a class of norms, tried on a small input, does what `rms_norm` does, bit for bit."""
    try:
        with torch.device("cpu"), torch.no_grad():
            norm: Any = kind(8, eps=0.01)
            norm.weight.copy_(torch.linspace(-1.0, 2.0, 8))
            x = torch.linspace(-3.0, 5.0, 24).view(3, 8)
            return torch.equal(norm(x), rms_norm(x, norm.weight, norm.variance_epsilon))
    except (TypeError, AttributeError):
        return False


def _normal(x: Tensor, weight_H: Tensor, inverse: Tensor) -> Tensor:
    return weight_H * (x.to(torch.float32) * inverse).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = without_base(x)
        inverse = torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
        ctx.mark_non_differentiable(inverse)
        ctx.save_for_backward(x, weight_H, inverse)
        return _normal(x, weight_H, inverse), inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_H, inverse = ctx.saved_tensors
        normal = x.to(torch.float32) * inverse
        grad_normal = (grads[0] * weight_H).to(torch.float32)
        grad_x = (grad_normal - normal * (grad_normal * normal).mean(-1, keepdim=True)) * inverse
        grad_weight_H = None
        if ctx.needs_input_grad[1]:
            grad_weight_H = (grads[0] * normal.to(x.dtype)).flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight_H, None
