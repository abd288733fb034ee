"""How far two computations of the same number may differ, and why. Loosening a row is a change to be argued for."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tolerance(NamedTuple):
    rtol: float
    atol: float


# The same few hundred terms added in another order, float32: the sum is off by a unit in the last place or two.
REORDERED_FLOAT32 = Tolerance(rtol=3e-7, atol=0.0)
# A KL of float32 log-probabilities, written with other operations: it is a small difference of larger numbers, which
# leaves it some dozens of units (3e-6 seen).
REWRITTEN_FLOAT32 = Tolerance(rtol=1e-5, atol=0.0)
# NumPy in float64 against torch in float32, KLs too, some with a tail that cancels further (2e-5 seen); atol is for
# values that are 0 but for rounding.
ORACLE_FLOAT32 = Tolerance(rtol=6e-5, atol=1e-6)
# One elementwise formula of a handful of operations, float32 against Python's float64: a few units in the last place.
ONE_STEP_FLOAT32 = Tolerance(rtol=3e-7, atol=0.0)

# Shares of a tensor's largest entry, for `assert_close_to_largest`: its terms, each off by 2^-24 = 6e-8 of itself, go
# through some ten layers of sums. Seen: 6.5e-7, 7.5e-7 and 5.6e-7.
REORDERED_GRADIENT_SHARE = 2e-6  # the same terms, grouped into other batches
REWRITTEN_GRADIENT_SHARE = 2.5e-6  # the same function with other operations
MERGED_LOGITS_SHARE = 2e-6  # (W + BA) x against W x + B (A x)


def assert_close_to_largest(ours: Tensor, theirs: Tensor, *, share: float, name: str = "") -> None:
    """Every entry agrees to `share` of the largest entry of the tensor.

    An entry of a gradient is a sum over tokens whose terms cancel: its rounding error goes by the size of the terms,
    which the largest entry tells, and not by what is left of them. A bound relative to each entry would have to allow
    for the smallest one and so let the large ones, which move the weights, be wrong.
    """
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, f"{name}: {ours.shape} {theirs.shape}"
    error, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    assert largest > 0, f"{name} is all zeros, which proves nothing"
    assert error <= share * largest, f"{name}: off by {error / largest:.2e} of its largest entry {largest:.2e}"
