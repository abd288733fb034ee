"""The start of a low-rank scale: group scales factorised by SVD, then fitted to the weights.

Owns A [O, R] and B [R, I] before training; how they train is `scales`, how group scales are found is
`search`.

Shapes: O out features, I in features, G groups along I, R rank, N levels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qat_lora.config import LinearQuant
from qat_lora.quant.primitives import dequantize, group_columns, quantize, round_through, sum_columns
from qat_lora.quant.scales import multiply_factors
from qat_lora.quant.search import ratio

FIT_ROUNDS = 4
IDLE_SHARE = 0.01  # B of an unused rank column, as a share of B's root mean square


class Factors(NamedTuple):
    """A [O, R], B [R, I] and, for ``affine``, the offset [O, G]; values that the stored dtype can hold."""

    a_OR: Tensor
    b_RI: Tensor
    offset_OG: Tensor | None

    def scale(self) -> Tensor:
        """S = A @ B, [O, I]."""
        return multiply_factors(self.a_OR, self.b_RI)


@torch.no_grad()
def factorise(scale_OG: Tensor, in_features: int, config: LinearQuant) -> tuple[Tensor, Tensor]:
    """A [O, R] and B [R, I] with A @ B the best rank-R approximation of the group scales spread over [O, I].

    The spread matrix has rank at most G, and its SVD is that of the scales weighted by the root of each
    group's width. Columns of the rank beyond that start at A = 0, so they add nothing, and at a small B, so
    that A learns.
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
    b_RI[:used] = group_columns(b_RG, in_features, config.group_size)
    dtype = getattr(torch, config.scale_dtype)
    return round_through(a_OR, dtype), round_through(b_RI, dtype)


@torch.no_grad()
def fit_factors(weight_OI: Tensor, start: Factors, levels_N: Tensor, config: LinearQuant) -> Factors:
    """Rescale A's rows, B's columns, and shift the offset, by least squares with the codes held, in turns.

    A turn is kept where the squared error of the matrix falls, so the result is never worse than the start.
    """
    best = start
    rounded_OI = _rounded(weight_OI, best.scale(), levels_N, best.offset_OG, config)
    error = _sum_of_squares(rounded_OI - weight_OI)
    for turn in range(3 * FIT_ROUNDS):
        candidate = _refit(weight_OI, rounded_OI, best, turn % 3, config)
        candidate_OI = _rounded(weight_OI, candidate.scale(), levels_N, candidate.offset_OG, config)
        candidate_error = _sum_of_squares(candidate_OI - weight_OI)
        if candidate_error < error:
            best, rounded_OI, error = candidate, candidate_OI, candidate_error
    return best


def squared_error(
    weight_OI: Tensor, scale_OC: Tensor, levels_N: Tensor, offset_OC: Tensor | None, config: LinearQuant
) -> float:
    """Sum of squares of what rounding changes."""
    return _sum_of_squares(_rounded(weight_OI, scale_OC, levels_N, offset_OC, config) - weight_OI)


def _refit(weight_OI: Tensor, rounded_OI: Tensor, now: Factors, part: int, config: LinearQuant) -> Factors:
    """One least-squares step for A's rows (part 0), B's columns (1) or the offset (2)."""
    dtype = getattr(torch, config.scale_dtype)
    a_OR, b_RI, offset_OG = now
    if part == 2:
        if offset_OG is None:
            return now
        size, groups = config.group_size, offset_OG.shape[1]
        counts_OG = sum_columns(torch.ones_like(weight_OI), groups, size)
        shift_OG = sum_columns(weight_OI - rounded_OI, groups, size) / counts_OG
        return Factors(a_OR, b_RI, round_through(offset_OG + shift_OG, dtype))
    offset_OI = 0.0 if offset_OG is None else group_columns(offset_OG, weight_OI.shape[1], config.group_size)
    target_OI, scaled_OI = weight_OI - offset_OI, rounded_OI - offset_OI
    along = 1 - part
    overlap = (target_OI * scaled_OI).sum(along, keepdim=True)
    factor = ratio(overlap, scaled_OI.square().sum(along, keepdim=True), torch.ones_like(overlap))
    if part == 0:
        return Factors(round_through(a_OR * factor, dtype), b_RI, offset_OG)
    return Factors(a_OR, round_through(b_RI * factor, dtype), offset_OG)


def _rounded(
    weight_OI: Tensor, scale_OC: Tensor, levels_N: Tensor, offset_OC: Tensor | None, config: LinearQuant
) -> Tensor:
    codes_OI = quantize(weight_OI, scale_OC, levels_N, offset_OC, config)
    return dequantize(codes_OI, scale_OC, levels_N, offset_OC, config)


def _sum_of_squares(values_OI: Tensor) -> float:
    return float(values_OI.square().sum(dtype=torch.float64))


def _idle_rows(rank: int, in_features: int, b_RG: Tensor) -> Tensor:
    """Small rows for the unused rank: cosines, so that they differ and are always the same."""
    size = b_RG.square().mean().sqrt() * IDLE_SHARE
    size = torch.where(size > 0, size, IDLE_SHARE)
    phase_I = (torch.arange(in_features, device=b_RG.device) + 0.5) * (torch.pi / in_features)
    order_R = torch.arange(1, rank + 1, device=b_RG.device)
    return torch.cos(order_R[:, None] * phase_I[None, :]) * size
