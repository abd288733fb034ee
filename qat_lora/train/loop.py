"""The loop: take batches, step, call hooks. Everything periodic is a hook."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from qat_lora.config import LoopConfig, OptimConfig
from qat_lora.runtime import Runtime
from qat_lora.train.objective import Batch, KDObjective
from qat_lora.train.state import StepInfo, TrainState
from qat_lora.train.step import train_step


class Hook(Protocol):
    """Something that happens every so often.

    Attributes:
        every: called after each step whose number (steps done) it divides; 0: never between start and end.
    """

    every: int

    def start(self, state: TrainState) -> None:
        """Before the first step of this launch."""

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """After a step that `every` divides."""

    def end(self, state: TrainState) -> None:
        """After the last step."""


def train(
    state: TrainState,
    batches: Iterator[Batch],
    objective: KDObjective,
    *,
    loop: LoopConfig,
    optim: OptimConfig,
    runtime: Runtime,
    hooks: Sequence[Hook],
) -> None:
    """Train until `loop.max_steps` steps are done. `batches` yields micro-batches from the state's position on."""
    # before the first evaluation, so that it finds all tensors as later ones do: changed in place, and beside gradients
    runtime.zero_grad(state.optimizer)
    runtime.mark_step("set-up")
    for hook in hooks:
        hook.start(state)
    state.model.train()
    with contextlib.closing(runtime.wrap_loader(batches)) as on_device:
        while state.step < loop.max_steps:
            micro_batches = [next(on_device) for _ in range(loop.accumulation_steps)]
            info = train_step(state, micro_batches, objective, optim, runtime)
            for hook in hooks:
                if hook.every and info.step % hook.every == 0:
                    hook.after_step(state, info)
    runtime.barrier("before_final_save")
    for hook in hooks:
        hook.end(state)
