"""Grids: the levels L, which of them a weight takes, and which level a code stands for.

`level_values` is the one table of values; what else must be known of a grid follows from them. Owns the rule for ties.
Knows nothing of scales: weights come in units of their scale.

Shapes: O out features, I in features, N levels.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from qat_lora.config import LinearQuant
from qat_lora.models.lean.static_graph import is_static

NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""QLoRA's 16 quantiles of a normal distribution, with an exact zero."""

IQ4_NL_LEVELS = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0,
                 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)  # fmt: skip
"""llama.cpp's 16 integers (kvalues_iq4nl)."""

MOST_COMPARISONS = 15  # midpoints of a 4-bit table; beyond it a binary search is cheaper


def level_values(config: LinearQuant) -> tuple[float, ...]:
    """The levels of a config, ascending.

    Those of a ``lut`` are learned; its search begins with these, evenly over [-1, 1].
    """
    count = 2**config.bits
    match config.levels:
        case "balanced":
            return tuple(n - (count - 1) / 2 for n in range(count))
        case "int":
            return tuple(n - count / 2 for n in range(count))
        case "affine":
            return tuple(float(n) for n in range(count))
        case "ternary":
            return (-1.0, 0.0, 1.0)
        case "nf4":
            return NF4_LEVELS
        case "iq4_nl":
            return IQ4_NL_LEVELS
        case "lut":
            return tuple(torch.linspace(-1, 1, count).tolist())


@functools.cache
def lowest_level(config: LinearQuant) -> float | None:
    """The lowest level of a grid whose levels are one apart; None for all others, which are tables."""
    values = level_values(config)
    is_even = not config.is_learned and all(high - low == 1 for low, high in itertools.pairwise(values))
    return values[0] if is_even else None


def is_symmetric(config: LinearQuant) -> bool:
    """Whether negative scales give a group nothing new: each level has its opposite, or an offset moves them all."""
    values = level_values(config)
    return config.has_offset or (not config.is_learned and values == tuple(-value for value in reversed(values)))


class Grid(NamedTuple):
    """Levels, and the rule by which a weight in units of its scale takes the nearest of them.

    Attributes:
        levels_N: ascending.
        lowest: of an even grid, whose levels are one apart: there a weight is rounded, half to even. None for a table:
            there a weight is compared with the midpoints between neighbours, and on a midpoint takes the lower level.
    """

    levels_N: Tensor
    lowest: float | None = None

    @classmethod
    def of(cls, config: LinearQuant, levels_N: Tensor | None = None) -> Grid:
        """The grid of a config; `levels_N` are its levels as a tensor, where there is one already."""
        return cls(torch.tensor(level_values(config)) if levels_N is None else levels_N, lowest_level(config))

    def codes(self, unit_OI: Tensor) -> Tensor:
        """Codes, uint8: the index of the nearest level."""
        if self.lowest is None:
            return self._midpoints_below(unit_OI).to(torch.uint8)
        return self._snap_(unit_OI.clone(), self.lowest).sub_(self.lowest).to(torch.uint8)

    def round_(self, unit_OI: Tensor, *, with_codes: bool) -> tuple[Tensor, Tensor | None]:
        """The nearest levels, float32, and where asked for their codes; may write into what it is given."""
        if self.lowest is None:
            index_OI = self._midpoints_below(unit_OI)
            return self.values(index_OI), index_OI.to(torch.uint8) if with_codes else None
        level_OI = self._snap_(unit_OI, self.lowest)
        return level_OI, (level_OI - self.lowest).to(torch.uint8) if with_codes else None

    def values(self, codes_OI: Tensor) -> Tensor:
        """The levels of codes, float32."""
        if self.lowest is not None:
            level_OI = codes_OI.float()
            return level_OI.add_(self.lowest) if self.lowest else level_OI
        if compares_codes(codes_OI, len(self.levels_N)):
            return selected_levels(codes_OI, self.levels_N)
        return self.levels_N.float().index_select(0, codes_OI.reshape(-1).int()).view(codes_OI.shape)

    def _snap_(self, unit_OI: Tensor, lowest: float) -> Tensor:
        shift, last = lowest % 1.0, len(self.levels_N) - 1
        if shift:  # .5 for a balanced grid: round to the nearest half
            return unit_OI.sub_(shift).round_().clamp_(lowest - shift, lowest - shift + last).add_(shift)
        return unit_OI.round_().clamp_(lowest, lowest + last)

    def _midpoints_below(self, unit_OI: Tensor) -> Tensor:
        """The number of midpoints below each weight, which is the index of its level; any dtype."""
        midpoints = (self.levels_N[1:] + self.levels_N[:-1]) * 0.5
        if len(midpoints) > MOST_COMPARISONS:
            return torch.bucketize(unit_OI, midpoints, out_int32=True)
        # On a CPU counting in floats takes a fifth of bucketize's time, and a third of counting in bools.
        count_OI, above_OI = torch.zeros_like(unit_OI), torch.empty_like(unit_OI)
        for midpoint in midpoints.unbind():
            count_OI += above_OI.copy_(unit_OI).gt_(midpoint)
        return count_OI


def sum_by_code(values_OI: Tensor, codes_OI: Tensor, count: int) -> Tensor:
    """Sum of the values at each code, [N]."""
    if compares_codes(values_OI, count):
        zero = torch.zeros((), dtype=values_OI.dtype, device=values_OI.device)
        return torch.stack([torch.where(codes_OI == code, values_OI, zero).sum() for code in range(count)])
    bins_ON = values_OI.new_zeros(values_OI.shape[0], count)
    return bins_ON.scatter_add_(1, codes_OI.long(), values_OI).sum(0)


def selected_levels(codes_OI: Tensor, levels_N: Tensor) -> Tensor:
    """levels_N[codes], as one comparison per level."""
    lowest, *others = levels_N.float().unbind()
    level_OI = lowest.expand(codes_OI.shape)
    for code, level in enumerate(others, start=1):
        level_OI = torch.where(codes_OI >= code, level, level_OI)
    return level_OI


def compares_codes(x: Tensor, count: int) -> bool:
    """A TPU reads and writes a table one element at a time; up to 16 comparisons in one pass are cheaper."""
    return is_static(x) and count <= MOST_COMPARISONS + 1
