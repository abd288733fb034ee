"""The form that a quantiser starts from: scales by search, learned levels by k-means, low-rank factors by SVD.

Owns the order in which these are found, the levels and the factors. The search of scales for given levels is `search`.

Shapes: O out features, I in features, G groups along I, R rank, N levels, C columns of a scale (G or I), S weights in
one row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qat_lora.config import LinearQuant
from qat_lora.quant.grids import Grid, is_symmetric
from qat_lora.quant.rounding import Form, fake_quantize, round_through
from qat_lora.quant.scales import group_count, spread_columns, sum_columns
from qat_lora.quant.search import grouped_rows, ratio, search_scales

LUT_ROUNDS = 3
LLOYD_STEPS = 25
LUT_SAMPLE = 2**18  # weights, in full rows, that levels are learned from; a few numbers need no more
FIT_ROUNDS = 4
IDLE_SHARE = 0.01  # B of an unused rank column, as a share of B's root mean square


@torch.no_grad()
def search_form(weight_OI: Tensor, config: LinearQuant) -> Form:
    """Find scales, and levels, offsets and factors where the form has them, for a weight [O, I]."""
    weight_OI = weight_OI.detach().float()
    levels_N = Grid.of(config).levels_N.to(weight_OI.device)
    if config.is_learned:
        levels_N = _search_levels(weight_OI, levels_N, config)
    return _form_of_levels(weight_OI, levels_N, config)


def _form_of_levels(weight_OI: Tensor, levels_N: Tensor, config: LinearQuant) -> Form:
    """The best form found whose levels are these."""
    if config.scales != "lowrank":
        return search_scales(weight_OI, config, levels_N)
    # Scales of mixed signs have no low-rank structure: they pay only where the factors can hold any matrix.
    holds_any = config.rank >= min(weight_OI.shape[0], group_count(weight_OI.shape[1], config))
    found = search_scales(weight_OI, config, levels_N, both_signs=holds_any and not is_symmetric(config))
    return fit_factors(weight_OI, found._replace(scale=factorise(found.scale[0], weight_OI.shape[1], config)))


def _search_levels(weight_OI: Tensor, even_N: Tensor, config: LinearQuant) -> Tensor:
    """Learned levels [N]: the better of two starts, even levels and the quantiles of the normalised weights.

    Neither start wins always: even levels suit low-rank scales, quantiles suit groups with an outlier each.
    """
    weight_OI = weight_OI[:: -(-weight_OI.numel() // LUT_SAMPLE)]
    if float(weight_OI.abs().max()) == 0:
        return even_N
    tried = []
    for levels_N in (even_N, _quantiles(weight_OI, config)):
        for _ in range(LUT_ROUNDS):  # scales and levels in turns
            form = _form_of_levels(weight_OI, levels_N, config)
            form = form._replace(levels_N=_lloyd(weight_OI, form.scale_OC(), levels_N, config)).stored()
            levels_N = form.levels_N
            tried.append((_error(weight_OI, fake_quantize(weight_OI, form)), levels_N))
    return min(tried, key=lambda error_and_levels: error_and_levels[0])[1]


def _quantiles(weight_OI: Tensor, config: LinearQuant) -> Tensor:
    """Levels [N] from the quantiles of the weights over their group's abs-max."""
    scale_OG = grouped_rows(weight_OI, config)[0].abs().amax(1).view(weight_OI.shape[0], -1)
    unit_S, _ = _in_units(weight_OI, scale_OG, config)
    count = 2**config.bits
    ranks_N = (torch.arange(count, device=unit_S.device) * 2 + 1) * unit_S.shape[0] // (2 * count)
    return _lloyd(weight_OI, scale_OG, unit_S.sort().values[ranks_N], config)


def _lloyd(weight_OI: Tensor, scale_OC: Tensor, levels_N: Tensor, config: LinearQuant) -> Tensor:
    """Lower sum of S^2 (w / S - L)^2 from the levels given; ascending. A level that no weight takes stays."""
    unit_S, scale_S = _in_units(weight_OI, scale_OC, config)
    mass_S = scale_S.square().double()
    for _ in range(LLOYD_STEPS):
        codes_S = Grid(levels_N).codes(unit_S).long()
        mass_N = mass_S.new_zeros(levels_N.shape[0]).index_add_(0, codes_S, mass_S)
        sum_N = mass_S.new_zeros(levels_N.shape[0]).index_add_(0, codes_S, mass_S * unit_S)
        centre_N = torch.where(mass_N > 0, sum_N / mass_N, levels_N.double())
        levels_N = centre_N.float().sort().values
    return levels_N


