"""Scales and offsets of given levels, by search over the squared error of each group.

Owns the search for one matrix; it runs once, without gradients. A scale is never plain abs-max: abs-max is
one candidate among many, so the result cannot be worse than it.

For each group: (1) scales as fractions of abs-max, of both signs where the grid is asymmetric, each rounded
to the dtype it will be stored in and judged by the squared error of the weights it gives; (2) from the best
of these, a few exact least-squares steps with the codes held, S = <w, L[I]> / <L[I], L[I]> (with an offset:
the 2 x 2 system), kept where the error falls.

Shapes: O out features, I in features, G groups, g columns of a group, N levels, M rows times groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qat_lora.config import LinearQuant
from qat_lora.quant.primitives import level_values, lowest_level, nearest_code, round_through
from qat_lora.quant.scales import group_count

FINE_FRACTIONS = (0.3, 26)  # from this fraction of abs-max up to it, in so many even steps, per sign
COARSE_FRACTIONS = (0.05, 0.09, 0.14, 0.2, 0.25)  # for long rows and outliers, where clipping most of the range pays
LEAST_SQUARES_STEPS = 4
CHUNK_WEIGHTS = 2**18  # weights searched at a time, so that temporaries stay in cache


class SearchedScales(NamedTuple):
    """Scale [O, G] and, for ``affine``, offset [O, G]; float32 values that `config.scale_dtype` can hold."""

    scale_OG: Tensor
    offset_OG: Tensor | None


@torch.no_grad()
def search_scales(
    weight_OI: Tensor,
    config: LinearQuant,
    levels_N: Tensor | None = None,
    *,
    both_signs: bool | None = None,
) -> SearchedScales:
    """The scale (and offset) of each group that gives the least squared error found.

    Args:
        weight_OI: the matrix.
        config: its form; ``lowrank`` is searched like ``group``.
        levels_N: ascending levels, the grid of the config if None.
        both_signs: also try negative scales; None means for the grids that are asymmetric.
    """
    levels_N = level_values(config) if levels_N is None else levels_N
    weight_OI = weight_OI.detach().float()
    out_features, in_features = weight_OI.shape
    groups = group_count(in_features, config)
    size = group_width(in_features, config)
    grouped_Mg, mask_Mg = grouped_rows(weight_OI, groups, size)
    both_signs = has_signed_scales(config) if both_signs is None else both_signs
    search = _GridSearch(config, levels_N.to(weight_OI.device), both_signs)
    chunk = max(1, CHUNK_WEIGHTS // size)
    found = [
        search(grouped_Mg[start : start + chunk], mask_Mg[start : start + chunk])
        for start in range(0, grouped_Mg.shape[0], chunk)
    ]
    scale_OG = torch.cat([scale for scale, _ in found]).view(out_features, groups)
    if config.levels != "affine":
        return SearchedScales(scale_OG, None)
    return SearchedScales(scale_OG, torch.cat([offset for _, offset in found]).view(out_features, groups))


def has_signed_scales(config: LinearQuant) -> bool:
    """Whether a grid is asymmetric, so that a negative scale gives a group other levels."""
    return config.levels not in ("balanced", "ternary", "affine")


def group_width(in_features: int, config: LinearQuant) -> int:
    """Columns of a full group."""
    return in_features if config.scales == "channel" else config.group_size


def ratio(numerator: Tensor, denominator: Tensor, otherwise: Tensor) -> Tensor:
    """Numerator / denominator where the denominator, a sum of squares, is not 0."""
    return torch.where(denominator > 0, numerator / denominator.clamp(min=1e-30), otherwise)


def grouped_rows(weight_OI: Tensor, groups: int, size: int) -> tuple[Tensor, Tensor]:
    """Weights as [O * G, g], and a mask that is 0 for padding, which repeats the row's last weight."""
    out_features, in_features = weight_OI.shape
    missing = groups * size - in_features
    mask_I = F.pad(weight_OI.new_ones(in_features), (0, missing))
    if missing:
        weight_OI = torch.cat([weight_OI, weight_OI[:, -1:].expand(-1, missing)], 1)
    mask_Mg = mask_I.view(groups, size).expand(out_features, -1, -1).reshape(-1, size)
    return weight_OI.reshape(-1, size), mask_Mg


def _dot(left_Mg: Tensor, right_Mg: Tensor) -> Tensor:
    return (left_Mg * right_Mg).sum(1, keepdim=True)


