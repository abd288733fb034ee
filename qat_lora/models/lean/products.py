"""Matrix products that keep for backward no more than they must.

    y = x W^T + b,  dx = dy W,  dW = dy^T x,  db = sum of dy

A product's input often follows by a few cheap operations from tensors that backward keeps anyway: the output of a norm,
of a gated product. Such a tensor is `made_from` them, and a product keeps these and makes it again.

On XLA a tensor and a view of it are two buffers, and the view keeps the tensor alive; torch's own products keep views.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``[..., I] -> [..., O]`` in the dtype of x (or of autocast), whatever the dtypes of weight and bias.

    Once differentiable.
    """
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    if not isinstance(weight_OI, nn.Parameter):  # what is made for this product is not kept twice as wide as it is used
        weight_OI = weight_OI.to(x.dtype)
    output: Tensor = _Linear.apply(x, weight_OI, bias_O)
    return output


def made_from(output: Tensor, recipe: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """Note on a tensor that recipe(*sources) gives it, bit for bit; return it.

    Sources are tensors that backward keeps anyway. The note is void once the tensor or a source was changed in place.
    """
    if torch.is_grad_enabled():  # else there is no backward to keep anything for
        output._made_from = recipe, sources, _versions(output, *sources)  # type: ignore[attr-defined]
    return output


def _recipe_of(x: Tensor) -> tuple[Callable[..., Tensor] | None, tuple[Tensor, ...]]:
    recipe, sources, versions = getattr(x, "_made_from", (None, (), ()))
    return (recipe, sources) if recipe is not None and versions == _versions(x, *sources) else (None, (whole(x),))


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(x._version for x in tensors)


def whole(x: Tensor) -> Tensor:
    """What to keep of a tensor: itself, or a copy where it is a view on XLA, which would keep its base as well."""
    return x.clone() if x.device.type == "xla" and x._is_view() else x


def accurate(x: Tensor) -> Tensor:
    """A tensor in float32, or float64 where it is that."""
    return x if x.dtype == torch.float64 else x.float()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.recipe, sources = _recipe_of(x) if ctx.needs_input_grad[1] else (None, ())
        ctx.weight_dtype = weight_OI.dtype
        ctx.save_for_backward(weight_OI if ctx.needs_input_grad[0] else None, *sources)
        return F.linear(x, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        weight_OI, *sources = ctx.saved_tensors
        grad_x = grad_weight_OI = grad_bias_O = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.matmul(weight_OI.to(grad.dtype))
        if ctx.needs_input_grad[1]:
            x = ctx.recipe(*sources) if ctx.recipe else sources[0]
            grad_weight_OI = _rows(grad).t().matmul(_rows(x)).to(ctx.weight_dtype)
            if grad_x is not None:
                _at_once(grad_x, grad_weight_OI)
        if ctx.needs_input_grad[2]:
            grad_bias_O = _rows(grad).sum(0)
        return grad_x, grad_weight_OI, grad_bias_O


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _at_once(*tensors: Tensor) -> None:
    """Let XLA use none of these before it has all of them.

    Its scheduler would put off the gradients of weights to the end of backward, and hold every dy until then.
    """
    if tensors[0].device.type == "xla":
        sys.modules["torch_xla.core.xla_model"].optimization_barrier_(list(tensors))
