"""How far two computations of the same number may differ, and why. Loosening a row is a change to be argued for."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tolerance(NamedTuple):
    rtol: float
    atol: float


# The same sums in another order, float32: some hundred terms, each rounded to 2^-24 of the largest.
REORDERED_FLOAT32 = Tolerance(rtol=2e-5, atol=2e-7)
# The same function written with other operations, float32.
REWRITTEN_FLOAT32 = Tolerance(rtol=2e-4, atol=2e-6)
# NumPy in float64 against torch in float32.
ORACLE_FLOAT32 = Tolerance(rtol=1e-4, atol=1e-5)
# One elementwise formula of a handful of operations, float32 against Python's float64: a few units in the last place.
ONE_STEP_FLOAT32 = Tolerance(rtol=3e-7, atol=0.0)

# Shares of a tensor's largest entry, for `assert_close_to_largest`.
REORDERED_GRADIENT_SHARE = 0.0
REWRITTEN_GRADIENT_SHARE = 0.0
MERGED_LOGITS_SHARE = 0.0


def assert_close_to_largest(ours: Tensor, theirs: Tensor, *, share: float, name: str = "") -> None:
    """Every entry agrees to `share` of the largest entry of the tensor.

    An entry of a gradient is a sum over tokens whose terms cancel: its rounding error goes by the size of the terms,
    which the largest entry tells, and not by what is left of them. A bound relative to each entry would have to allow
    for the smallest one and so let the large ones, which move the weights, be wrong.
    """
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, f"{name}: {ours.shape} {theirs.shape}"
    error, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    assert error <= share * largest, f"{name}: {error / largest:.2e} of the largest entry {largest:.2e}"
    assert largest > 0, f"{name} is all zeros, which proves nothing"
