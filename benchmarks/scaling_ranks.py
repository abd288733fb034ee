"""What `scaling.py` runs on its ranks, by torchrun.

    torchrun --nproc-per-node 2 benchmarks/scaling_ranks.py count|clock FOLDER SETTINGS

FOLDER/cache is a KD cache of the embedded teacher; each rank writes what it found to FOLDER/NAMErank.json. SETTINGS is
JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_time import build
from torch import Tensor

from qat_lora.cache import KDCacheDataset
from qat_lora.config import KDConfig, LoopConfig, OptimConfig, PlaceConfig, RecoveryRun
from qat_lora.config.presets import qat_run
from qat_lora.runtime import LocalRuntime, Runtime, runtime_for
from qat_lora.train.loop import StepInfo, TrainState, train_step
from qat_lora.train.objective import KDObjective
from qat_lora.train.run import run_qat, run_recovery

PRESET = "q4_g32"
CPU = PlaceConfig(device="cpu", barrier_timeout=300)
# Everything of torch.distributed that ranks could meet in, so that none is overlooked.
COLLECTIVES = (
    "all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "isend",
    "irecv", "batch_isend_irecv", "all_gather_object", "broadcast_object_list", "gather_object",
    "scatter_object_list", "barrier", "monitored_barrier",
)  # fmt: skip
# function that asks for a collective -> what it is for; the innermost counts
PURPOSES = {
    "reduce_gradients": "gradients",
    "counts": "counts",
    "accumulate_gradients": "loss",
    "cached_kl": "evaluation",
}


class Counter:
    """A hook of a run that notes every collective, and where steps begin and end.

    Attributes:
        calls: (what for, which function, bytes of this rank's tensor), in order. edges: of steps, in `calls`.
    """

    every = 1

    def __init__(self) -> None:
        """Begin to note: replaces the functions of torch.distributed for the life of the process."""
        self.calls: list[tuple[str, str, int]] = []
        self.edges: list[int] = []
        for name in COLLECTIVES:
            setattr(dist, name, self._noting(name, getattr(dist, name)))

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            self.calls.append((_purpose(), name, sum(x.numel() * x.element_size() for x in tensors)))
            return function(*args, **kwargs)

        return noting

    def start(self, state: TrainState) -> None:
        """Forget what came before the first step."""
        self.edges = [len(self.calls)]

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Note the end of a step."""
        self.edges.append(len(self.calls))

    def end(self, state: TrainState) -> None:
        """Nothing."""

    def steps(self) -> list[list[tuple[str, str, int]]]:
        """The calls of each step."""
        return [self.calls[a:b] for a, b in zip(self.edges, self.edges[1:], strict=False)]


def _purpose() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in PURPOSES:
            return PURPOSES[frame.f_code.co_name]
        frame = frame.f_back  # type: ignore[assignment]
    return "other"


def count(folder: Path, runtime: Runtime, steps: int) -> dict[str, Any]:
    """Collectives of every step of a QAT run and of a recovery run, and the gradients' bytes by the runtime's count."""
    counter, found = Counter(), {}
    loop = LoopConfig(max_steps=steps, batch_size=2, accumulation_steps=2, eval_every=0, eval_rows=4)
    places: dict[str, Any] = {"cache_dir": folder / "cache", "loop": loop, "place": CPU}
    student = folder / "qat" / "best.pt"
    for stage, run in (
        ("QAT", lambda: run_qat(qat_run(PRESET, output=student.parent, **places), runtime, hooks=[counter])),
        ("recovery", lambda: run_recovery(
            RecoveryRun(checkpoint=str(student), output=folder / "recovery", **places), runtime, hooks=[counter]
        )),
    ):  # fmt: skip
        before = runtime.reduced_bytes  # type: ignore[attr-defined]
        state = run().state
        found[stage] = {
            "steps": counter.steps(),
            "reduced_bytes": runtime.reduced_bytes - before,  # type: ignore[attr-defined]
            "trained": sum(p.numel() for p in state.trained.values()),
        }
    return found


def clock(folder: Path, runtime: Runtime, rows: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every leg of every round by this rank's clock; 0 where the leg is the other rank's alone.

    All legs lie between barriers, so that no two run at once, and begin one place later in every round.
    """
    cache, alone, found = folder / "cache", LocalRuntime("cpu"), {}
    for stage in ("recovery", "QAT"):
        whole, half = (_stepper(stage, cache, size, alone) for size in (rows, rows // 2))
        apart, together = (_stepper(stage, cache, rows // 2, how) for how in (alone, runtime))
        legs: dict[str, Callable[[], None] | None] = {
            "one, all rows": whole if runtime.rank == 0 else None,
            "one, half": half if runtime.rank == 0 else None,
            "two apart": apart,
            "two": together,
            "two, gradients alone": _reducer(stage, runtime),
        }
        seconds: dict[str, list[float]] = {leg: [] for leg in legs}
        order = list(legs)
        for number in range(rounds + 2):
            for leg in order[number % len(order) :] + order[: number % len(order)]:
                step = legs[leg]
                runtime.barrier(leg)
                started = time.perf_counter()
                if step is not None:
                    step()
                taken = time.perf_counter() - started if step is not None else 0.0
                if number >= 2:  # the first two warm up
                    seconds[leg].append(taken)
        runtime.barrier("stage")
        found[stage] = seconds
    return found


def _stepper(stage: str, cache: Path, rows: int, runtime: Runtime) -> Callable[[], None]:
    """A function that takes one optimizer step of so many rows."""
    state = build(stage, PRESET)
    dataset = KDCacheDataset(cache, preload=True, rank=runtime.rank, world_size=runtime.world_size)
    objective = KDObjective(KDConfig(), dataset.manifest.target_spec, runtime, total_steps=1000)
    batches: Iterator[dict[str, Tensor]] = dataset.batches(rows)
    return lambda: train_step(state, [next(batches)], objective, OptimConfig(), runtime) and None


def _reducer(stage: str, runtime: Runtime) -> Callable[[], None]:
    """A function that sums gradients over the ranks, which come to it at the same time."""
    state = build(stage, PRESET)
    for p in state.trained.values():
        p.grad = torch.zeros_like(p)
    return lambda: runtime.reduce_gradients(state.optimizer)


if __name__ == "__main__":
    name, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    runtime = runtime_for(CPU, many=True)
    found = {"count": count, "clock": clock}[name](folder, runtime, **settings)
    (folder / f"{name}{runtime.rank}.json").write_text(json.dumps(found))
