"""RMS normalisation that keeps its input for backward, and no float32 copy of it.

    n = x / sqrt(mean(x^2) + eps),  y = w * n
    dx = (g w - n * mean(g w n)) / sqrt(mean(x^2) + eps),  dw = sum of g n

Computed in float32, like transformers' own. Autograd keeps x and n of that in float32: where activations are bf16, that
is four times the bytes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qat_lora.models.lean.products import made_from, without_base

Forward: TypeAlias = Callable[[Any, Tensor], Tensor]
Trials: TypeAlias = Iterator[tuple[Any, Tensor]]

_F32, _BF16 = torch.float32, torch.bfloat16
_DTYPES = ((_F32, _F32), (_BF16, _BF16), (_BF16, _F32))  # of activations and of weights, as a model is used


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Normalise over the last dimension: ``[..., H]`` of any float dtype -> the same, in that dtype."""
    output, inverse = _RmsNorm.apply(x, weight_H, eps)
    return made_from(output, _normal, x, weight_H, inverse)


def use_lean_norms(model: nn.Module) -> None:
    """Let the model's RMS norms be ours, in place, where they are the same function; leave the others."""
    replace_forwards(model, "RMSNorm", _lean_norm, _small_norms)


def replace_forwards(model: nn.Module, suffix: str, forward: Forward, trials: Callable[[Any], Trials]) -> None:
    """Give modules whose class names end in `suffix` another forward, in place, where it is their own bit for bit.

    `trials` makes of a module small ones with its settings, each with an input, to try both forwards on.
    """
    for module in model.modules():
        if type(module).__name__.endswith(suffix):
            own = type(module).forward
            with torch.no_grad(), contextlib.suppress(TypeError, AttributeError, RuntimeError):
                pairs = ((own(small, x), forward(small, x)) for small, x in trials(module))
                if all(theirs.dtype == ours.dtype and torch.equal(theirs, ours) for theirs, ours in pairs):
                    module.forward = MethodType(forward, module)


def _lean_norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)


def _small_norms(module: nn.Module) -> Trials:
    """In every mix of dtypes: some families round to bf16 after the weight, which in float32 is the same function."""
    small = copy.copy(module)  # its settings, and another weight
    x, weight_H = torch.linspace(-3.0, 5.0, 256, device="cpu").view(8, 32), torch.linspace(-1.0, 2.0, 32, device="cpu")
    for x_dtype, weight_dtype in _DTYPES:
        small._parameters = {"weight": nn.Parameter(weight_H.to(weight_dtype))}
        yield small, x.to(x_dtype)


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
