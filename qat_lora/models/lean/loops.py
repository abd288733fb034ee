"""The one loop that a device may want to run by itself: over consecutive rows of some tensors.

`in_turn` is what it means; a runtime whose device compiles whole graphs has its own (`Runtime.loop`), which compiles
the body once and holds one part at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Body: TypeAlias = Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]
"""(carry, rows of each x) -> (carry of the same shapes and dtypes, rows of each output)."""

Loop: TypeAlias = Callable[[Body, list[Tensor], list[Tensor], int], tuple[list[Tensor], list[Tensor]]]
"""(body, first carry, xs, rows per part) -> (last carry, outputs of all rows)."""


def in_turn(body: Body, carry: list[Tensor], xs: list[Tensor], size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Run `body` over parts of `size` rows, the last of which may be shorter, and join its outputs.

    Without any rows, `body` runs once on an empty part, so that outputs have their dtype and width.
    """
    rows = xs[0].shape[0]
    outputs: list[list[Tensor]] = []
    for start in range(0, max(rows, 1), size):
        carry, output = body(carry, [x[start : start + size] for x in xs])
        outputs.append(output)
    return carry, [torch.cat(parts) for parts in zip(*outputs, strict=True)]
