"""Log-probabilities of candidates in descending order, as gaps between neighbours in a few bits each.

A gap is stored as the square root of its share of the position's largest gap, on a grid of 2^bits levels, so that small
gaps, which lie where the probabilities do, are finest. Each gap is taken from where the one before it was put, so
errors do not add up. What the candidates sum to is stored beside them (`tail`), so nothing else is needed.

Legend: R rows, T positions of a row, S = R * T, K candidates.
"""

from __future__ import annotations

import numpy as np

from qat_lora.kd.positions import Array

# A candidate further below the best one than this is put here: e^-30 is less than float32 sees beside 1.
DEEPEST = 30.0


def to_gaps(logprobs_RTK: Array, bits: int) -> tuple[Array, Array]:
    """The levels uint8 [R, T, K - 1] of descending log-probabilities, and each position's largest gap float16 [R, T].

    `bits` is at most 8. With one candidate there are no gaps, and the largest is 0.
    """
    rows, length, count = logprobs_RTK.shape
    way_KS = np.ascontiguousarray(logprobs_RTK.reshape(-1, count).T, dtype=np.float64)  # candidate by candidate
    way_KS = np.minimum(way_KS[0] - way_KS, DEEPEST)
    largest_S = np.diff(way_KS, axis=0).max(0, initial=0.0).astype(np.float16)
    top = 2**bits - 1
    unit_S = largest_S.astype(np.float64) / top**2  # level c stands for c^2 of them
    share_S = np.divide(1.0, unit_S, out=np.zeros_like(unit_S), where=unit_S > 0)
    codes_KS = np.empty((count - 1, way_KS.shape[1]), np.uint8)
    reached_S = np.zeros_like(unit_S)
    for codes_S, way_S in zip(codes_KS, way_KS[1:], strict=True):
        # halfway between c - 1 and c lies c^2 - c + 1/2, so the nearest level to x is floor(sqrt(x - 1/4) + 1/2)
        level_S = np.sqrt(np.maximum((way_S - reached_S) * share_S - 0.25, 0.0))
        level_S = np.minimum(np.floor(level_S + 0.5), top)
        codes_S[:] = level_S
        reached_S += level_S * level_S * unit_S
    return np.ascontiguousarray(codes_KS.T).reshape(rows, length, -1), largest_S.reshape(rows, length)


def from_gaps(codes: Array, largest_RT: Array, bits: int, tail_RT: Array) -> Array:
    """The log-probabilities float32 [R, T, K] that `to_gaps` was given, but for rounding; they sum to 1 - tail."""
    rows, length, gaps = codes.shape
    logprobs_RTK = np.zeros((rows, length, gaps + 1), np.float32)
    steps = _levels(bits).astype(np.float32)[codes] * -largest_RT.astype(np.float32)[..., None]
    np.cumsum(steps, axis=-1, out=logprobs_RTK[..., 1:])
    sums_RT = np.exp(logprobs_RTK).sum(-1)
    # a tail of 1 is one that rounding made: the candidates' share is then the least that float32 tells from 0
    kept_RT = np.maximum(1.0 - tail_RT.astype(np.float64), 2.0**-24)
    logprobs_RTK += np.log(kept_RT / sums_RT).astype(np.float32)[..., None]
    return logprobs_RTK


def expected_kl(codes: Array, largest_RT: Array, bits: int, logprobs_RTK: Array) -> Array:
    """KL(given || read) in nats [R, T] that the grid costs on average, from what is read alone.

    A candidate is off by its own rounding, taken as even over the levels' distance there, d: by d^2 / 12 in the mean of
    the square. What they are all off by is taken back with their sum, so the KL is 1/2 sum_k p_k (1 - p_k) d_k^2 / 12.
    Within a tenth of what was measured on the embedded teacher.
    """
    levels = _levels(bits)
    distances = np.gradient(levels)
    distances[-1] = 0.0  # as a rule the largest gap itself, which is not rounded
    d_RTK = distances[codes] * largest_RT.astype(np.float64)[..., None]
    p_RTK = np.exp(logprobs_RTK[..., 1:].astype(np.float64))
    return (p_RTK * (1.0 - p_RTK) * d_RTK**2).sum(-1) / 24


def _levels(bits: int) -> Array:
    """Shares of the largest gap, one per code."""
    return np.linspace(0.0, 1.0, 2**bits) ** 2
