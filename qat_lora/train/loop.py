"""One loop for all stages: what a run is at one moment, one optimizer step, the hooks called between steps.

A *step* is an optimizer step, counted from 0: ``state.step`` is how many are done, so it is also the index of the next.
A *position* is a micro-batch, counted from 0 over the whole run: ``position = step * accumulation_steps``.

A step's acts: for each micro-batch forward, `mark_step`, backward, `mark_step`; then reduce, clip, optimizer, schedule,
moving average, zero, `mark_step`. It reads no value on the host. Every micro-batch traces the same graph, and every
step the same graphs: what changes from one to the next is data, none of it a constant.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qat_lora.config import LoopConfig, OptimConfig
from qat_lora.runtime import Runtime
from qat_lora.train.objective import Batch, KDObjective
from qat_lora.train.optim import clip_gradients, lr_at, set_lr, update_ema


@dataclass
class TrainState:
    """Model, optimizer and progress. Saving, resuming and evaluating are functions of this value.

    Attributes:
        model: the student; its trained parameters are float32.
        trained: name -> parameter, what the optimizer changes.
        optimizer: AdamW over `trained`, its moments in place from the start.
        seed: dropout of a micro-batch follows from it and from the micro-batch's number alone.
        step: optimizer steps done.
        ema: name -> moving average of the trained parameters; empty where there is none.
        best_kl, best_step: lowest held-out KL so far, and the step it was seen after.
        first_kl, last_kl: held-out KL before step 0 and at the latest evaluation.
        evaluated_step: steps done at the latest evaluation; -1 before any.
    """

    model: nn.Module
    trained: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    seed: int = 0
    step: int = 0
    ema: dict[str, Tensor] = field(default_factory=dict)
    best_kl: float = math.inf
    best_step: int = -1
    first_kl: float = math.nan
    last_kl: float = math.nan
    evaluated_step: int = -1


@dataclass(frozen=True)
class StepInfo:
    """What one optimizer step did.

    Attributes:
        step: steps done after it. loss, grad_norm: tensors on the device, not read yet; the norm is the one before
            clipping.
        lr: peak group's learning rate used. tokens: tokens read by this rank.
        shapes: (name, shape, dtype) of every tensor of its micro-batches, in order.
    """

    step: int
    loss: Tensor
    grad_norm: Tensor
    lr: float
    tokens: int
    shapes: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()


class Hook:
    """Something that happens before the first step, every so often, and after the last; what it leaves out is nothing.

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


def train_step(
    state: TrainState, micro_batches: list[Batch], objective: KDObjective, optim: OptimConfig, runtime: Runtime
) -> StepInfo:
    """Advance the state by one optimizer step over the micro-batches (on the device) and say what it did."""
    first_position = state.step * len(micro_batches)
    loss = accumulate_gradients(state, micro_batches, objective, runtime, first_position=first_position)
    runtime.reduce_gradients(state.optimizer)
    grad_norm = clip_gradients(state.trained.values(), optim.clip_norm, runtime)
    lr = lr_at(state.step, objective.total_steps, optim)
    set_lr(state.optimizer, lr, runtime)
    state.optimizer.step()
    update_ema(state.ema, state.trained, optim.ema_decay)
    runtime.zero_grad(state.optimizer)
    runtime.mark_step("optimizer")
    state.step += 1
    tokens = sum(batch["input_ids"].numel() for batch in micro_batches)
    shapes = tuple((name, tuple(x.shape), x.dtype) for batch in micro_batches for name, x in batch.items())
    return StepInfo(state.step, loss, grad_norm, lr, tokens, shapes)


def accumulate_gradients(
    state: TrainState, micro_batches: list[Batch], objective: KDObjective, runtime: Runtime, *, first_position: int
) -> torch.Tensor:
    """Add the gradient of the mean loss over all micro-batches and ranks to `.grad`; return the loss, a 0-d tensor.

    The losses are sums divided by global counts, and `reduce_gradients` takes the mean over ranks: hence the factor
    `world_size`.
    """
    counts = objective.counts(micro_batches, position=first_position)
    total = torch.zeros((), device=runtime.device)
    runtime.mark_step("counts")
    for index, batch in enumerate(micro_batches):
        runtime.seed(_seed_of((first_position + index) * runtime.world_size + runtime.rank, state.seed))
        for term in objective.losses(state.model, batch, counts, step=state.step, position=first_position + index):
            total = total + term.loss.detach()
            runtime.mark_step("anchor forward" if term.anchor else "forward")
            (term.loss * runtime.world_size).backward()
            runtime.mark_step("anchor backward" if term.anchor else "backward")
        runtime.mark_step("micro-batch")
    return runtime.all_reduce_sum(total)


def _seed_of(micro_batch: int, seed: int) -> int:
    """A seed of 32 bits for a micro-batch, by its number among those of all ranks."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {micro_batch}".encode(), digest_size=4).digest(), "little")
