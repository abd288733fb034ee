"""Matrix products and gated products that keep for backward no more than they must.

    y = x W^T + b,         dx = dy W,  dW = dy^T x,  db = sum of dy
    p = silu(g) * u,       dg = dy * u * s * (1 + g * (1 - s)),  du = dy * silu(g),  s = sigmoid(g)

A product's input often follows by a few cheap operations from tensors that backward keeps anyway: the output of a norm,
of a gated product. Such a tensor is `made_from` them, and a product keeps these and makes it again.

On XLA a tensor and a view of it are two buffers, and the view keeps the tensor alive; torch's own products keep views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``[..., I] -> [..., O]`` in the dtype of x (or of autocast), whatever the dtypes of weight and bias."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    output: Tensor = _Linear.apply(x, weight_OI, bias_O)
    return output


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element; both are kept and the product can be made again from them."""
    return made_from(_SiluTimes.apply(gate, up), _silu_times, gate, up)


def made_from(output: Tensor, recipe: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """Note on a tensor that recipe(*sources) gives it, bit for bit; returns the tensor."""
    output._made_from = recipe, sources  # type: ignore[attr-defined]
    return output


def whole(x: Tensor) -> Tensor:
    """What to keep of a tensor: itself, or on XLA a copy of a view, which does not hold what it looks at."""
    return x.clone() if x.device.type == "xla" and x._is_view() else x


def accurate(x: Tensor) -> Tensor:
    """A tensor in float32, or float64 where it is that."""
    return x if x.dtype == torch.float64 else x.float()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.recipe, sources = getattr(x, "_made_from", (None, ()))
        if not ctx.needs_input_grad[1]:
            ctx.recipe, sources = None, ()
        elif ctx.recipe is None:
            sources = (whole(x),)
        ctx.save_for_backward(weight_OI, *sources)
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
            grad_weight_OI = grad.flatten(0, -2).t().matmul(x.flatten(0, -2)).to(weight_OI.dtype)
            if grad_x is not None:
                _at_once(grad_x, grad_weight_OI)
        if ctx.needs_input_grad[2]:
            grad_bias_O = grad.flatten(0, -2).sum(0)
        return grad_x, grad_weight_OI, grad_bias_O


def _at_once(*tensors: Tensor) -> None:
    """Let XLA use none of these before it has all of them.

    Its scheduler would put off the gradients of weights to the end of backward, and hold every dy until then.
    """
    if tensors[0].device.type == "xla":
        from torch_xla.core import xla_model

        xla_model.optimization_barrier_(list(tensors))


def _silu_times(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class _SiluTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(whole(gate), whole(up))
        return _silu_times(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        wide, grad = accurate(gate), accurate(grads[0])
        sigmoid = torch.sigmoid(wide)
        grad_gate = grad * accurate(up) * sigmoid * (1 + wide * (1 - sigmoid))
        return grad_gate.to(gate.dtype), (grad * wide * sigmoid).to(up.dtype)
