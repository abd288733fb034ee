"""Decoder layers as a loop of the device: traced once forward and once backward, whatever their number.

Not torch_xla's own ``scan``: it traces through AOTAutograd, which keeps other tensors than our autograd functions do,
rounded weights among them. Here forward is a loop over the layers that keeps the input of each, and backward a loop
that runs each again on what was kept, with plain lazy tracing in both. The layers' tensors are stacked in each loop:
stacked once, they would be held twice in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

Step: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]
DeviceLoop: TypeAlias = Callable[..., tuple[list[Tensor], list[Tensor]]]
"""(step, first carry, xs [n, ...], reverse=) -> (last carry, outputs [n, ...]), without gradients."""


def scan_layers(layers: Sequence[nn.Module], hidden_BTH: Tensor, shared: dict[str, Any], loop: DeviceLoop) -> Tensor:
    """Run layers that differ only in the values of their tensors, each called with the keywords `shared`.

    They must draw no random numbers: backward would draw others.
    """
    body = _Layer(layers[0], shared)
    flat = [tensor for layer in layers for tensor in _tensors(layer).values()]
    output: Tensor = _ScanLayers.apply(body, len(layers), loop, hidden_BTH, *body.constants, *flat)
    return output


def as_numbers(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Bool as uint8: torch_xla multiplies what goes into a loop by 1, and a bool would come out as an int64."""
    return [tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor for tensor in tensors]


class _Layer:
    """One decoder layer as a function of hidden states, constants (the tensors in its keywords) and its own tensors."""

    def __init__(self, layer: nn.Module, shared: dict[str, Any]) -> None:
        self.layer, self.names = layer, list(_tensors(layer))
        leaves, self._spec = tree_flatten(shared)
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self._settings = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.constants = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._dtypes = [tensor.dtype for tensor in (*self.constants, *_tensors(layer).values())]
        self.is_grad_enabled = torch.is_grad_enabled()  # inside an autograd.Function it never is

    def __call__(self, hidden: Tensor, constants: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        given = [tensor.to(dtype) for tensor, dtype in zip((*constants, *tensors), self._dtypes, strict=True)]
        rest, settings = iter(given), iter(self._settings)
        leaves = [next(rest) if is_tensor else next(settings) for is_tensor in self._is_tensor]
        own = dict(zip(self.names, rest, strict=True))
        output = functional_call(self.layer, own, (hidden,), tree_unflatten(leaves, self._spec), strict=True)
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first


class _ScanLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, body: _Layer, depth: int, loop: DeviceLoop, hidden: Tensor, *tensors: Tensor) -> Tensor:
        count = len(body.constants)
        constants, flat = tensors[:count], tensors[count:]
        ctx.body, ctx.depth, ctx.loop = body, depth, loop
        keeps = body.is_grad_enabled and any(ctx.needs_input_grad)

        def step(carry: Sequence[Tensor], x: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            hidden, *constants = carry
            return [body(hidden, constants, x), *constants], [hidden] if keeps else []

        # constants go round unchanged: a tensor that the body closes over would be computed anew in every turn
        carry, kept = loop(step, [hidden, *as_numbers(constants)], _stacked(flat, depth), reverse=False)
        ctx.save_for_backward(*kept, *tensors)
        return carry[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        body, depth = ctx.body, ctx.depth
        count = len(body.constants)
        hidden_LBTH, *tensors = ctx.saved_tensors
        constants, flat = tensors[:count], tensors[count:]
        wanted = ctx.needs_input_grad[4 + count :]
        width = len(flat) // depth
        learns = [any(wanted[i::width]) for i in range(width)]

        def step(carry: Sequence[Tensor], x: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            grad, *constants = carry
            leaf = x[0].detach().requires_grad_()
            own = [tensor.detach().requires_grad_(learn) for tensor, learn in zip(x[1:], learns, strict=True)]
            with torch.enable_grad():
                output = body(leaf, constants, own)
            leaves = [leaf, *(tensor for tensor, learn in zip(own, learns, strict=True) if learn)]
            found = torch.autograd.grad(output, leaves, grad, materialize_grads=True)
            return [found[0], *constants], list(found[1:])

        xs = [hidden_LBTH, *_stacked(flat, depth)]
        carry, found = ctx.loop(step, [grads[0], *as_numbers(constants)], xs, reverse=True)
        stacked = iter(found)
        by_tensor = [next(stacked).unbind() if learn else (None,) * depth for learn in learns]
        flat_grads = [of_layers[index] for index in range(depth) for of_layers in by_tensor]
        own = [grad if want else None for grad, want in zip(flat_grads, wanted, strict=True)]
        return None, None, None, carry[0] if ctx.needs_input_grad[3] else None, *([None] * count), *own


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _stacked(flat: Sequence[Tensor], depth: int) -> list[Tensor]:
    """[L * n] tensors, layer by layer -> n tensors [L, ...]."""
    width = len(flat) // depth
    return [torch.stack(as_numbers(flat[i::width])) for i in range(width)]
