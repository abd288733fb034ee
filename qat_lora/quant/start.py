"""The form that a quantiser starts from: scales by search, learned levels by k-means, low-rank factors by SVD.

Runs once, without gradients. A scale is never plain abs-max: abs-max is one candidate among many, so the result cannot
be worse than it. For each group: (1) scales as fractions of abs-max, of both signs where the grid is asymmetric, each
rounded to the dtype it will be stored in and judged by the squared error of the weights it gives; (2) from the best of
these, a few exact least-squares steps with the codes held, S = <w, L[I]> / <L[I], L[I]> (with an offset: the 2 x 2
system), each taken where the error falls.

Shapes: O out features, I in features, G groups along I, g columns of a group, M rows times groups, R rank, N levels,
C columns of a scale (G or I), S weights in one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from qat_lora.config import LinearQuant
from qat_lora.quant.grids import Grid, is_symmetric
from qat_lora.quant.rounding import Form, fake_quantize, quantize, round_through
from qat_lora.quant.scales import group_count, spread_columns, sum_columns

FINE_FRACTIONS = (0.3, 26)  # from this fraction of abs-max up to it, in so many even steps, per sign
COARSE_FRACTIONS = (0.05, 0.09, 0.14, 0.2, 0.25)  # for long rows and outliers, where clipping most of the range pays
LEAST_SQUARES_STEPS = 4
CHUNK_WEIGHTS = 2**18  # weights searched at a time, so that temporaries stay in cache
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
    found = search_scales(weight_OI, config, levels_N)
    if config.scales != "lowrank":
        return found
    return fit_factors(weight_OI, found._replace(scale=factorise(found.scale[0], weight_OI.shape[1], config)))


# Scales of given levels, group by group


@torch.no_grad()
def search_scales(weight_OI: Tensor, config: LinearQuant, levels_N: Tensor | None = None) -> Form:
    """The form whose scale (and offset) of each group gives the least squared error found.

    `levels_N` are the config's grid if None. ``lowrank`` is searched like ``group``.
    """
    out_features, in_features = weight_OI.shape
    levels_N = Grid.of(config, levels_N).levels_N.to(weight_OI.device)
    groups = group_count(in_features, config)
    # Scales of mixed signs have no low-rank structure: they pay only where the factors can hold any matrix.
    holds_any = config.scales != "lowrank" or config.rank >= min(out_features, groups)
    signs = (1, -1) if holds_any and not is_symmetric(config) else (1,)
    grouped_Mg, mask_Mg = _grouped_rows(weight_OI.detach().float(), config)
    rows = max(1, CHUNK_WEIGHTS // grouped_Mg.shape[1])
    found = [
        _search_rows(weight_Mg, mask_Mg, levels_N, config, signs).side_values()
        for weight_Mg, mask_Mg in zip(grouped_Mg.split(rows), mask_Mg.split(rows), strict=True)
    ]
    return Form.of(config, levels_N, *(torch.cat(parts).view(-1, groups) for parts in zip(*found, strict=True)))


def _grouped_rows(weight_OI: Tensor, config: LinearQuant) -> tuple[Tensor, Tensor]:
    """Weights as [O * G, g], and a mask that is 0 for padding, which repeats the row's last weight."""
    out_features, in_features = weight_OI.shape
    size = in_features if config.scales == "channel" else config.group_size
    missing = -in_features % size
    mask_I = F.pad(weight_OI.new_ones(in_features), (0, missing))
    if missing:
        weight_OI = torch.cat([weight_OI, weight_OI[:, -1:].expand(-1, missing)], 1)
    mask_Mg = mask_I.view(-1, size).expand(out_features, -1, -1).reshape(-1, size)
    return weight_OI.reshape(-1, size), mask_Mg


