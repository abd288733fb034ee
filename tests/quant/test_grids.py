"""The rule for ties, and tables of levels without gathers and scatters, for XLA: the same numbers."""

from __future__ import annotations

import pytest
import torch

from qat_lora.config import LinearQuant
from qat_lora.quant.grids import Grid, selected_levels, sum_by_code


@pytest.mark.parametrize("count", [4, 16, 256])
def test_a_weight_between_two_levels_of_a_table_takes_the_lower(count) -> None:
    """By comparisons, and by a binary search where there are many."""
    levels_N = torch.arange(count, dtype=torch.float32).square()
    midpoints = (levels_N[1:] + levels_N[:-1]) / 2
    assert torch.equal(Grid(levels_N).codes(midpoints[None])[0], torch.arange(count - 1).byte())
    above = torch.nextafter(midpoints, midpoints + 1)
    assert torch.equal(Grid(levels_N).codes(above[None])[0], torch.arange(1, count).byte())


@pytest.mark.parametrize("levels", ["balanced", "int", "affine", "ternary"])
def test_a_weight_between_two_levels_of_an_even_grid_takes_the_even_step(levels) -> None:
    grid = Grid.of(LinearQuant(2, levels))
    midpoints = (grid.levels_N[1:] + grid.levels_N[:-1]) / 2
    half = grid.levels_N[0] % 1  # a balanced grid is the integers, moved by a half
    assert not ((grid.levels_N[grid.codes(midpoints[None])[0].long()] - half) % 2).any()


@pytest.mark.parametrize("count", [4, 16])
def test_selecting_levels_is_indexing_bit_for_bit(count) -> None:
    codes = torch.randint(count, (7, 33)).to(torch.uint8)
    levels = torch.randn(count).sort().values
    assert torch.equal(selected_levels(codes, levels), levels[codes.long()])
    assert torch.equal(selected_levels(codes.float(), levels), levels[codes.long()])


def test_sums_by_code_are_sums_of_masks(monkeypatch) -> None:
    codes, values = torch.randint(5, (7, 33)).to(torch.uint8), torch.randn(7, 33, dtype=torch.float64)
    expected = torch.stack([values[codes == code].sum() for code in range(6)])
    torch.testing.assert_close(sum_by_code(values, codes, 6), expected)
    monkeypatch.setattr("qat_lora.quant.grids.compares_codes", lambda x, count: True)
    torch.testing.assert_close(sum_by_code(values, codes, 6), expected)
