"""Devices that compile graphs ahead: which they are, and how work is ordered on them.

A runtime registers its device here once (see `runtime.xla`). The maths asks about a tensor and names no device.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Barrier = Callable[[list[Tensor]], object]

_BARRIERS: dict[str, Barrier] = {}


def register(device_type: str, barrier: Barrier) -> None:
    """Say that a type of device compiles its graphs ahead; `barrier` makes tensors of a graph wait for each other."""
    _BARRIERS[device_type] = barrier


def is_static(x: Tensor) -> bool:
    """Whether work on a tensor becomes part of a graph that is compiled ahead."""
    return x.device.type in _BARRIERS


def finish_together(*tensors: Tensor) -> None:
    """Let a compiled graph use none of these tensors before it has all of them; nothing on eager devices."""
    barrier = _BARRIERS.get(tensors[0].device.type)
    if barrier is not None:
        barrier(list(tensors))
