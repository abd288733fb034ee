"""AdamW, its schedule as a pure function of the step, clipping, and the moving average of the weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qat_lora.config import OptimConfig
from qat_lora.models.lean.static_graph import is_static
from qat_lora.runtime import Runtime


def build_optimizer(
    weights: Iterable[nn.Parameter], scales: Iterable[nn.Parameter], optim: OptimConfig
) -> torch.optim.AdamW:
    """AdamW with one group for weights and one, slower and never decayed, for scales, offsets and LUTs.

    The moments exist before the first step, so that a compiled graph is the same at every step. There the learning
    rate and the step counts are tensors on the device as well: XLA takes Python numbers of equal value for one input,
    so a number that changes is another graph whenever it meets the value of another (bias correction and 1 - beta1 are
    both 0.1 at the first step), and 0 and 1 are constants.
    """
    groups: list[dict[str, Any]] = [
        {"params": list(weights), "lr_ratio": 1.0, "weight_decay": optim.weight_decay},
        {"params": list(scales), "lr_ratio": optim.scale_lr_ratio, "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    first: Tensor = groups[0]["params"][0]
    fused, capturable = first.device.type in ("cpu", "cuda"), is_static(first)
    lr = torch.tensor(optim.lr, device=first.device) if capturable else optim.lr
    optimizer = torch.optim.AdamW(
        groups, lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=fused or None, capturable=capturable
    )
    for group in optimizer.param_groups:
        for p in group["params"]:
            step_device = p.device if fused or capturable else torch.device("cpu")
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=step_device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
    return optimizer


def lr_at(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Learning rate of step `step`: linear warm-up from lr / warmup_steps, then a cosine down to min_lr_ratio * lr.

    Never 0, for which AdamW on a lazy device would divide 0 by 0.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    span = max(1, total_steps - optim.warmup_steps)
    share = min(1.0, (step - optim.warmup_steps) / span)
    floor = optim.min_lr_ratio
    return optim.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * share)))


def set_lr(optimizer: torch.optim.Optimizer, lr: float, runtime: Runtime) -> None:
    """Set every group's learning rate to its share of `lr`, a tensor where it was one."""
    for group in optimizer.param_groups:
        share = lr * group["lr_ratio"]
        group["lr"] = runtime.scalar(share) if isinstance(group["lr"], Tensor) else share


def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float, runtime: Runtime) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `clip_norm` (0: leave them); return the norm before."""
    bound = clip_norm if clip_norm > 0 else math.inf
    trained = list(parameters)
    norm = runtime.joint_norm([p.grad for p in trained if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(trained, bound, norm)
    return norm


@torch.no_grad()
def update_ema(ema: Mapping[str, Tensor], trained: Mapping[str, nn.Parameter], decay: float) -> None:
    """Ema <- decay * ema + (1 - decay) * weight, in place."""
    for name, average in ema.items():
        average.lerp_(trained[name].detach(), 1.0 - decay)


@contextlib.contextmanager
def swapped_in(ema: Mapping[str, Tensor], trained: Mapping[str, nn.Parameter], runtime: Runtime) -> Iterator[None]:
    """Let the trained parameters hold their moving averages within the block; nothing where there are none."""
    _swap(ema, trained)
    try:
        runtime.mark_step("set-up")  # a pending swap would become part of the block's graph, and of the next step's
        yield
    finally:
        _swap(ema, trained)
        runtime.mark_step("set-up")


def averages_of(trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The moving averages that a run begins with: copies of the weights."""
    return {name: _copied(p) for name, p in trained.items()}


@torch.no_grad()
def _swap(ema: Mapping[str, Tensor], trained: Mapping[str, nn.Parameter]) -> None:
    for name, average in ema.items():
        held = _copied(trained[name])
        trained[name].copy_(_copied(average))
        average.copy_(held)


def _copied(x: Tensor) -> Tensor:
    """A copy in memory of its own. On XLA a clone shares the buffer, which an update in place then takes away."""
    return x.detach() * 1
