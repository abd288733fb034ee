"""Matrix products that keep for backward no more than they must.

    y = x W^T + b,  dx = dy W,  dW = dy^T x,  db = sum of dy

A few cheap operations often make a factor from tensors that are there anyway: the output of a norm, of a gated product,
a weight decoded from its codes. It carries a recipe (`made_from`); the product keeps what that needs, and backward
makes the factor again.

In a graph compiled ahead a view is a buffer of its own that keeps its base alive; torch's own products keep views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qat_lora.models.lean.static_graph import finish_together, is_static


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``[..., I] -> [..., O]`` in the dtype of x (or of autocast), whatever the dtypes of weight and bias.

    Once differentiable.
    """
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    recipe = _recipe_of(weight_OI)
    if not isinstance(weight_OI, nn.Parameter):  # what is made for this product is saved as narrow as it is used
        weight_OI = weight_OI.to(x.dtype)
    return _Linear.apply(x, weight_OI, bias_O, _recipe_of(x), recipe)


class _Recipe(NamedTuple):
    """How to make a tensor again: make(*sources), while every tensor has the version that is noted."""

    make: Callable[..., Tensor]
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]


def made_from(output: Tensor, make: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """Note on a tensor that make(*sources) gives it, bit for bit; return it.

    Sources are tensors that backward keeps anyway. The note is void once the tensor or a source was changed in place.
    """
    if torch.is_grad_enabled():  # else there is no backward to keep anything for
        output._made_from = _Recipe(make, sources, _versions(output, *sources))  # type: ignore[attr-defined]
    return output


def _recipe_of(x: Tensor) -> _Recipe | None:
    recipe: _Recipe | None = getattr(x, "_made_from", None)
    return recipe if recipe is not None and recipe.versions == _versions(x, *recipe.sources) else None


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(x._version for x in tensors)


def without_base(x: Tensor) -> Tensor:
    """What to keep of a tensor: itself, or a copy where it is a view that keeps its base alive."""
    return x.clone() if is_static(x) and x._is_view() else x


def accurate(x: Tensor) -> Tensor:
    """A tensor in float32, or float64 where it is that."""
    return x if x.dtype == torch.float64 else x.float()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, of_x: _Recipe | None, of_weight: _Recipe | None
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        for_x = (of_weight.sources if of_weight else (weight_OI,)) if needs_x else ()
        for_weight = (of_x.sources if of_x else (without_base(x),)) if needs_weight else ()
        ctx.make_x, ctx.make_weight = of_x and of_x.make, of_weight and of_weight.make
        ctx.weight_dtype, ctx.split = weight_OI.dtype, len(for_x)
        ctx.save_for_backward(*for_x, *for_weight)
        return F.linear(x, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        saved = ctx.saved_tensors  # once: a recomputed layer gives them out a single time
        for_x, for_weight = saved[: ctx.split], saved[ctx.split :]
        grad_x = grad_weight_OI = grad_bias_O = None
        if ctx.needs_input_grad[0]:
            weight_OI = ctx.make_weight(*for_x) if ctx.make_weight else for_x[0]
            grad_x = grad.matmul(weight_OI.to(grad.dtype))
        if ctx.needs_input_grad[1]:
            x = ctx.make_x(*for_weight) if ctx.make_x else for_weight[0]
            grad_weight_OI = _rows(grad).t().matmul(_rows(x)).to(ctx.weight_dtype)
            if grad_x is not None:  # else XLA puts off the gradients of weights, and holds every dy till then
                finish_together(grad_x, grad_weight_OI)
        if ctx.needs_input_grad[2]:
            grad_bias_O = _rows(grad).sum(0)
        return grad_x, grad_weight_OI, grad_bias_O, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
