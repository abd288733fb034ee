"""What a quantiser starts from: scales by error search, learned levels by k-means, low-rank factors by SVD.

Owns the order in which these are found, and the learned levels. The search itself is `search`, the factors
`factors`; `search_scales` is offered here too.

Shapes: O out features, I in features, G groups along I, R rank, N levels, C columns of a scale (G or I),
S weights in one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qat_lora.config import LinearQuant
from qat_lora.quant.factors import Factors, factorise, fit_factors, squared_error
from qat_lora.quant.primitives import group_columns, level_values, nearest_code, round_through
from qat_lora.quant.scales import group_count, multiply_factors
from qat_lora.quant.search import (
    SearchedScales,
    group_width,
    grouped_rows,
    has_signed_scales,
    search_scales,
)

__all__ = ["InitialState", "SearchedScales", "search_initial_state", "search_scales"]

LUT_ROUNDS = 3
LLOYD_STEPS = 25
LUT_SAMPLE = 2**18  # weights, in whole rows, that levels are learned from; a few numbers need no more


@dataclass(frozen=True)
class InitialState:
    """All that a quantiser starts from; float32 values that the stored dtype can hold.

    Attributes:
        scale_OG: searched scale of each group.
        factors: (A [O, R], B [R, I]) for ``lowrank``, else None.
        levels_N: the grid, learned for ``lut``.
        offset_OG: for ``affine``, else None.
    """

    scale_OG: Tensor
    factors: tuple[Tensor, Tensor] | None
    levels_N: Tensor
    offset_OG: Tensor | None

    def scale(self) -> Tensor:
        """S as [O, G], or [O, I] for ``lowrank``."""
        return self.scale_OG if self.factors is None else multiply_factors(*self.factors)


@torch.no_grad()
def search_initial_state(weight_OI: Tensor, config: LinearQuant) -> InitialState:
    """Find scales, and levels, offsets and factors where the form has them, for a weight [O, I]."""
    weight_OI = weight_OI.detach().float()
    levels_N = level_values(config).to(weight_OI.device)
    if config.levels == "lut":
        levels_N = _search_levels(weight_OI, levels_N, config)
    return _state_for(weight_OI, levels_N, config)


def _state_for(weight_OI: Tensor, levels_N: Tensor, config: LinearQuant) -> InitialState:
    is_lowrank = config.scales == "lowrank"
    both_signs = has_signed_scales(config) and (not is_lowrank or _rank_suffices(weight_OI, config))
    scale_OG, offset_OG = search_scales(weight_OI, config, levels_N, both_signs=both_signs)
    if not is_lowrank:
        return InitialState(scale_OG, None, levels_N, offset_OG)
    start = Factors(*factorise(scale_OG, weight_OI.shape[1], config), offset_OG)
    a_OR, b_RI, offset_OG = fit_factors(weight_OI, start, levels_N, config)
    return InitialState(scale_OG, (a_OR, b_RI), levels_N, offset_OG)


def _rank_suffices(weight_OI: Tensor, config: LinearQuant) -> bool:
    # Scales of mixed signs have no low-rank structure: they pay only where the factors can hold any matrix.
    return config.rank >= min(weight_OI.shape[0], group_count(weight_OI.shape[1], config))


def _search_levels(weight_OI: Tensor, even_N: Tensor, config: LinearQuant) -> Tensor:
    """Learned levels [N]: the better of two starts, even levels and the quantiles of the normalised weights.

    Neither start wins always: even levels suit low-rank scales, quantiles suit groups with an outlier each.
    """
    weight_OI = weight_OI[:: -(-weight_OI.numel() // LUT_SAMPLE)]
    if float(weight_OI.abs().max()) == 0:
        return even_N
    starts = (even_N, _quantiles(weight_OI, config))
    found = [_alternate(weight_OI, start_N, config) for start_N in starts]
    return min(found, key=lambda error_and_levels: error_and_levels[0])[1]


def _alternate(weight_OI: Tensor, levels_N: Tensor, config: LinearQuant) -> tuple[float, Tensor]:
    """The least squared error, and its levels, of scales and levels found in turns."""
    dtype = getattr(torch, config.scale_dtype)
    tried = []
    for _ in range(LUT_ROUNDS):
        scale_OC = _state_for(weight_OI, levels_N, config).scale()
        levels_N = round_through(_lloyd(weight_OI, scale_OC, levels_N, config), dtype)
        tried.append((squared_error(weight_OI, scale_OC, levels_N, None, config), levels_N))
    return min(tried, key=lambda error_and_levels: error_and_levels[0])


def _quantiles(weight_OI: Tensor, config: LinearQuant) -> Tensor:
    """Levels [N] from the quantiles of the weights over their group's abs-max."""
    out_features, in_features = weight_OI.shape
    groups = group_count(in_features, config)
    grouped_Mg, _ = grouped_rows(weight_OI, groups, group_width(in_features, config))
    scale_OG = grouped_Mg.abs().amax(1).view(out_features, groups)
    unit_S, _ = _in_units(weight_OI, scale_OG, config)
    count = 2**config.bits
    ranks_N = (torch.arange(count, device=unit_S.device) * 2 + 1) * unit_S.shape[0] // (2 * count)
    return _lloyd(weight_OI, scale_OG, unit_S.sort().values[ranks_N], config)


def _lloyd(weight_OI: Tensor, scale_OC: Tensor, levels_N: Tensor, config: LinearQuant) -> Tensor:
    """Lower sum of S^2 (w / S - L)^2 from the levels given; ascending. A level that no weight takes stays."""
    unit_S, scale_S = _in_units(weight_OI, scale_OC, config)
    mass_S = scale_S.square().double()
    for _ in range(LLOYD_STEPS):
        codes_S = nearest_code(unit_S, levels_N, lowest=None).long()
        mass_N = mass_S.new_zeros(levels_N.shape[0]).index_add_(0, codes_S, mass_S)
        sum_N = mass_S.new_zeros(levels_N.shape[0]).index_add_(0, codes_S, mass_S * unit_S)
        centre_N = torch.where(mass_N > 0, sum_N / mass_N, levels_N.double())
        levels_N = centre_N.float().sort().values
    return levels_N


def _in_units(weight_OI: Tensor, scale_OC: Tensor, config: LinearQuant) -> tuple[Tensor, Tensor]:
    """Weights [S] in units of their scales, and the scales [S]; weights of zero groups count as 0."""
    scale_OI = group_columns(scale_OC, weight_OI.shape[1], config.group_size).expand_as(weight_OI)
    unit_OI = weight_OI * scale_OI.reciprocal().nan_to_num_(posinf=0.0, neginf=0.0)
    return unit_OI.reshape(-1), scale_OI.reshape(-1)