class _GridSearch:
    """The search over groups [M, g]; a mask of 0 marks the padding of a short last group."""

    def __init__(self, config: LinearQuant, levels_N: Tensor, both_signs: bool) -> None:
        self.levels_N = levels_N
        self.lowest = lowest_level(config)
        self.dtype: torch.dtype = getattr(torch, config.scale_dtype)
        self.affine = config.levels == "affine"
        self.signs = (1.0, -1.0) if both_signs else (1.0,)
        self.largest = float(levels_N.abs().max())
        smaller_side = max(float(min(-levels_N[0], levels_N[-1])), self.largest / 2)
        self.fractions = _fractions(1.0 if self.affine else self.largest / smaller_side)

    def __call__(self, weight_Mg: Tensor, mask_Mg: Tensor) -> tuple[Tensor, Tensor]:
        high_M1, low_M1 = weight_Mg.amax(1, keepdim=True), weight_Mg.amin(1, keepdim=True)
        reach_M1 = (high_M1 - low_M1) if self.affine else weight_Mg.abs().amax(1, keepdim=True)
        centre_M1 = (high_M1 + low_M1) / 2 if self.affine else torch.zeros_like(high_M1)
        best = None
        for sign in self.signs:
            for fraction in self.fractions:
                scale_M1 = reach_M1 * (sign * fraction / self.largest)
                offset_M1 = centre_M1 - scale_M1 * (self.largest / 2) if self.affine else centre_M1
                best = self._better(best, weight_Mg, mask_Mg, scale_M1, offset_M1)
        assert best is not None
        for _ in range(LEAST_SQUARES_STEPS):
            scale_M1, offset_M1 = self._least_squares(weight_Mg, mask_Mg, *best[:2])
            best = self._better(best, weight_Mg, mask_Mg, scale_M1, offset_M1)
        return best[0], best[1]

    def _better(
        self,
        best: tuple[Tensor, Tensor, Tensor] | None,
        weight_Mg: Tensor,
        mask_Mg: Tensor,
        scale_M1: Tensor,
        offset_M1: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best (scale, offset, error) of each group, with one more candidate considered."""
        scale_M1, offset_M1 = round_through(scale_M1, self.dtype), round_through(offset_M1, self.dtype)
        residual_Mg = self._levels_at(weight_Mg, scale_M1, offset_M1).mul_(scale_M1)
        residual_Mg = residual_Mg.add_(offset_M1).sub_(weight_Mg).mul_(mask_Mg)
        error_M1 = residual_Mg.square_().sum(1, keepdim=True)
        if best is None:
            return scale_M1, offset_M1, error_M1
        wins_M1 = error_M1 < best[2]
        return (
            torch.where(wins_M1, scale_M1, best[0]),
            torch.where(wins_M1, offset_M1, best[1]),
            torch.where(wins_M1, error_M1, best[2]),
        )

    def _levels_at(self, weight_Mg: Tensor, scale_M1: Tensor, offset_M1: Tensor) -> Tensor:
        inverse_M1 = scale_M1.reciprocal().nan_to_num_()
        unit_Mg = (weight_Mg - offset_M1 if self.affine else weight_Mg) * inverse_M1
        codes_Mg = nearest_code(unit_Mg, self.levels_N, lowest=self.lowest)
        return self.levels_N.index_select(0, codes_Mg.view(-1).int()).view(codes_Mg.shape)

    def _least_squares(
        self, weight_Mg: Tensor, mask_Mg: Tensor, scale_M1: Tensor, offset_M1: Tensor
    ) -> tuple[Tensor, Tensor]:
        level_Mg = self._levels_at(weight_Mg, scale_M1, offset_M1).mul_(mask_Mg)
        weight_Mg = weight_Mg * mask_Mg
        if not self.affine:
            return ratio(_dot(weight_Mg, level_Mg), _dot(level_Mg, level_Mg), scale_M1), offset_M1
        count_M1 = mask_Mg.sum(1, keepdim=True)
        mean_level = level_Mg.sum(1, keepdim=True) / count_M1
        mean_weight = weight_Mg.sum(1, keepdim=True) / count_M1
        spread_Mg = (level_Mg - mean_level) * mask_Mg
        scale_M1 = ratio(_dot(weight_Mg, spread_Mg), _dot(spread_Mg, spread_Mg), scale_M1)
        return scale_M1, mean_weight - scale_M1 * mean_level


def _fractions(largest: float) -> list[float]:
    lowest, count = FINE_FRACTIONS
    return sorted({*COARSE_FRACTIONS, *torch.linspace(lowest, largest, count).tolist(), 1.0, largest})
