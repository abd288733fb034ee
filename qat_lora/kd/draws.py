"""Draws from a teacher's distribution, whose mean is that distribution: a cache without a bias.

Of every position N tokens are drawn at a proposal temperature, by systematic sampling: one random number U per
position, and the draws are where the cumulative probability passes (n + U) / N. Each token is drawn N times its
probability on average, as in N independent draws, but with less variance: its count is off by less than one. After
"Sparse Logit Sampling" (arXiv:2503.16870), which draws independently.

At another temperature a draw counts p(v) / q(v) times, p being the distribution that is asked for and q the one that
was drawn from. That ratio is rounded at random to one of two neighbours on a grid, so that its mean stays what it is.

Legend: S flattened token rows, V vocabulary, N draws, R rows, T positions of a row, J blocks of the vocabulary, C
tokens of a block.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_TOKENS = 512
# Code 0 is a ratio of 0, code c > 0 one of 2^((c - 128) / 8): from 2^-15.9 to 2^15.9 in steps of 9%.
STEPS_PER_OCTAVE = 8
CODE_OF_ONE = 128


def uniforms(seed: int, rows: range, seq_len: int, count: int) -> np.ndarray[Any, Any]:
    """Numbers float32 [R, T, count] in [0, 1) that depend on the seed and the row alone.

    Philox gives the same bits everywhere and for ever, which NumPy's `Generator` does not promise.
    """
    bits = [np.random.Philox(key=[seed, row]).random_raw(seq_len * count) for row in rows]
    return (np.stack(bits) >> np.uint64(40)).astype(np.float32).reshape(-1, seq_len, count) * np.float32(2.0**-24)


def draw(p_SV: Tensor, uniforms_S: Tensor, samples: int) -> Tensor:
    """Draw `samples` tokens of each row from its probabilities float32: int64 [S, N], ascending.

    Found in two steps, the block of the vocabulary and the token in it: all shapes are fixed, nothing is sorted, and
    cumulative sums stay short, so that they are exact to some 1e-7.
    """
    padding = -p_SV.shape[-1] % BLOCK_TOKENS
    sums_SJC = F.pad(p_SV, (0, padding)).unflatten(-1, (-1, BLOCK_TOKENS)).cumsum(-1)
    ends_SJ = sums_SJC[..., -1].cumsum(-1)
    shares_N = torch.arange(samples, device=p_SV.device, dtype=torch.float32)
    # below the whole, whatever rounding makes of it
    points_SN = (shares_N + uniforms_S[:, None]).div(samples).clamp(max=1.0 - 2.0**-24) * ends_SJ[:, -1:]
    block_SN = (ends_SJ[:, None, :] <= points_SN[..., None]).sum(-1)
    begins_SJ = F.pad(ends_SJ, (1, 0))[:, :-1]
    rest_SN1 = (points_SN - begins_SJ.gather(-1, block_SN))[..., None]
    first_S1 = torch.arange(len(p_SV), device=p_SV.device)[:, None] * ends_SJ.shape[1]
    chosen_SNC = sums_SJC.flatten(0, 1).index_select(0, (first_S1 + block_SN).flatten()).unflatten(0, block_SN.shape)
    # the second is the last token of the block that has a probability at all
    place_SN = torch.minimum((chosen_SNC <= rest_SN1).sum(-1), (chosen_SNC < chosen_SNC[..., -1:]).sum(-1))
    return block_SN * BLOCK_TOKENS + place_SN


def ratio_codes(log_ratios: Tensor, chance: Tensor) -> Tensor:
    """Round at random, so that the mean of `ratio_of` is the ratio; beyond 2^15.9 it is that."""
    lower = (log_ratios * (STEPS_PER_OCTAVE / math.log(2.0)) + CODE_OF_ONE).floor().clamp(0, 254)
    low, high = ratio_of(lower), ratio_of(lower + 1)
    is_up = chance < (log_ratios.exp() - low) / (high - low)
    return (lower + is_up).to(torch.uint8)


def ratio_of(codes: Tensor) -> Tensor:
    """The ratios float32 that codes stand for."""
    return torch.where(codes > 0, torch.exp2((codes.float() - CODE_OF_ONE) / STEPS_PER_OCTAVE), 0.0)
