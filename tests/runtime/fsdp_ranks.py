"""Programs of ranks that share one model (see `tests.runtime.forked`); the first argument is a folder of the job."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from qat_lora.config import ExecutionConfig, PlaceConfig, QatRun
from qat_lora.errors import CheckpointError, TrainingError
from qat_lora.runtime import Runtime, runtime_for
from qat_lora.train.hooks import CheckpointHook
from qat_lora.train.loop import TrainState
from qat_lora.train.run import run_qat, run_recovery
from qat_lora.train.speed import SpeedHook
from tests.runtime.ranks import KillAt7, outcome, settings


def train(folder: str, stage: str, cache: str, student: str, launch: str, checkpointing: str) -> dict:
    """A whole run, or the rest of one; with `launch` killed, rank 1 is killed after step 7, two after a checkpoint."""

    runtime = _runtime()
    run = settings(stage, Path(cache), Path(folder) / "run", Path(student), runtime.world_size)
    run = dataclasses.replace(run, execution=ExecutionConfig(shard="fsdp", gradient_checkpointing=checkpointing))
    go = run_qat if isinstance(run, QatRun) else run_recovery
    if launch == "killed":
        go(run, runtime, hooks=[KillAt7()])
        raise AssertionError("the run outlived its rank")
    result = go(run, runtime, launch=launch)
    state = result.state
    moments = [x for of_one in state.optimizer.state.values() for name, x in of_one.items() if name != "step"]
    return outcome(result, runtime) | {
        "bytes": {
            name: [sum(map(_held, xs)), sum(4 * x.numel() for x in xs)]
            for name, xs in (("trained", state.trained.values()), ("moments", moments), ("ema", state.ema.values()))
        },
        "elsewhere": sum(p.numel() for p in state.model.parameters() if not isinstance(p, DTensor)),
    }


def disagreeing(folder: str, cache: str, student: str, other: str) -> dict:
    """Each rank of two begins from a student of its own."""
    runtime = _runtime()
    run = settings("qat", Path(cache), Path(folder) / "run", Path(student), runtime.world_size, max_steps=1)
    try:
        run_qat(dataclasses.replace(run, checkpoint=other if runtime.rank else student), runtime)
    except CheckpointError as error:
        return {"error": str(error)}
    return {"error": ""}


class Blocks(nn.Module):
    """A trunk of two layers of 3 outputs each, a frozen embedding, and a trained gain beside the layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 5).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(5))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5)) for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids) * self.gain
        for layer in self.layers:
            x = x + layer(x)
        return x * 1


def pieces(folder: str) -> dict:
    """The runtime by itself: what it cuts up and puts together, norms, gradients, and what lies outside any layer."""
    runtime = _runtime()
    model = Blocks()
    wholes = {name: p.detach().clone() for name, p in model.named_parameters()}
    outside = nn.Parameter(torch.ones(2))
    runtime.place(model)
    optimizer = torch.optim.SGD([*(p for p in model.parameters() if p.requires_grad), outside], foreach=False)
    for shift in (0, 2):
        (model(torch.tensor([1, (runtime.rank + shift) % 7])).square().sum() + runtime.rank * outside.sum()).backward()
    reduced = runtime.reduced_bytes
    runtime.reduce_gradients(optimizer)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = {
        "norm": runtime.joint_norm([*(p.grad for p in trained.values()), outside.grad]).item(),
        "grads": {name: runtime.gather(p.grad).tolist() for name, p in trained.items()} | {"": outside.grad.tolist()},
        "round trip": all(
            torch.equal(runtime.gather(runtime.scatter_like(wholes[name], p)), wholes[name])
            and torch.equal(runtime.scatter_like(wholes[name], p), p.detach())
            and runtime.scatter_like(wholes[name], p).device == p.device
            for name, p in model.named_parameters()
        ),
        "whole": isinstance(model.embedding.weight, DTensor),
        "held": {name: _held(p) // 4 for name, p in trained.items()},
        "reduced_bytes": [reduced, runtime.reduced_bytes],
    }
    if runtime.rank == 1:  # a weight that is no number, in a part that the others do not hold
        next(iter(trained.values())).detach().to_local().view(-1)[0] = torch.nan
    hook = CheckpointHook(lambda state: None, SpeedHook(runtime), runtime, every=1)
    try:
        hook.start(TrainState(model, trained, optimizer))
        found["told"] = False
    except TrainingError:
        found["told"] = True
    runtime.barrier("end")  # as a run does: nobody leaves while others put together
    return found


def _runtime() -> Runtime:
    return runtime_for(PlaceConfig(device="cpu", barrier_timeout=60), shard="fsdp", many=True)


def _held(x: torch.Tensor) -> int:
    """Bytes of memory behind what this rank holds of a tensor."""
    return (x.to_local() if isinstance(x, DTensor) else x).untyped_storage().nbytes()
