"""Programs that several ranks run, as forks (see `tests.runtime.forked`) or by torchrun itself:

torchrun --nproc-per-node W -m tests.runtime.ranks NAME FOLDER ARGUMENTS...        writes FOLDER/rankR.json
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from qat_lora.config import KDConfig, OptimConfig, PlaceConfig, QatRun
from qat_lora.errors import CheckpointError
from qat_lora.runtime import Runtime, runtime_for
from qat_lora.train.run import run_qat, run_recovery
from tests.conftest import qat_run, recovery_run

STEPS = 20
ROWS_PER_STEP = 16
# eps is above the rounding of a gradient whose terms cancel, which AdamW would divide by itself: with 1e-8 one device
# that sums in another order moves a weight by 2e-5 of the largest.
OPTIM = OptimConfig(lr=2e-3, warmup_steps=5, clip_norm=0.05, weight_decay=0.01, ema_decay=0.9, eps=1e-5)
# With seed 0 two of 20 steps meet a weight at the very border between two codes: another order of sums rounds it to the
# other side, which moves that step's gradient norm by 9e-5 at 2 bits.
QAT_SEED = 1
KD = KDConfig(hard_weight=0.2, ce_alpha=0.1, anchor_kl_weight=0.5, anchor_samples=6)


def settings(stage: str, cache: Path, output: Path, student: Path, world_size: int, **loop):
    """A run of equal rows per step whatever the number of ranks."""
    batch_size = ROWS_PER_STEP // (2 * world_size)
    loop = {
        "max_steps": STEPS, "batch_size": batch_size, "accumulation_steps": 2, "eval_every": 10, "save_every": 5,
        "log_every": 1,
    } | loop  # fmt: skip
    if stage == "qat":
        return qat_run(cache, output, loop={"seed": QAT_SEED} | loop, optim=OPTIM, kd=KD)
    return recovery_run(cache, output, student, loop=loop, optim=OPTIM, kd=KD)


def outcome(result, runtime: Runtime) -> dict:
    state = result.state
    return {
        "rank": runtime.rank,
        "losses": [row["loss"] for row in result.losses.rows if row["loss"] == row["loss"]],
        "kl": [row["eval_kl"] for row in result.losses.rows if row["eval_kl"] == row["eval_kl"]],
        "trained": {name: runtime.gather(p).flatten().tolist() for name, p in state.trained.items()},
        "ema": {name: runtime.gather(x).flatten().tolist() for name, x in state.ema.items()},
        "grad_norms": [row["grad_norm"] for row in result.losses.rows if row["grad_norm"] == row["grad_norm"]],
        "reduced_bytes": getattr(runtime, "reduced_bytes", 0),
    }


def train(folder: str, stage: str, cache: str, student: str) -> dict:
    """A whole run over the ranks."""
    runtime = runtime_for(PlaceConfig(device="cpu", barrier_timeout=60), many=True)
    run = settings(stage, Path(cache), Path(folder) / "run", Path(student), runtime.world_size)
    return outcome(run_qat(run, runtime) if isinstance(run, QatRun) else run_recovery(run, runtime), runtime)


class KillAt7:
    """Kills rank 1 in the middle of a run: two steps after a checkpoint."""

    every = 7

    def start(self, state): ...

    def after_step(self, state, info):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, state): ...


def killed(folder: str, cache: str, student: str) -> dict:
    """The run of `train`, but that rank 1 is killed in the middle of step 7: two after a checkpoint."""

    runtime = runtime_for(PlaceConfig(device="cpu", barrier_timeout=60), many=True)
    run = settings("recover", Path(cache), Path(folder) / "run", Path(student), runtime.world_size)
    run_recovery(run, runtime, hooks=[KillAt7()])
    raise AssertionError("the run outlived its rank")


def resumed(folder: str, cache: str, student: str) -> dict:
    """What `killed` left behind, gone on with by however many ranks."""
    runtime = runtime_for(PlaceConfig(device="cpu", barrier_timeout=60), many=True)
    run = settings("recover", Path(cache), Path(folder) / "run", Path(student), runtime.world_size)
    return outcome(run_recovery(run, runtime, launch="resume"), runtime)


def refused(folder: str) -> dict:
    """Rank 1 meets what a user must mend; the others are at work and would wait for it."""
    runtime = runtime_for(PlaceConfig(device="cpu", barrier_timeout=60), many=True)
    if runtime.rank == 1:
        raise ValueError("only rank 1 knows what is wrong")
    runtime.all_reduce_sum(torch.ones(1))
    return {}


def disagreeing(folder: str, cache: str, student: str) -> dict:
    """Rank 1 was given another learning rate, and both replace a run."""
    runtime = runtime_for(PlaceConfig(device="cpu", barrier_timeout=60), many=True)
    run = settings("recover", Path(cache), Path(folder) / "run", Path(student), runtime.world_size)
    run = dataclasses.replace(run, optim=dataclasses.replace(OPTIM, lr=OPTIM.lr * (1 + runtime.rank)))
    try:
        run_recovery(run, runtime, launch="from_scratch")
    except CheckpointError as error:
        return {"error": str(error)}
    return {"error": ""}


def elsewhere(folder: str, what: str, caches: str, students: str) -> dict:
    """Rank 1 was given another cache, or another student to recover, under the same settings."""
    runtime = runtime_for(PlaceConfig(device="cpu", barrier_timeout=60), many=True)
    cache, student = (names.split(",")[runtime.rank if what == kind else 0] for kind, names in
                      (("cache", caches), ("student", students)))  # fmt: skip
    run = settings("recover", Path(cache), Path(folder) / "run", Path(student), runtime.world_size)
    try:
        run_recovery(run, runtime)
    except CheckpointError as error:
        return {"error": str(error)}
    return {"error": ""}


def sums(folder: str) -> dict:
    """The sums by themselves: values, what is left alone, what is sent."""
    runtime = runtime_for(PlaceConfig(device="cpu", barrier_timeout=60), many=True)
    layer = torch.nn.Linear(3, 2)
    frozen = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*layer.parameters(), frozen])
    for part in (1.0, 2.0):
        layer(torch.full((1, 3), part * (runtime.rank + 1))).sum().backward()
    own = torch.tensor([1.0 + runtime.rank])
    total = runtime.all_reduce_sum(own)
    runtime.reduce_gradients(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e9)
    return {
        "own": own.tolist(), "total": total.tolist(), "grad": layer.weight.grad.tolist(), "norm": norm.item(),
        "frozen": frozen.grad is None, "reduced_bytes": runtime.reduced_bytes,
    }  # fmt: skip


def lost(folder: str) -> dict:
    """Rank 1 is gone when the others sum."""
    runtime = runtime_for(PlaceConfig(device="cpu", barrier_timeout=20), many=True)
    runtime.barrier("together")
    if runtime.rank == 1:
        os._exit(0)
    try:
        runtime.all_reduce_sum(torch.ones(1))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


def late(folder: str) -> dict:
    """Rank 1 does not come to a barrier in time."""
    runtime = runtime_for(PlaceConfig(device="cpu", barrier_timeout=3), many=True)
    if runtime.rank == 1:
        time.sleep(5)
        return {}
    try:
        runtime.barrier("before_final_save")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


if __name__ == "__main__":
    name, folder, *arguments = sys.argv[1:]
    found = globals()[name](folder, *arguments)
    Path(folder, f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
