"""Rounding a matrix to its form: weights to codes, codes to weights, and both at once with gradients.

`fake_quantize` and `dequantize` share the float operations that make a weight from a level, in one order, in float32,
so their results are equal bit for bit. Nothing here reads a tensor on the host or branches on a value, so it traces
lazily. How a good form is found is in `start`, how codes are stored in `packing`.

Shapes: O out features, I in features, G groups along I, C columns of a scale or offset (1, G or I), R rank, N levels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qat_lora.config import LinearQuant
from qat_lora.quant.grids import Grid, sum_by_code
from qat_lora.quant.scales import multiply_factors, spread_columns, sum_columns, times_columns


class Form(NamedTuple):
    """All but the codes that a matrix W = S * L[I] (+ Z) is made of.

    Attributes:
        scale: (S,) with S [O, 1], [O, G] or [O, I], or (A [O, R], B [R, I]) with S = A @ B. Where S is 0, W is Z or 0.
        levels_N: L, ascending.
        offset_OG: Z in units of the weight, or None.
        config: what grid, which groups, and the dtype that the values are stored in.
    """

    scale: tuple[Tensor, ...]
    levels_N: Tensor
    offset_OG: Tensor | None
    config: LinearQuant

    @classmethod
    def of(cls, config: LinearQuant, levels_N: Tensor, *side_values: Tensor) -> Form:
        """The form of these levels and `side_values`."""
        scale, offset_OG = (side_values[:-1], side_values[-1]) if config.has_offset else (side_values, None)
        return cls(scale, levels_N, offset_OG, config)

    def side_values(self) -> tuple[Tensor, ...]:
        """Scale or factors, and the offset where there is one."""
        return self.scale if self.offset_OG is None else (*self.scale, self.offset_OG)

    def scale_OC(self) -> Tensor:
        """S as one tensor."""
        return self.scale[0] if len(self.scale) == 1 else multiply_factors(*self.scale)

    def stored(self) -> Form:
        """The same with values that `config.scale_dtype` can hold, in float32; learned levels ascend again."""
        dtype: torch.dtype = getattr(torch, self.config.scale_dtype)
        levels_N = self.levels_N
        if self.config.is_learned:
            levels_N = round_through(levels_N, dtype).sort(stable=True).values
        return Form.of(self.config, levels_N, *(round_through(x, dtype) for x in self.side_values()))


def quantize(weight_OI: Tensor, form: Form) -> Tensor:
    """Codes uint8 [O, I] of a weight: the nearest level to (w - Z) * (1 / S)."""
    unit_OI = _to_units(weight_OI, form.scale_OC(), form.offset_OG, form.config.group_size)
    return Grid.of(form.config, form.levels_N).codes(unit_OI)


def dequantize(codes_OI: Tensor, form: Form) -> Tensor:
    """S * L[I] (+ Z), float32 [O, I]; bit-equal to `fake_quantize` of the weight the codes came from."""
    level_OI = Grid.of(form.config, form.levels_N).values(codes_OI)
    return _from_levels(level_OI, form.scale_OC(), form.offset_OG, form.config.group_size)


def fake_quantize(weight_OI: Tensor, form: Form) -> Tensor:
    """Round a master weight to its form, float32 [O, I], with gradients.

    The gradient g of the result passes to the weight unchanged (straight through). With codes held constant it is exact
    for the rest: dS = sum over S's columns of g * L[I], dZ = sum over Z's columns of g, dL[n] = sum where I = n of
    g * S.
    """
    return _FakeQuantize.apply(weight_OI, form.scale_OC(), form.levels_N, form.offset_OG, form.config)


def round_through(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 values to ones that `dtype` can hold, clamped to its range; identity gradient."""
    return values if dtype == torch.float32 else _RoundThrough.apply(values, dtype)


class _RoundThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, dtype: torch.dtype) -> Tensor:
        limit = torch.finfo(dtype).max
        return values.clamp(-limit, limit).to(dtype).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight_OI: Tensor, scale_OC: Tensor, levels_N: Tensor, offset_OC: Tensor | None, config: LinearQuant
    ) -> Tensor:
        _, needs_scale, needs_levels, needs_offset, _ = ctx.needs_input_grad
        unit_OI = _to_units(weight_OI, scale_OC, offset_OC, config.group_size)
        level_OI, codes_OI = Grid.of(config, levels_N).round_(unit_OI, with_codes=needs_scale or needs_levels)
        # Straight through needs nothing. Codes, a quarter of the weight's bytes, serve scale and levels.
        ctx.save_for_backward(codes_OI, levels_N if needs_scale else None, scale_OC if needs_levels else None)
        ctx.config, ctx.scale_columns, ctx.level_count = config, scale_OC.shape[1], len(levels_N)
        ctx.offset_columns = offset_OC.shape[1] if offset_OC is not None and needs_offset else 0
        return _from_levels(level_OI, scale_OC, offset_OC, config.group_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_OI = grads[0]
        codes_OI, levels_N, scale_OC = ctx.saved_tensors
        size = ctx.config.group_size
        grad_scale = grad_levels = grad_offset = None
        if levels_N is not None:
            level_OI = Grid.of(ctx.config, levels_N).values(codes_OI)
            grad_scale = sum_columns(level_OI.mul_(grad_OI), ctx.scale_columns, size)
        if scale_OC is not None:
            grad_levels = sum_by_code(times_columns(grad_OI, scale_OC, size), codes_OI, ctx.level_count)
        if ctx.offset_columns:
            grad_offset = sum_columns(grad_OI, ctx.offset_columns, size)
        return grad_OI if ctx.needs_input_grad[0] else None, grad_scale, grad_levels, grad_offset, None


def _to_units(weight_OI: Tensor, scale_OC: Tensor, offset_OC: Tensor | None, group_size: int) -> Tensor:
    # 1 / 0 becomes the largest float: then 0 * it is 0, other weights saturate, and no NaN can arise.
    inverse_OC = scale_OC.float().reciprocal().nan_to_num_()
    weight_OI = weight_OI.float()
    if offset_OC is not None:
        weight_OI = weight_OI - spread_columns(offset_OC, weight_OI.shape[1], group_size)
    return times_columns(weight_OI, inverse_OC, group_size)


def _from_levels(level_OI: Tensor, scale_OC: Tensor, offset_OC: Tensor | None, group_size: int) -> Tensor:
    # Two roundings, product then sum: a fused multiply-add would differ from one that is not.
    weight_OI = times_columns(level_OI, scale_OC.float(), group_size)
    if offset_OC is not None:
        weight_OI += spread_columns(offset_OC.float(), weight_OI.shape[1], group_size)
    return weight_OI
