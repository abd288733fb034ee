"""Sums over ranks, and tensors that ranks hold in parts, without a run: what the oldest torch is asked as well."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.fsdp_ranks import Blocks
from tests.runtime.test_distributed import on_ranks


def test_a_gradient_that_was_accumulated_is_summed_once_and_others_are_left_alone(tmp_path) -> None:
    found = on_ranks(2, tmp_path, "sums")
    for rank, each in enumerate(found):
        assert each["own"] == [1.0 + rank]
        assert each["total"] == [3.0]
        assert each["grad"] == [[4.5] * 3] * 2, "the mean of 3 and 6"
        assert each["norm"] == pytest.approx((6 * 4.5**2 + 2 * 2.0**2) ** 0.5)
        assert each["frozen"]
        assert each["reduced_bytes"] == 4 * 8


@pytest.mark.parametrize("world_size", [2, 4])
def test_tensors_are_cut_up_and_put_together(world_size, tmp_path) -> None:
    """Layers of 3 and 5 rows, so that some ranks hold less than others, or nothing."""
    found = on_ranks(world_size, tmp_path, "tests.runtime.fsdp_ranks:pieces")
    model = Blocks()
    losses = [
        model(torch.tensor([1, (rank + shift) % 7])).square().sum() for rank in range(world_size) for shift in (0, 2)
    ]
    (sum(losses) / world_size).backward()
    outside = torch.full((2,), sum(range(world_size)) * 2 / world_size)
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    norm = torch.nn.utils.get_total_norm([*grads.values(), outside])
    padded = sum(-(-p.shape[0] // world_size) * world_size * p[0].numel() for p in grads.values())
    for each in found:
        assert each["round trip"]
        assert each["told"], "of a part that is no number every rank is told"
        assert not each["whole"], "what is frozen outside the layers stays as it is"
        assert each["grads"].pop("") == outside.tolist()
        for name, grad in grads.items():
            torch.testing.assert_close(torch.tensor(each["grads"][name]), grad, rtol=1e-5, atol=1e-5)
        assert each["norm"] == found[0]["norm"] == pytest.approx(norm.item(), rel=1e-6)
        assert each["reduced_bytes"] == [2 * 4 * padded, 2 * 4 * padded + 4 * 2]
        for name, p in grads.items():
            assert each["held"][name] == -(-p.shape[0] // world_size) * p[0].numel(), name