def _search_rows(
    weight_Mg: Tensor, mask_Mg: Tensor, levels_N: Tensor, config: LinearQuant, signs: tuple[int, ...]
) -> Form:
    """The best form of rows that each have one scale; a mask of 0 marks the padding of a short last group."""
    zeros_M1 = torch.zeros_like(weight_Mg[:, :1])
    best = Form((zeros_M1,), levels_N, zeros_M1 if config.has_offset else None, replace(config, scales="channel"))
    error_M1 = torch.full_like(zeros_M1, torch.inf)
    for candidate in _candidates(weight_Mg, best, signs):
        best, error_M1 = _better(best, error_M1, candidate, weight_Mg, mask_Mg)
    for _ in range(LEAST_SQUARES_STEPS):
        best, error_M1 = _better(best, error_M1, _least_squares(weight_Mg, mask_Mg, best), weight_Mg, mask_Mg)
    return best


def _candidates(weight_Mg: Tensor, form: Form, signs: tuple[int, ...]) -> Iterator[Form]:
    """Scales [M, 1] as fractions of those that reach the largest weight; with an offset, about the middle."""
    low_M1, high_M1 = weight_Mg.amin(1, keepdim=True), weight_Mg.amax(1, keepdim=True)
    lowest, highest = float(form.levels_N[0]), float(form.levels_N[-1])
    largest = max(-lowest, highest)
    has_offset = form.offset_OG is not None
    reach_M1 = high_M1 - low_M1 if has_offset else torch.maximum(high_M1, -low_M1)
    # up to where the smaller side of an asymmetric grid reaches the largest weight
    most = 1.0 if has_offset else largest / max(min(-lowest, highest), largest / 2)
    start, count = FINE_FRACTIONS
    fractions = sorted({*COARSE_FRACTIONS, *torch.linspace(start, most, count).tolist(), 1.0, most})
    for sign in signs:
        for fraction in fractions:
            scale_M1 = reach_M1 * (sign * fraction / largest)
            offset_M1 = (high_M1 + low_M1) / 2 - scale_M1 * (largest / 2) if has_offset else None
            yield form._replace(scale=(scale_M1,), offset_OG=offset_M1)


def _better(best: Form, error_M1: Tensor, candidate: Form, weight_Mg: Tensor, mask_Mg: Tensor) -> tuple[Form, Tensor]:
    """Of each row the form with the smaller error, and that error."""
    candidate = candidate.stored()
    residual_Mg = fake_quantize(weight_Mg, candidate).sub_(weight_Mg).mul_(mask_Mg)
    candidate_error_M1 = residual_Mg.square_().sum(1, keepdim=True)
    wins_M1 = candidate_error_M1 < error_M1
    pairs = zip(candidate.side_values(), best.side_values(), strict=True)
    values = (torch.where(wins_M1, new, old) for new, old in pairs)
    return Form.of(best.config, best.levels_N, *values), torch.where(wins_M1, candidate_error_M1, error_M1)


def _least_squares(weight_Mg: Tensor, mask_Mg: Tensor, form: Form) -> Form:
    """Scale (and offset) of each row that are best for the codes that it has."""
    level_Mg = Grid.of(form.config, form.levels_N).values(quantize(weight_Mg, form)).mul_(mask_Mg)
    weight_Mg, (scale_M1,) = weight_Mg * mask_Mg, form.scale
    if form.offset_OG is None:
        return form._replace(scale=(_slope(weight_Mg, level_Mg, 1, scale_M1),))
    count_M1 = mask_Mg.sum(1, keepdim=True)
    mean_level_M1, mean_weight_M1 = (x.sum(1, keepdim=True) / count_M1 for x in (level_Mg, weight_Mg))
    scale_M1 = _slope(weight_Mg, (level_Mg - mean_level_M1) * mask_Mg, 1, scale_M1)
    return form._replace(scale=(scale_M1,), offset_OG=mean_weight_M1 - scale_M1 * mean_level_M1)


def _slope(weight: Tensor, level: Tensor, along: int, otherwise: Tensor) -> Tensor:
    """The factor of the levels that comes nearest to the weights; `otherwise` where all levels are 0."""
    product, square = ((x * level).sum(along, keepdim=True) for x in (weight, level))
    return torch.where(square > 0, product / square.clamp(min=1e-30), otherwise)


