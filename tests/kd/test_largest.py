"""The k largest of each row are those that sorting finds, by either way."""

from __future__ import annotations

import pytest
import torch

from qat_lora.kd import largest as module
from qat_lora.kd.largest import largest


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("rows", "columns", "k"), [(1, 2, 1), (5, 29, 4), (7, 300, 64), (2, 300, 299), (3, 40, 40)])
@pytest.mark.parametrize("most", [1, 16_384])
def test_values_descend_and_are_those_of_a_sort(rows, columns, k, most, threads, monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_COLUMNS", most)
    torch.set_num_threads(threads)
    x_SV = torch.randn(rows, columns, requires_grad=True)
    values_SK, columns_SK = largest(x_SV, k)
    assert torch.equal(values_SK, x_SV.sort(-1, descending=True).values[:, :k])
    assert columns_SK.dtype == torch.int64 and torch.equal(x_SV.gather(-1, columns_SK), values_SK)


@pytest.mark.parametrize("columns", [50, 203])
def test_forbidden_tokens_and_equal_ones_are_columns_of_their_own(columns) -> None:
    x_SV = torch.full((2, columns), -torch.inf)
    x_SV[:, 3:9] = 1.0
    values_SK, columns_SK = largest(x_SV, 8)
    assert values_SK.tolist() == [[1.0] * 6 + [-torch.inf] * 2] * 2
    assert all(len(set(row)) == 8 for row in columns_SK.tolist())


def test_the_k_largest_may_lie_in_one_group_or_behind_all_groups() -> None:
    x_SV = torch.randn(3, 203, generator=torch.Generator().manual_seed(0))
    x_SV[0, 7::25] += 20.0  # columns 7, 32, ... are one group of 8
    x_SV[1, 200:] += 20.0  # 203 is no multiple of 8
    x_SV[2] = -torch.arange(203)
    values_SK, columns_SK = largest(x_SV, 8)
    assert torch.equal(values_SK, x_SV.sort(-1, descending=True).values[:, :8])
    assert columns_SK[2].tolist() == list(range(8))


def test_which_way_is_taken(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(module, "_columns", lambda x, k: calls.append(x.shape) or x.topk(k, -1).indices.numpy())
    largest(torch.randn(2, module.MOST_COLUMNS), 4)
    assert calls == [(2, module.MOST_COLUMNS)]
    largest(torch.randn(2, module.MOST_COLUMNS + 1), 4)
    largest(torch.randn(2, 50, dtype=torch.bfloat16), 4)
    largest(torch.randn(2, 50, device="meta"), 4)
    assert len(calls) == 1


def test_any_number_is_in_its_place() -> None:
    """More rows than are taken at once; negative, tiny and huge numbers, zeros of both signs, one infinity."""
    x_SV = torch.randn(170, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-38, 38, 300)
    x_SV[:, ::7] = 0.0
    x_SV[:, 1::7] = -0.0
    x_SV[40, 5] = torch.inf
    for k in (1, 150, 299):
        values_SK, columns_SK = largest(x_SV, k)
        assert torch.equal(values_SK, x_SV.sort(-1, descending=True).values[:, :k])
        assert all(len(set(row)) == k for row in columns_SK.tolist())
