"""How far two computations of the same number may differ, and why. Loosening a row is a change to be argued for."""

from __future__ import annotations

from typing import NamedTuple


class Tolerance(NamedTuple):
    rtol: float
    atol: float


# The same sums in another order, float32: some hundred terms, each rounded to 2^-24 of the largest.
REORDERED_FLOAT32 = Tolerance(rtol=2e-5, atol=2e-7)
# A gradient through two layers, the same function written with other operations.
REWRITTEN_GRADIENT = Tolerance(rtol=2e-4, atol=2e-6)
# NumPy in float64 against torch in float32.
ORACLE_FLOAT32 = Tolerance(rtol=1e-4, atol=1e-5)
