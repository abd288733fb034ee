"""Draws from a teacher's distribution, whose mean is that distribution: a cache without a bias.

Of every position N tokens are drawn at a proposal temperature, by systematic sampling: one random number U per
position, and the draws are where the cumulative probability passes (n + U) / N. Each token is drawn N times its
probability on average, as in N independent draws, but with less variance: its count is off by less than one. After
"Sparse Logit Sampling" (arXiv:2503.16870), which draws independently.

At another temperature a draw counts p(v) / q(v) times, p being the distribution that is asked for and q the one that
was drawn from. That ratio is rounded at random to one of two neighbours on a grid, so that its mean stays what it is.

Legend: S flattened token rows, V vocabulary, N draws, R rows, T positions of a row, m temperatures with ratios, P
bytes, X draws of a row (T * N), J blocks of the vocabulary, C tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qat_lora.kd.bits import pack, unpack

Array: TypeAlias = "np.ndarray[Any, Any]"

BLOCK_TOKENS = 512
# Code 0 is a ratio of 0, code c > 0 one of 2^((c - 128) / 8): from 2^-15.9 to 2^15.9 in steps of 9%.
STEPS_PER_OCTAVE = 8
CODE_OF_ONE = 128


def uniforms(seed: int, rows: range, seq_len: int, count: int) -> Array:
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
    within_SJC = F.pad(p_SV, (0, padding)).unflatten(-1, (-1, BLOCK_TOKENS)).cumsum(-1)
    ends_SJ = within_SJC[..., -1].cumsum(-1)
    shares_N = torch.arange(samples, device=p_SV.device, dtype=torch.float32)
    # below the whole, whatever rounding makes of it
    points_SN = (shares_N + uniforms_S[:, None]).div(samples).clamp(max=1.0 - 2.0**-24) * ends_SJ[:, -1:]
    block_SN = (ends_SJ[:, None, :] <= points_SN[..., None]).sum(-1)
    begins_SJ = F.pad(ends_SJ, (1, 0))[:, :-1]
    rest_SN1 = (points_SN - begins_SJ.gather(-1, block_SN))[..., None]
    first_S1 = torch.arange(len(p_SV), device=p_SV.device)[:, None] * ends_SJ.shape[1]
    chosen_SNC = within_SJC.flatten(0, 1).index_select(0, (first_S1 + block_SN).flatten()).unflatten(0, block_SN.shape)
    # the second is the last token of the block that has a probability at all
    place_SN = torch.minimum((chosen_SNC <= rest_SN1).sum(-1), (chosen_SNC < chosen_SNC[..., -1:]).sum(-1))
    return block_SN * BLOCK_TOKENS + place_SN


def drawn_rows(
    logits_SV: Tensor, chance: Tensor, samples: int, proposal: float, temperatures: Sequence[float]
) -> dict[str, Tensor]:
    """Reduce logits to draws.

    Args:
        logits_SV: ``[S, V]``.
        chance: ``[S, 1 + N * m]`` float32 in [0, 1), for the draws and for rounding their ratios.
        samples: N.
        proposal: the temperature to draw at.
        temperatures: n of them; m are not the proposal.

    Returns:
        ``draw_ids`` [S, N] int64, ascending; ``entropy`` [S, n], of the teacher in nats at each temperature; and where
        m is not 0, ``draw_ratios`` [S, N, m] uint8, p_temperature / p_proposal of each draw (see `ratio_of`). Of equal
        draws the last one's ratio is kept.
    """
    logits_SV = logits_SV.float()
    logp = {t: F.log_softmax(logits_SV / t, dim=-1) for t in dict.fromkeys((proposal, *temperatures))}
    p = {t: x.exp() for t, x in logp.items()}
    ids_SN = draw(p[proposal], chance[:, 0], samples)
    # where p is 0 its logarithm may be -inf, and their product is none
    entropies = [-(p[t] * logp[t].clamp(min=-1e4)).sum(-1) for t in temperatures]
    of_draws = {t: x.gather(-1, ids_SN) for t, x in logp.items()}
    ratios = [of_draws[t] - of_draws[proposal] for t in temperatures if t != proposal]
    found = {"draw_ids": ids_SN, "entropy": torch.stack(entropies, dim=-1)}
    if ratios:
        chance_SNm = chance[:, 1:].unflatten(-1, (samples, len(ratios)))
        found["draw_ratios"] = _ratio_codes(torch.stack(ratios, dim=-1), chance_SNm)
    return found


def _ratio_codes(log_ratios: Tensor, chance: Tensor) -> Tensor:
    """Round at random, so that the mean of `ratio_of` is the ratio; beyond 2^15.9 it is that."""
    lower = (log_ratios * (STEPS_PER_OCTAVE / math.log(2.0)) + CODE_OF_ONE).floor().clamp(0, 254)
    low, high = ratio_of(lower), ratio_of(lower + 1)
    is_up = chance < (log_ratios.exp() - low) / (high - low)
    return (lower + is_up).to(torch.uint8)


def ratio_of(codes: Tensor) -> Tensor:
    """The ratios float32 that codes stand for."""
    return torch.where(codes > 0, torch.exp2((codes.float() - CODE_OF_ONE) / STEPS_PER_OCTAVE), 0.0)


def run_ends(ids: Array) -> Array:
    """Where the next draw [..., N] is another token, or there is none: bool [..., N]."""
    return np.concatenate([ids[..., 1:] != ids[..., :-1], np.ones_like(ids[..., :1], dtype=bool)], axis=-1)


def to_runs(ids_RTN: Array, id_bits: int) -> tuple[Array, list[Array]]:
    """The ends of runs, a bit each, uint8 [R, P]; and the token of each run, packed, for each row its own bytes."""
    ends_RX = run_ends(ids_RTN).reshape(len(ids_RTN), -1)
    ids_RX = ids_RTN.reshape(len(ids_RTN), -1)
    packed = [pack(ids_X[ends_X][None], id_bits)[0] for ids_X, ends_X in zip(ids_RX, ends_RX, strict=True)]
    return np.packbits(ends_RX, axis=1, bitorder="little"), packed


def runs_of(runs_RP: Array, seq_len: int, samples: int) -> Array:
    """Of each draw the number of its run, counted over its row: int64 [R, T * N]."""
    ends_RX = np.unpackbits(runs_RP, axis=1, count=seq_len * samples, bitorder="little")
    return np.cumsum(ends_RX, axis=1, dtype=np.int64) - ends_RX


def from_runs(run_RX: Array, packed_RP: Array, id_bits: int) -> Array:
    """The draws' tokens int64 [R, T * N], from the bytes of each row's tokens, filled up to the longest."""
    count = int(run_RX[:, -1].max()) + 1
    if -(-count * id_bits // 8) != packed_RP.shape[1]:
        raise ValueError(f"{count} runs of {id_bits} bits in {packed_RP.shape[1]} bytes")
    return np.take_along_axis(unpack(packed_RP, id_bits, count).astype(np.int64), run_RX, axis=1)
