"""Held-out KL against the cache: what a run watches while it trains, no teacher needed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from qat_lora import models
from qat_lora.errors import DataError
from qat_lora.kd import Target, TargetSpec, chunked_head_loss, counted_masks, distillation, targets
from qat_lora.runtime import Runtime


@torch.no_grad()
def cached_kl(
    model: nn.Module,
    batches: Iterable[dict[str, Tensor]],
    spec: TargetSpec,
    *,
    runtime: Runtime,
    chunk_tokens: int,
    answers_only: bool = False,
) -> float:
    """Mean KL(teacher || student) in nats per token at T = 1, over all positions or those that predict an answer.

    With candidates, the teacher's tail is one bucket: a lower bound of the full KL, equal to it where the cache holds
    the whole vocabulary. With draws, an estimate without bias. Leaves the model's mode as it was and uses no random
    numbers.
    """
    was_training = model.training
    model.eval()
    total, count = torch.zeros((), device=runtime.device), torch.zeros((), device=runtime.device)
    runtime.mark_step("set-up")  # the sums are data from here on, so that the first batch is like the others
    for batch in runtime.wrap_loader(batches):
        target = targets(batch, 1.0, spec)
        mask_S = counted_masks(batch, answers_only=answers_only)[0].flatten()
        hidden_SH, head = models.hidden_and_head(
            model, batch["input_ids"], runtime, position_ids_BT=batch.get("position_ids"), dtype=torch.float32
        )
        total = total + chunked_head_loss(
            hidden_SH,
            head,
            functools.partial(_chunk_kl, kind=type(target)),
            (*target, mask_S),
            chunk_tokens=chunk_tokens,
            picked_ids_SJ=target[0] if runtime.static_graph and spec.store != "full" else None,
            loop=runtime.loop,
        )
        count = count + mask_S.sum()
        runtime.mark_step("evaluation")
    model.train(was_training)
    sums = runtime.all_reduce_sum(torch.stack([total, count]))
    mean = sums[0] / sums[1]
    runtime.mark_step("evaluation")  # a sum over ranks runs at a cut, which all of them come to
    value = mean.item()
    if math.isnan(value) and not sums[1].item():
        what = "predictions of an answer" if answers_only else "predictions"
        raise DataError(
            f"the evaluated held-out rows hold no {what}, so there is no held-out KL; raise --eval-rows, or build the "
            "cache with a larger --eval-fraction."
        )
    return value


def _chunk_kl(logits_CV: Tensor, *given: Tensor, kind: type[Target], picked: Tensor | None = None) -> Tensor:
    *of_teacher, mask_C = given
    return distillation(logits_CV, kind(*of_teacher), mask_C, temperature=1.0, picked=picked).total
