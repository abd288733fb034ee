"""What a run is at one moment.

A *step* is an optimizer step, counted from 0: ``state.step`` is how many are done, so it is also the index of the next.
A *position* is a micro-batch, counted from 0 over the whole run: ``position = step * accumulation_steps``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


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
