"""Runs over several XLA devices as one program."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from qat_lora.config import ExecutionConfig, PlaceConfig, QatRun
from qat_lora.runtime import Runtime, runtime_for
from qat_lora.train.checkpoint import load_checkpoint
from qat_lora.train.run import run_qat, run_recovery
from tests.runtime import ranks

CHUNK_TOKENS = 16  # of each device, so that the head's loop has three turns
LAYERS: dict[str, dict[str, Any]] = {
    "kept": {"gradient_checkpointing": "off"},
    "recomputed": {"gradient_checkpointing": "on"},
    "scanned": {"scan_layers": True},
}


class Stopped(Exception):
    """The run is cut off."""


class StopAt10:
    """Cuts a run off after the checkpoint of step 10."""

    every = 10

    def start(self, state): ...

    def after_step(self, state, info):
        raise Stopped

    def end(self, state): ...


def train(folder: str, stage: str, cache: str, student: str, shard: str, layers: str) -> dict[str, Any]:
    """The run of `tests.runtime.ranks.train` on all XLA devices, the head in a loop, with --max-recompiles 0."""
    runtime = runtime_for(PlaceConfig(device="tpu", dtype="fp32"), shard=shard)
    whole = started(runtime, folder, stage, cache, student, shard, layers)()
    return found_of(whole, runtime) | {
        "graphs": [[graph.phase, graph.hash] for graph in runtime.compilations()],
        "summary": json.loads((Path(folder) / "run" / "summary.json").read_text()),
    }


def resumed(folder: str, stage: str, cache: str, student: str, shard: str, layers: str) -> dict[str, Any]:
    """That run, cut off after ten steps and gone on with."""
    runtime = runtime_for(PlaceConfig(device="tpu", dtype="fp32"), shard=shard)
    run = started(runtime, folder, stage, cache, student, shard, layers)
    try:
        run(hooks=[StopAt10()])
    except Stopped:
        assert load_checkpoint(Path(folder) / "run" / "last.pt")["progress"]["step"] == 10
    else:
        raise AssertionError("it was not cut off")
    return found_of(run(launch="resume"), runtime)


def memory() -> dict[str, Any]:
    """Free bytes by torch_xla's device of all chips, on the CPU and as if these were a TPU's."""
    runtime = runtime_for(PlaceConfig(device="tpu"), shard="spmd")
    on_cpu = runtime.memory().free_bytes
    runtime._is_tpu = True
    return {"cpu": on_cpu, "tpu": runtime.memory().free_bytes}


def started(runtime: Runtime, folder: str, stage: str, cache: str, student: str, shard: str, layers: str) -> Any:
    run = ranks.settings(stage, Path(cache), Path(folder) / "run", Path(student), runtime.devices)
    execution = ExecutionConfig(max_recompiles=0, shard=shard, **LAYERS[layers])
    run = dataclasses.replace(run, execution=execution, kd=dataclasses.replace(run.kd, chunk_tokens=CHUNK_TOKENS))
    return functools.partial(run_qat if isinstance(run, QatRun) else run_recovery, run, runtime)


def found_of(result: Any, runtime: Runtime) -> dict[str, Any]:
    import torch_xla

    runtime.synchronize()
    state = result.state
    moments = [s["exp_avg"] for s in state.optimizer.state.values()]
    kept = {"trained": state.trained.values(), "moments": moments, "ema": state.ema.values()}
    specs = {
        kind: sorted({torch_xla._XLAC._get_xla_sharding_spec(x) for x in tensors}) for kind, tensors in kept.items()
    }
    return ranks.outcome(result, runtime) | {"devices": runtime.devices, "specs": specs}
