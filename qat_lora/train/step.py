"""One optimizer step, for every stage, device and number of ranks. No I/O, no host reads.

The order of acts: for each micro-batch forward, `mark_step`, backward, `mark_step`; then reduce, clip, optimizer,
schedule, moving average, zero, `mark_step`. Every micro-batch traces the same graph, and every step the same graphs:
what changes from one to the next is data, none of it a constant.
"""

from __future__ import annotations

import hashlib

import torch

from qat_lora.config import OptimConfig
from qat_lora.runtime import Runtime
from qat_lora.train.objective import Batch, KDObjective
from qat_lora.train.optim import clip_gradients, lr_at, set_lr, update_ema
from qat_lora.train.state import StepInfo, TrainState


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
