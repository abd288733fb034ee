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
    """Writes one line per call.

    ``basic``: bytes in use. Each level adds something: ``tensors`` every tensor that Python holds, ``metrics`` the
    device's own counters, ``hlo`` what each compiled graph takes.
    """

    def __init__(self, path: Path, runtime: Runtime, *, level: MemDebug, every: int) -> None:
        """Append to `path` before the first step, every `every` steps and after the last."""
        self.every = every if level != "off" else 0
        self._path = path
        self._runtime = runtime
        self._depth = _LEVELS.index(level)

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
        if not self._depth or self._runtime.rank != 0:
            return
        line: dict[str, Any] = {"when": when, "step": state.step, **asdict(self._runtime.memory())}
        if self._depth >= _LEVELS.index("tensors"):
            line["tensors"], line["largest"] = census()
        if self._depth >= _LEVELS.index("metrics"):
            line["metrics"] = self._runtime.metrics()
        if self._depth >= _LEVELS.index("hlo"):
            line["graphs"] = [asdict(graph) for graph in self._runtime.compilations()]
        with self._path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


def census() -> tuple[dict[str, dict[str, int]], list[dict[str, Any]]]:
    """All tensors that Python holds: count and bytes by device and dtype, and the kinds that take most."""
    counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    sizes: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for x in gc.get_objects():
        # not isinstance, which asks objects for their __class__: proxies among them import things, or warn
        if type(x) is Tensor or type(x) is nn.Parameter:
            kind = (str(x.device), str(x.dtype).removeprefix("torch."), tuple(x.shape))
            counts[kind] += 1
            sizes[kind] = x.numel() * x.element_size()
    by_kind: dict[str, dict[str, int]] = {}
    for kind, count in counts.items():
        total = by_kind.setdefault(f"{kind[0]} {kind[1]}", {"count": 0, "bytes": 0})
        total["count"] += count
        total["bytes"] += count * sizes[kind]
    most = sorted(counts, key=lambda kind: counts[kind] * sizes[kind], reverse=True)[:_LARGEST]
    largest = [
        {"device": k[0], "dtype": k[1], "shape": list(k[2]), "count": counts[k], "bytes": counts[k] * sizes[k]}
        for k in most
    ]
    return by_kind, largest
