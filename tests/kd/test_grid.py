"""Log-probabilities on the grid, against a slow reference and by what they cost."""

from __future__ import annotations

import numpy as np
import pytest

from qat_lora.kd.grid import DEEPEST, expected_kl, from_gaps, to_gaps


def teacher(k: int, *, vocab_size: int = 500, positions: int = 200, spread: float = 3.0, seed: int = 0):
    """Descending log-probabilities float32 [1, T, k] of Gaussian logits, and the mass of the rest [1, T]."""
    z = np.random.RandomState(seed).randn(1, positions, vocab_size) * spread
    logp = -np.sort(-(z - np.log(np.exp(z).sum(-1, keepdims=True))), axis=-1)
    return logp[..., :k].astype(np.float32), (1 - np.exp(logp[..., :k]).sum(-1)).clip(0).astype(np.float32)


def by_hand(logprobs: np.ndarray, bits: int) -> tuple[list[int], np.float16]:
    """The levels of one position, one gap after the other, each the nearest level to what is left of the way."""
    way = [min(float(logprobs[0]) - float(x), DEEPEST) for x in logprobs]
    largest = np.float16(max([b - a for a, b in zip(way, way[1:], strict=False)], default=0))
    top, at, codes = 2**bits - 1, 0.0, []
    for target in way[1:]:
        steps = [float(largest) * (c / top) ** 2 for c in range(top + 1)]
        code = min(range(top + 1), key=lambda c: abs(at + steps[c] - target))
        codes.append(code)
        at += steps[code]
    return codes, largest


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_levels_are_the_nearest_ones(bits) -> None:
    logprobs_RTK, _ = teacher(12, positions=40)
    codes, largest_RT = to_gaps(logprobs_RTK, bits)
    assert codes.dtype == np.uint8 and codes.shape == (1, 40, 11) and largest_RT.dtype == np.float16
    for t in range(40):
        expected, largest = by_hand(logprobs_RTK[0, t], bits)
        assert codes[0, t].tolist() == expected and largest_RT[0, t] == largest


@pytest.mark.parametrize(("bits", "limit"), [(4, 1.2e-4), (5, 3e-5), (6, 8e-6)])
@pytest.mark.parametrize("k", [16, 64])
def test_what_a_grid_costs(bits, limit, k) -> None:
    """KL(stored || read) in nats; it does not grow with k, since errors do not add up."""
    logprobs_RTK, tail_RT = teacher(k)
    found = from_gaps(*to_gaps(logprobs_RTK, bits), bits, tail_RT)
    assert found.dtype == np.float32 and found.shape == logprobs_RTK.shape
    p = np.exp(logprobs_RTK.astype(np.float64))
    kl_RT = (p * (logprobs_RTK - found)).sum(-1)
    assert -1e-6 < kl_RT.mean() < limit
    codes, largest_RT = to_gaps(logprobs_RTK, bits)
    assert expected_kl(codes, largest_RT, bits, found).mean() == pytest.approx(kl_RT.mean(), rel=0.35)
    assert np.allclose(np.exp(found.astype(np.float64)).sum(-1), 1 - tail_RT, atol=2e-6)
    assert (np.diff(found, axis=-1) <= 0).all(), "still in descending order"


def test_the_ends_of_the_range() -> None:
    logprobs = np.array([[[0.0, -1e4, -1e4], [-1.0, -1.0, -1.0], [np.log(0.5), np.log(0.5), -1e4]]], np.float32)
    tail = np.array([[0.0, 1 - 3 * np.exp(-1.0), 0.0]], np.float32)
    found = from_gaps(*to_gaps(logprobs, 5), 5, tail)
    assert found[0, 0].tolist() == [0.0, -DEEPEST, -DEEPEST], "what a teacher forbids is next to nothing"
    assert np.allclose(found[0, 1], -1.0, atol=1e-6), "equal ones stay equal"
    assert np.allclose(found[0, 2, :2], np.log(0.5), atol=1e-6) and found[0, 2, 2] < -DEEPEST
    assert from_gaps(*to_gaps(logprobs[..., :1], 4), 4, np.zeros((1, 3), np.float32)).tolist() == [[[0.0]] * 3]
    assert np.isfinite(from_gaps(*to_gaps(logprobs, 5), 5, np.ones((1, 3), np.float32))).all(), "a tail of all there is"
