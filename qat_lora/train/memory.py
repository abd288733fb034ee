"""`--mem-debug`: what is in memory and why, as JSON lines.

It reads shapes and counters, never a value, so it neither stalls a device nor makes it compile anything.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qat_lora.config import MemDebug
from qat_lora.runtime import Runtime
from qat_lora.train.loop import Hook, StepInfo, TrainState

_LEVELS: tuple[MemDebug, ...] = ("off", "basic", "tensors", "metrics", "hlo")
_LARGEST = 10


class MemoryHook(Hook):
    """Appends a line before the first step, every `every` steps and after the last.

    ``basic``: bytes in use. Each level adds something: ``tensors`` every tensor that Python holds, ``metrics`` the
    device's own counters, ``hlo`` what each compiled graph takes.
    """

    def __init__(self, path: Path, runtime: Runtime, *, level: MemDebug, every: int) -> None:
        self.every = every if level != "off" else 0
        self._path, self._runtime = path, runtime
        self._levels = _LEVELS[: _LEVELS.index(level) + 1]

    def start(self, state: TrainState) -> None:
        """Write the state before the first step."""
        self._write(state, "start")

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Write the state after a step."""
        self._write(state, "step")

    def end(self, state: TrainState) -> None:
        """Write the state after the last step."""
        self._write(state, "end")

    def _write(self, state: TrainState, when: str) -> None:
        if "basic" not in self._levels or self._runtime.rank != 0:
            return
        line: dict[str, Any] = {"when": when, "step": state.step, **asdict(self._runtime.memory())}
        if "tensors" in self._levels:
            line["tensors"], line["largest"] = census()
        if "metrics" in self._levels:
            line["metrics"] = self._runtime.metrics()
        if "hlo" in self._levels:
            line["graphs"] = [asdict(graph) for graph in self._runtime.compilations()]
        with self._path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


def census() -> tuple[dict[str, dict[str, int]], list[dict[str, Any]]]:
    """All tensors that Python holds: count and bytes by device and dtype, and the kinds that take most."""
    counts: Counter[tuple[str, str, tuple[int, ...], int]] = Counter()  # by device, dtype, shape and bytes
    for x in gc.get_objects():
        # not isinstance, which asks objects for their __class__: proxies among them import things, or warn
        if type(x) is Tensor or type(x) is nn.Parameter:
            kind = (str(x.device), str(x.dtype).removeprefix("torch."), tuple(x.shape), x.numel() * x.element_size())
            counts[kind] += 1
    by_kind: dict[str, dict[str, int]] = {}
    rows: list[dict[str, Any]] = []
    for (device, dtype, shape, size), count in counts.items():
        total = by_kind.setdefault(f"{device} {dtype}", {"count": 0, "bytes": 0})
        total["count"] += count
        total["bytes"] += count * size
        rows.append({"device": device, "dtype": dtype, "shape": list(shape), "count": count, "bytes": count * size})
    return by_kind, sorted(rows, key=lambda row: row["bytes"], reverse=True)[:_LARGEST]