def _in_units(weight_OI: Tensor, scale_OC: Tensor, config: LinearQuant) -> tuple[Tensor, Tensor]:
    """Weights [S] in units of their scales, and the scales [S]; weights of zero groups count as 0."""
    scale_OI = spread_columns(scale_OC, weight_OI.shape[1], config.group_size).expand_as(weight_OI)
    unit_OI = weight_OI * scale_OI.reciprocal().nan_to_num_(posinf=0.0, neginf=0.0)
    return unit_OI.reshape(-1), scale_OI.reshape(-1)


@torch.no_grad()
def factorise(scale_OG: Tensor, in_features: int, config: LinearQuant) -> tuple[Tensor, Tensor]:
    """A [O, R] and B [R, I] with A @ B the best rank-R approximation of the group scales spread over [O, I].

    The spread matrix has rank at most G, and its SVD is that of the scales weighted by the root of each group's width.
    Columns of the rank beyond that start at A = 0, so they add nothing, and at a small B, so that A learns.
    """
    start_G = torch.arange(scale_OG.shape[1], device=scale_OG.device) * config.group_size
    width_G = (in_features - start_G).clamp(max=config.group_size).double().sqrt()
    u, sigma, v = torch.linalg.svd(scale_OG.double() * width_G, full_matrices=False)
    used = min(config.rank, sigma.shape[0])
    root = sigma[:used].sqrt()
    a_OR = scale_OG.new_zeros(scale_OG.shape[0], config.rank)
    a_OR[:, :used] = (u[:, :used] * root).float()
    b_RG = ((root[:, None] * v[:used]) / width_G).float()
    b_RI = _idle_rows(config.rank, in_features, b_RG)
    b_RI[:used] = spread_columns(b_RG, in_features, config.group_size)
    dtype = getattr(torch, config.scale_dtype)
    return round_through(a_OR, dtype), round_through(b_RI, dtype)


@torch.no_grad()
def fit_factors(weight_OI: Tensor, form: Form) -> Form:
    """Rescale A's rows, B's columns, and shift the offset, by least squares with the codes held, in turns.

    A turn is taken where the squared error of the matrix falls, so the result is never worse than the start.
    """
    rounded_OI = fake_quantize(weight_OI, form)
    error = _error(weight_OI, rounded_OI)
    for turn in range(3 * FIT_ROUNDS):
        candidate = (_refit_rows, _refit_columns, _refit_offset)[turn % 3](weight_OI, rounded_OI, form).stored()
        candidate_OI = fake_quantize(weight_OI, candidate)
        candidate_error = _error(weight_OI, candidate_OI)
        if candidate_error < error:
            form, rounded_OI, error = candidate, candidate_OI, candidate_error
    return form


def _refit_rows(weight_OI: Tensor, rounded_OI: Tensor, form: Form) -> Form:
    a_OR, b_RI = form.scale
    return form._replace(scale=(a_OR * _factor(weight_OI, rounded_OI, form, along=1), b_RI))


def _refit_columns(weight_OI: Tensor, rounded_OI: Tensor, form: Form) -> Form:
    a_OR, b_RI = form.scale
    return form._replace(scale=(a_OR, b_RI * _factor(weight_OI, rounded_OI, form, along=0)))


def _refit_offset(weight_OI: Tensor, rounded_OI: Tensor, form: Form) -> Form:
    if form.offset_OG is None:
        return form
    size, groups = form.config.group_size, form.offset_OG.shape[1]
    counts_OG = sum_columns(torch.ones_like(weight_OI), groups, size)
    shift_OG = sum_columns(weight_OI - rounded_OI, groups, size) / counts_OG
    return form._replace(offset_OG=form.offset_OG + shift_OG)


def _factor(weight_OI: Tensor, rounded_OI: Tensor, form: Form, *, along: int) -> Tensor:
    """By what S must be multiplied in each row or column for the least squared error."""
    if form.offset_OG is not None:
        offset_OI = spread_columns(form.offset_OG, weight_OI.shape[1], form.config.group_size)
        weight_OI, rounded_OI = weight_OI - offset_OI, rounded_OI - offset_OI
    overlap = (weight_OI * rounded_OI).sum(along, keepdim=True)
    return ratio(overlap, rounded_OI.square().sum(along, keepdim=True), torch.ones_like(overlap))


def _error(weight_OI: Tensor, rounded_OI: Tensor) -> float:
    return float((rounded_OI - weight_OI).square().sum(dtype=torch.float64))


def _idle_rows(rank: int, in_features: int, b_RG: Tensor) -> Tensor:
    """Small rows for the unused rank: cosines, so that they differ and are always the same."""
    size = b_RG.square().mean().sqrt() * IDLE_SHARE
    size = torch.where(size > 0, size, IDLE_SHARE)
    phase_I = (torch.arange(in_features, device=b_RG.device) + 0.5) * (torch.pi / in_features)
    order_R = torch.arange(1, rank + 1, device=b_RG.device)
    return torch.cos(order_R[:, None] * phase_I[None, :]) * size
