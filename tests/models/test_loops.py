"""The loop over parts of rows: what `in_turn` means, and so what a device's own loop has to give."""

from __future__ import annotations

import pytest
import torch

from qat_lora.models.lean.loops import in_turn
from qat_lora.runtime import LocalRuntime

LOOPS = {"in turn": in_turn, "the CPU's": LocalRuntime("cpu").loop}


@pytest.fixture(params=LOOPS)
def loop(request):
    return LOOPS[request.param]


def running_sum(carry, xs):
    (total,), (x, weight) = carry, xs
    out = (x * weight[:, None]).cumsum(0) + total
    return [out[-1] if len(out) else total], [out, weight.int()]


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_parts_see_the_carry_of_those_before_and_outputs_are_joined_in_order(size, loop) -> None:
    x, weight = torch.arange(14.0).view(7, 2), torch.arange(7.0)
    (total,), (out, whole) = loop(running_sum, [torch.ones(2)], [x, weight], size)
    assert torch.equal(out, (x * weight[:, None]).cumsum(0) + 1)
    assert torch.equal(total, out[-1])
    assert torch.equal(whole, weight.int()) and whole.dtype is torch.int32


@pytest.mark.parametrize(("size", "parts"), [(1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (100, [7])])
def test_parts_are_of_the_size_and_the_last_is_what_is_left(size, parts, loop) -> None:
    seen = []

    def body(carry, xs):
        seen.append(len(xs[0]))
        return carry, []

    carry, outputs = loop(body, [torch.zeros(())], [torch.zeros(7)], size)
    assert seen == parts
    assert outputs == [] and torch.equal(carry[0], torch.zeros(()))


def test_no_rows_are_one_empty_part_with_outputs_of_the_right_width(loop) -> None:
    carry, outputs = loop(running_sum, [torch.full((2,), 5.0)], [torch.zeros(0, 2), torch.zeros(0)], 3)
    assert torch.equal(carry[0], torch.full((2,), 5.0))
    assert [(x.shape, x.dtype) for x in outputs] == [((0, 2), torch.float32), ((0,), torch.int32)]
