"""The sentinel of lazy devices: after the first step nothing may be compiled again, and if it is, it says why."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from qat_lora.errors import TrainingError
from qat_lora.runtime import CompiledGraph, Runtime
from qat_lora.train.loop import Hook, StepInfo, TrainState

log = logging.getLogger(__name__)


class RecompileHook(Hook):
    """Counts compilations after the first step of a launch, warns of each, and stops where they are too many.

    The last hook of all, so that whatever the others compile is seen at their own step. Beyond `max_recompiles` the run
    stops, or never if that is -1.
    """

    every = 1

    def __init__(self, runtime: Runtime, *, max_recompiles: int) -> None:
        self._runtime, self._most = runtime, max_recompiles
        self._before = self._first_count = self._known = len(runtime.compilations())
        self._first: frozenset[str] | None = None
        self._last: StepInfo | None = None

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Compare the number of compilations with the one after the first step."""
        self._last = info
        if self._first is None:
            self._first = signature(state, info)
            self._first_count = self._known = len(self._runtime.compilations())
        reason = self._look(state)
        if reason and 0 <= self._most < self.after_first_step:
            raise TrainingError(
                f"{self.after_first_step} compilations after the first step, --max-recompiles allows {self._most}; "
                f"at step {info.step}: {reason}."
            )

    def end(self, state: TrainState) -> None:
        """Look once more, after the last evaluation and the last checkpoint; there is nothing left to stop."""
        self._look(state)

    def _look(self, state: TrainState) -> str:
        """Warn of compilations since the last look, and say what they differ in; empty where there were none."""
        graphs = self._runtime.compilations()
        if self._first is None or self._last is None or len(graphs) == self._known:
            return ""
        late, self._known = graphs[self._known :], len(graphs)
        reason = difference(self._first, signature(state, self._last), graphs[: self._first_count], late)
        log.warning("step %d compiled %d graph(s) again: %s", self._last.step, len(late), reason)
        return reason

    @property
    def after_first_step(self) -> int:
        """Compilations since the first step of this launch was done."""
        return len(self._runtime.compilations()) - self._first_count if self._first is not None else 0

    def summary(self) -> dict[str, int]:
        """What summary.json holds of a lazy device: programs since this hook was made, and those after step 1."""
        if not self._runtime.static_graph:
            return {}
        graphs = self._runtime.compilations()[self._before :]
        return {
            "graphs": len({graph.hash or str(index) for index, graph in enumerate(graphs)}),
            "compilations": len(graphs),
            "compilations_after_first_step": self.after_first_step,
        }


def signature(state: TrainState, info: StepInfo) -> frozenset[str]:
    """Everything that a step's graphs take in, by shape and dtype: batches, weights, gradients, optimizer state."""
    found = {f"micro-batches: {len(info.shapes) // max(1, len({name for name, _, _ in info.shapes}))}"}
    found |= {f"batch {name}: {list(shape)} {dtype}" for name, shape, dtype in info.shapes}
    for name, p in state.trained.items():
        grad = "none" if p.grad is None else f"{list(p.grad.shape)} {p.grad.dtype}"
        found |= {f"weight {name}: {list(p.shape)} {p.dtype}", f"gradient {name}: {grad}"}
        for key, value in state.optimizer.state[p].items():
            found.add(f"optimizer {key} of {name}: {list(value.shape)} {value.dtype} on {value.device.type}")
    return frozenset(found)


def difference(
    first: frozenset[str], now: frozenset[str], early: Sequence[CompiledGraph], late: Sequence[CompiledGraph]
) -> str:
    """Say in what a recompiled step differs from the first: tensors, the number of graph inputs, or neither."""
    changed = [f"{', '.join(sorted(first - now)) or 'nothing'} -> {', '.join(sorted(now - first)) or 'nothing'}"]
    words = changed if first != now else ["the same tensors by shape and dtype, hence another constant or operation"]
    for graph in late:
        before = [g.inputs for g in early if g.phase == graph.phase]
        inputs = f"{before[-1]} -> {graph.inputs} inputs" if before else f"{graph.inputs} inputs, not seen before"
        words.append(f"{graph.phase} graph, {inputs}" + (f", at {graph.frames[0]}" if graph.frames else ""))
    return "; ".join(words)
