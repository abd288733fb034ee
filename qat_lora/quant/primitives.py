"""The maths of one quantised matrix: W ~ S * L[I] (+ Z), as pure tensor functions.

Owns the grids L, the choice of codes I, the way back, and the gradients. It does not know modules, how scales
are found (`search`), how they are parametrised (`scales`) or how codes are stored (`packing`).

`fake_quantize` and `dequantize` share the float operations that make a weight from a code, in one order, in
float32, so their results are equal bit for bit. Nothing here reads a tensor on the host or branches on a
value, so it traces lazily.

Shapes: O out features, I in features, G groups along I, C columns of a scale or offset (1, G or I), N levels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qat_lora.config import LinearQuant
from qat_lora.models.lean.static_graph import is_static

NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""QLoRA's 16 quantiles of a normal distribution, with an exact zero."""

IQ4_NL_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""llama.cpp's 16 integers (kvalues_iq4nl)."""

MOST_COMPARISONS = 15  # midpoints of a 4-bit table; beyond it a binary search is cheaper


def lowest_level(config: LinearQuant) -> float | None:
    """The lowest level of a grid whose levels are one apart, or None for a grid that is a table."""
    match config.levels:
        case "balanced":
            return -(2**config.bits - 1) / 2
        case "int":
            return float(-(2 ** (config.bits - 1)))
        case "affine":
            return 0.0
        case "ternary":
            return -1.0
        case _:
            return None


def level_values(config: LinearQuant) -> Tensor:
    """The grid of a config, ascending, float32 [N].

    A ``lut`` is learned: what stands here, N values evenly over [-1, 1], is only where its search begins.
    """
    lowest = lowest_level(config)
    if config.levels == "nf4":
        return torch.tensor(NF4_LEVELS)
    if config.levels == "iq4_nl":
        return torch.tensor(IQ4_NL_LEVELS, dtype=torch.float32)
    if lowest is None:
        return torch.linspace(-1, 1, 2**config.bits)
    count = 3 if config.levels == "ternary" else 2**config.bits
    return torch.arange(count, dtype=torch.float32) + lowest


def nearest_code(unit_OI: Tensor, levels_N: Tensor, *, lowest: float | None) -> Tensor:
    """Codes of the levels nearest to a weight in units of its scale, uint8 [O, I].

    Args:
        unit_OI: (w - Z) / S, float32.
        levels_N: the grid, ascending.
        lowest: `lowest_level` of the grid. A grid of step one rounds half to even; a table (None) compares
            with the midpoints of its neighbours, and a weight on a midpoint takes the lower level.
    """
    if lowest is None:
        return _midpoints_below(unit_OI, levels_N).to(torch.uint8)
    return _snap_(unit_OI.clone(), levels_N.shape[0], lowest).sub_(lowest).to(torch.uint8)


def group_columns(scale_OC: Tensor, in_features: int, group_size: int) -> Tensor:
    """Spread a scale or offset [O, C] over the columns it stands for: a tensor that broadcasts with [O, I].

    C is 1 (one per row), I (one per weight), or the number of groups, the last of which may be shorter.
    """
    columns = scale_OC.shape[1]
    if columns in (1, in_features):
        return scale_OC
    spread_OGg = scale_OC.unsqueeze(2).expand(-1, -1, group_size)
    return spread_OGg.reshape(scale_OC.shape[0], columns * group_size)[:, :in_features]


def sum_columns(values_OI: Tensor, columns: int, group_size: int) -> Tensor:
    """Sum over the columns that one scale stands for: [O, I] -> [O, C]."""
    out_features, in_features = values_OI.shape
    if columns == in_features:
        return values_OI
    if columns == 1:
        return values_OI.sum(1, keepdim=True)
    padded_OI = F.pad(values_OI, (0, columns * group_size - in_features))
    return padded_OI.view(out_features, columns, group_size).sum(2)


