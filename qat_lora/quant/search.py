"""Scales and offsets of given levels, by search over the squared error of each group.

Runs once, without gradients. A scale is never plain abs-max: abs-max is one candidate among many, so the result cannot
be worse than it.

For each group: (1) scales as fractions of abs-max, of both signs where the grid is asymmetric, each rounded to the
dtype it will be stored in and judged by the squared error of the weights it gives; (2) from the best of these, a few
exact least-squares steps with the codes held, S = <w, L[I]> / <L[I], L[I]> (with an offset: the 2 x 2 system), each
taken where the error falls.

Shapes: O out features, I in features, G groups, g columns of a group, M rows times groups, N levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from qat_lora.config import LinearQuant
from qat_lora.quant.grids import Grid, is_symmetric
from qat_lora.quant.rounding import Form, fake_quantize, quantize
from qat_lora.quant.scales import group_count

FINE_FRACTIONS = (0.3, 26)  # from this fraction of abs-max up to it, in so many even steps, per sign
COARSE_FRACTIONS = (0.05, 0.09, 0.14, 0.2, 0.25)  # for long rows and outliers, where clipping most of the range pays
LEAST_SQUARES_STEPS = 4
CHUNK_WEIGHTS = 2**18  # weights searched at a time, so that temporaries stay in cache


@torch.no_grad()
def search_scales(
    weight_OI: Tensor, config: LinearQuant, levels_N: Tensor | None = None, *, both_signs: bool | None = None
) -> Form:
    """The form whose scale (and offset) of each group gives the least squared error found.

    Args:
        weight_OI: the matrix.
        config: its form; ``lowrank`` is searched like ``group``.
        levels_N: ascending levels, the grid of the config if None.
        both_signs: also try negative scales; None means for the grids that are asymmetric.
    """
    levels_N = Grid.of(config, levels_N).levels_N.to(weight_OI.device)
    both_signs = not is_symmetric(config) if both_signs is None else both_signs
    groups = group_count(weight_OI.shape[1], config)
    grouped_Mg, mask_Mg = grouped_rows(weight_OI.detach().float(), config)
    rows = max(1, CHUNK_WEIGHTS // grouped_Mg.shape[1])
    found = [
        _search_rows(weight_Mg, mask_Mg, levels_N, config, both_signs)
        for weight_Mg, mask_Mg in zip(grouped_Mg.split(rows), mask_Mg.split(rows), strict=True)
    ]
    scale_OG = torch.cat([form.scale[0] for form in found]).view(-1, groups)
    offsets = [form.offset_OG for form in found if form.offset_OG is not None]
    return Form((scale_OG,), levels_N, torch.cat(offsets).view(-1, groups) if offsets else None, config)


def grouped_rows(weight_OI: Tensor, config: LinearQuant) -> tuple[Tensor, Tensor]:
    """Weights as [O * G, g], and a mask that is 0 for padding, which repeats the row's last weight."""
    out_features, in_features = weight_OI.shape
    size = in_features if config.scales == "channel" else config.group_size
    missing = -in_features % size
    mask_I = F.pad(weight_OI.new_ones(in_features), (0, missing))
    if missing:
        weight_OI = torch.cat([weight_OI, weight_OI[:, -1:].expand(-1, missing)], 1)
    mask_Mg = mask_I.view(-1, size).expand(out_features, -1, -1).reshape(-1, size)
    return weight_OI.reshape(-1, size), mask_Mg


def ratio(numerator: Tensor, denominator: Tensor, otherwise: Tensor) -> Tensor:
    """Numerator / denominator where the denominator, a sum of squares, is not 0."""
    return torch.where(denominator > 0, numerator / denominator.clamp(min=1e-30), otherwise)