# Learned levels


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
    scale_OG = _grouped_rows(weight_OI, config)[0].abs().amax(1).view(weight_OI.shape[0], -1)
    unit_S, _ = _in_units(weight_OI, scale_OG, config)
    count = 2**config.bits
    ranks_N = (torch.arange(count, device=unit_S.device) * 2 + 1) * unit_S.shape[0] // (2 * count)
    return _lloyd(weight_OI, scale_OG, unit_S.sort().values[ranks_N], config)


def _lloyd(weight_OI: Tensor, scale_OC: Tensor, levels_N: Tensor, config: LinearQuant) -> Tensor:
    """Lower sum of S^2 (w / S - L)^2 from the levels given; ascending. A level that no weight takes stays."""
    unit_S, scale_S = _in_units(weight_OI, scale_OC, config)
    mass_S = scale_S.square().double()
    weighted_S = mass_S * unit_S
    for _ in range(LLOYD_STEPS):
        codes_S = Grid(levels_N).codes(unit_S).long()
        mass_N, sum_N = (codes_S.bincount(x, minlength=len(levels_N)) for x in (mass_S, weighted_S))
        levels_N = torch.where(mass_N > 0, sum_N / mass_N, levels_N.double()).float().sort().values
    return levels_N


def _in_units(weight_OI: Tensor, scale_OC: Tensor, config: LinearQuant) -> tuple[Tensor, Tensor]:
    """Weights [S] in units of their scales, and the scales [S]; weights of zero groups count as 0."""
    scale_OI = spread_columns(scale_OC, weight_OI.shape[1], config.group_size).expand_as(weight_OI)
    unit_OI = weight_OI * scale_OI.reciprocal().nan_to_num_(posinf=0.0, neginf=0.0)
    return unit_OI.reshape(-1), scale_OI.reshape(-1)


# Low-rank scales


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


def _idle_rows(rank: int, in_features: int, b_RG: Tensor) -> Tensor:
    """Small rows for the unused rank: cosines, so that they differ and are always the same."""
    size = b_RG.square().mean().sqrt() * IDLE_SHARE
    size = torch.where(size > 0, size, IDLE_SHARE)
    phase_I = (torch.arange(in_features, device=b_RG.device) + 0.5) * (torch.pi / in_features)
    order_R = torch.arange(1, rank + 1, device=b_RG.device)
    return torch.cos(order_R[:, None] * phase_I[None, :]) * size


@torch.no_grad()
def fit_factors(weight_OI: Tensor, form: Form) -> Form:
    """Rescale A's rows, B's columns, and shift the offset, by least squares with the codes held, in turns.

    A turn is taken where the squared error of the matrix falls, so the result is never worse than the start.
    """
    rounded_OI = fake_quantize(weight_OI, form)
    error = _error(weight_OI, rounded_OI)
    for part in FIT_ROUNDS * ((0, 1) if form.offset_OG is None else (0, 1, 2)):
        candidate = _refit(weight_OI, rounded_OI, form, part).stored()
        candidate_OI = fake_quantize(weight_OI, candidate)
        candidate_error = _error(weight_OI, candidate_OI)
        if candidate_error < error:
            form, rounded_OI, error = candidate, candidate_OI, candidate_error
    return form


def _refit(weight_OI: Tensor, rounded_OI: Tensor, form: Form, part: int) -> Form:
    """The form with the best factor for each row of A (part 0) or column of B (1), or the best shift of Z (2)."""
    if form.offset_OG is not None:
        size, groups = form.config.group_size, form.offset_OG.shape[1]
        if part == 2:
            count_OG = sum_columns(torch.ones_like(weight_OI), groups, size)
            shift_OG = sum_columns(weight_OI - rounded_OI, groups, size) / count_OG
            return form._replace(offset_OG=form.offset_OG + shift_OG)
        offset_OI = spread_columns(form.offset_OG, weight_OI.shape[1], size)
        weight_OI, rounded_OI = weight_OI - offset_OI, rounded_OI - offset_OI
    factor = _slope(weight_OI, rounded_OI, 1 - part, weight_OI.new_ones(()))
    return form._replace(scale=tuple(x * factor if number == part else x for number, x in enumerate(form.scale)))


def _error(weight_OI: Tensor, rounded_OI: Tensor) -> float:
    return float((rounded_OI - weight_OI).square().sum(dtype=torch.float64))
