"""Tables of levels without gathers and scatters, for XLA: the same numbers."""

from __future__ import annotations

import pytest
import torch

from qat_lora.quant.grids import selected_levels, sum_by_code


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