def quantize(
    weight_OI: Tensor, scale_OC: Tensor, levels_N: Tensor, offset_OC: Tensor | None, config: LinearQuant
) -> Tensor:
    """Codes uint8 [O, I] of a weight: the nearest level to (w - Z) * (1 / S)."""
    unit_OI = _to_units(weight_OI, scale_OC, offset_OC, config.group_size)
    return nearest_code(unit_OI, levels_N, lowest=lowest_level(config))


def dequantize(
    codes_OI: Tensor, scale_OC: Tensor, levels_N: Tensor, offset_OC: Tensor | None, config: LinearQuant
) -> Tensor:
    """S * L[I] (+ Z), float32 [O, I]; bit-equal to `fake_quantize` of the weight the codes came from."""
    level_OI = _levels_of(codes_OI, levels_N, lowest_level(config))
    return _from_levels(level_OI, scale_OC, offset_OC, config.group_size)


def fake_quantize(
    weight_OI: Tensor, scale_OC: Tensor, levels_N: Tensor, offset_OC: Tensor | None, config: LinearQuant
) -> Tensor:
    """Round a master weight to its grid, float32 [O, I], with gradients.

    The gradient g of the result passes to the weight unchanged (straight through). With codes held constant
    it is exact for the rest: dS = sum over S's columns of g * L[I], dZ = sum over Z's columns of g, dL[n] =
    sum where I = n of g * S.

    Args:
        weight_OI: master weight.
        scale_OC: [O, 1], [O, G] with groups of `config.group_size`, or [O, I]. Where it is 0 the result is Z
            (or 0).
        levels_N: ascending.
        offset_OC: Z in units of the weight, shaped like a scale, or None.
        config: which grid, and the group size.
    """
    return _FakeQuantize.apply(weight_OI, scale_OC, levels_N, offset_OC, config)


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
        ctx: Any,
        weight_OI: Tensor,
        scale_OC: Tensor,
        levels_N: Tensor,
        offset_OC: Tensor | None,
        config: LinearQuant,
    ) -> Tensor:
        lowest = lowest_level(config)
        _, needs_scale, needs_levels, needs_offset, _ = ctx.needs_input_grad
        unit_OI = _to_units(weight_OI, scale_OC, offset_OC, config.group_size)
        index_OI: Tensor | None = None
        if lowest is None:
            index_OI = _midpoints_below(unit_OI, levels_N)
            level_OI = _levels_of(index_OI, levels_N, None)
        else:
            level_OI = _snap_(unit_OI, levels_N.shape[0], lowest)
            if needs_scale or needs_levels:
                index_OI = level_OI - lowest
        ctx.config = config
        ctx.offset_columns = offset_OC.shape[1] if offset_OC is not None and needs_offset else 0
        # Straight through needs nothing. Codes, a quarter of the weight's bytes, serve scale and levels.
        ctx.save_for_backward(
            index_OI.to(torch.uint8) if index_OI is not None and (needs_scale or needs_levels) else None,
            levels_N if needs_scale else None,
            scale_OC if needs_levels else None,
        )
        ctx.scale_columns, ctx.level_count = scale_OC.shape[1], levels_N.shape[0]
        return _from_levels(level_OI, scale_OC, offset_OC, config.group_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_OI = grads[0]
        codes_OI, levels_N, scale_OC = ctx.saved_tensors
        size = ctx.config.group_size
        grad_scale = grad_levels = grad_offset = None
        if levels_N is not None:
            level_OI = _levels_of(codes_OI, levels_N, lowest_level(ctx.config))
            grad_scale = sum_columns(level_OI.mul_(grad_OI), ctx.scale_columns, size)
        if scale_OC is not None:
            grad_levels = sum_by_code(_times_columns(grad_OI, scale_OC, size), codes_OI, ctx.level_count)
        if ctx.offset_columns:
            grad_offset = sum_columns(grad_OI, ctx.offset_columns, size)
        return grad_OI if ctx.needs_input_grad[0] else None, grad_scale, grad_levels, grad_offset, None


def _to_units(weight_OI: Tensor, scale_OC: Tensor, offset_OC: Tensor | None, group_size: int) -> Tensor:
    # 1 / 0 becomes the largest float: then 0 * it is 0, other weights saturate, and no NaN can arise.
    inverse_OC = scale_OC.float().reciprocal().nan_to_num_()
    weight_OI = weight_OI.float()
    if offset_OC is not None:
        weight_OI = weight_OI - group_columns(offset_OC, weight_OI.shape[1], group_size)
    return _times_columns(weight_OI, inverse_OC, group_size)


def _from_levels(level_OI: Tensor, scale_OC: Tensor, offset_OC: Tensor | None, group_size: int) -> Tensor:
    # Two roundings, product then sum: a fused multiply-add would differ from one that is not.
    weight_OI = _times_columns(level_OI, scale_OC.float(), group_size)
    if offset_OC is not None:
        weight_OI += group_columns(offset_OC.float(), weight_OI.shape[1], group_size)
    return weight_OI


def _snap_(unit_OI: Tensor, count: int, lowest: float) -> Tensor:
    shift = lowest % 1.0  # .5 for a balanced grid: round to the nearest half
    if shift:
        return unit_OI.sub_(shift).round_().clamp_(lowest - shift, lowest - shift + count - 1).add_(shift)
    return unit_OI.round_().clamp_(lowest, lowest + count - 1)


def _midpoints_below(unit_OI: Tensor, levels_N: Tensor) -> Tensor:
    """The number of midpoints below each weight, which is the index of its level; any dtype."""
    midpoints = (levels_N[1:] + levels_N[:-1]) * 0.5
    if len(midpoints) > MOST_COMPARISONS:
        return torch.bucketize(unit_OI, midpoints, out_int32=True)
    # On a CPU counting in floats takes a fifth of bucketize's time, and a third of counting in bools.
    count_OI, above_OI = torch.zeros_like(unit_OI), torch.empty_like(unit_OI)
    for midpoint in midpoints.unbind():
        count_OI += above_OI.copy_(unit_OI).gt_(midpoint)
    return count_OI


def sum_by_code(values_OI: Tensor, codes_OI: Tensor, count: int) -> Tensor:
    """Sum of the values at each code, [N]."""
    if _has_dear_scatter(values_OI, count):
        zero = torch.zeros((), dtype=values_OI.dtype, device=values_OI.device)
        return torch.stack([torch.where(codes_OI == code, values_OI, zero).sum() for code in range(count)])
    bins_ON = values_OI.new_zeros(values_OI.shape[0], count)
    return bins_ON.scatter_add_(1, codes_OI.long(), values_OI).sum(0)


def selected_levels(codes_OI: Tensor, levels_N: Tensor) -> Tensor:
    """levels_N[codes], as one comparison per level."""
    first, *others = levels_N.float().unbind()
    level_OI = first.expand(codes_OI.shape)
    for code, level in enumerate(others, start=1):
        level_OI = torch.where(codes_OI >= code, level, level_OI)
    return level_OI


def _has_dear_scatter(x: Tensor, count: int) -> bool:
    """A TPU reads and writes a table of levels one element at a time; up to 16 comparisons in one pass are cheaper."""
    return is_static(x) and count <= MOST_COMPARISONS + 1


def _levels_of(codes_OI: Tensor, levels_N: Tensor, lowest: float | None) -> Tensor:
    if lowest is None and _has_dear_scatter(codes_OI, levels_N.shape[0]):
        return selected_levels(codes_OI, levels_N)
    if lowest is None:
        return levels_N.float().index_select(0, codes_OI.reshape(-1).int()).view(codes_OI.shape)
    level_OI = codes_OI.float()
    return level_OI.add_(lowest) if lowest else level_OI


def _times_columns(values_OI: Tensor, scale_OC: Tensor, group_size: int) -> Tensor:
    """Product with a spread scale; groups that divide the row broadcast, which is faster and the same."""
    out_features, in_features = values_OI.shape
    columns = scale_OC.shape[1]
    if columns not in (1, in_features) and columns * group_size == in_features:
        grouped = values_OI.reshape(out_features, columns, group_size)
        return (grouped * scale_OC.unsqueeze(2)).view(out_features, in_features)
    return values_OI * group_columns(scale_OC, in_features, group_size)