def _search_rows(weight_Mg: Tensor, mask_Mg: Tensor, levels_N: Tensor, config: LinearQuant, both_signs: bool) -> Form:
    """The best form of rows that each have one scale; a mask of 0 marks the padding of a short last group."""
    config = replace(config, scales="channel")
    zeros_M1 = torch.zeros_like(weight_Mg[:, :1])
    best = Form((zeros_M1,), levels_N, zeros_M1 if config.has_offset else None, config)
    error_M1 = torch.full_like(zeros_M1, torch.inf)
    for scale_M1, offset_M1 in _candidates(weight_Mg, levels_N, config, both_signs):
        candidate = best._replace(scale=(scale_M1,), offset_OG=offset_M1)
        best, error_M1 = _better(best, error_M1, candidate, weight_Mg, mask_Mg)
    for _ in range(LEAST_SQUARES_STEPS):
        best, error_M1 = _better(best, error_M1, _least_squares(weight_Mg, mask_Mg, best), weight_Mg, mask_Mg)
    return best


def _candidates(
    weight_Mg: Tensor, levels_N: Tensor, config: LinearQuant, both_signs: bool
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Scales [M, 1] as fractions of those that reach the largest weight; with an offset, about the middle."""
    low_M1, high_M1 = weight_Mg.amin(1, keepdim=True), weight_Mg.amax(1, keepdim=True)
    lowest, highest = float(levels_N[0]), float(levels_N[-1])
    largest = max(-lowest, highest)
    reach_M1 = high_M1 - low_M1 if config.has_offset else torch.maximum(high_M1, -low_M1)
    # up to where the smaller side of an asymmetric grid reaches the largest weight
    most = 1.0 if config.has_offset else largest / max(min(-lowest, highest), largest / 2)
    start, count = FINE_FRACTIONS
    fractions = sorted({*COARSE_FRACTIONS, *torch.linspace(start, most, count).tolist(), 1.0, most})
    for sign in (1, -1) if both_signs else (1,):
        for fraction in fractions:
            scale_M1 = reach_M1 * (sign * fraction / largest)
            yield scale_M1, (high_M1 + low_M1) / 2 - scale_M1 * (largest / 2) if config.has_offset else None


def _better(best: Form, error_M1: Tensor, candidate: Form, weight_Mg: Tensor, mask_Mg: Tensor) -> tuple[Form, Tensor]:
    """Of each row the form with the smaller error, and that error."""
    candidate = candidate.stored()
    residual_Mg = fake_quantize(weight_Mg, candidate).sub_(weight_Mg).mul_(mask_Mg)
    candidate_error_M1 = residual_Mg.square_().sum(1, keepdim=True)
    wins_M1 = candidate_error_M1 < error_M1
    offset_M1 = candidate.offset_OG
    if offset_M1 is not None and best.offset_OG is not None:
        offset_M1 = torch.where(wins_M1, offset_M1, best.offset_OG)
    scale_M1 = torch.where(wins_M1, candidate.scale[0], best.scale[0])
    return best._replace(scale=(scale_M1,), offset_OG=offset_M1), torch.where(wins_M1, candidate_error_M1, error_M1)


def _least_squares(weight_Mg: Tensor, mask_Mg: Tensor, form: Form) -> Form:
    """Scale (and offset) of each row that are best for the codes that it has."""
    level_Mg = Grid.of(form.config, form.levels_N).values(quantize(weight_Mg, form)).mul_(mask_Mg)
    weight_Mg = weight_Mg * mask_Mg
    (scale_M1,) = form.scale
    if form.offset_OG is None:
        return form._replace(scale=(ratio(_dot(weight_Mg, level_Mg), _dot(level_Mg, level_Mg), scale_M1),))
    count_M1 = mask_Mg.sum(1, keepdim=True)
    mean_level_M1 = level_Mg.sum(1, keepdim=True) / count_M1
    mean_weight_M1 = weight_Mg.sum(1, keepdim=True) / count_M1
    spread_Mg = (level_Mg - mean_level_M1) * mask_Mg
    scale_M1 = ratio(_dot(weight_Mg, spread_Mg), _dot(spread_Mg, spread_Mg), scale_M1)
    return form._replace(scale=(scale_M1,), offset_OG=mean_weight_M1 - scale_M1 * mean_level_M1)


def _dot(left_Mg: Tensor, right_Mg: Tensor) -> Tensor:
    return (left_Mg * right_Mg).sum(1, keepdim=True)
