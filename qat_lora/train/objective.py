"""What a step minimises: distillation against the cache, and whatever is mixed into it.

Legend: B rows, T positions, S = B * T flattened positions, K cached candidates, V vocabulary, H hidden.

Every term is a sum over counted positions divided by one global count (over micro-batches and ranks), so that neither
accumulation nor ranks nor padding can change a gradient. The counts depend on the batches alone, hence are known before
the first forward; each chunk of the head can then be weighed, and its gradient taken, as soon as its logits exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from qat_lora import models
from qat_lora.config import KDConfig
from qat_lora.errors import ConfigError
from qat_lora.kd import (
    TargetSpec,
    chunked_head_loss,
    counted_masks,
    distillation,
    hard_top1,
    next_token_ce,
    next_tokens,
    targets,
)
from qat_lora.runtime import Runtime

Batch = dict[str, Tensor]
PLAIN = KDConfig()  # KL at T = 1 on all positions, which is what holds a model near its start


@dataclass(frozen=True)
class Counts:
    """Positions that a step counts, over all its micro-batches and ranks, as float32 scalars of at least 1.

    Attributes:
        positions: with a cached target. labels: with a next token. anchors: of anchor rows.
    """

    positions: Tensor
    labels: Tensor
    anchors: Tensor


@dataclass(frozen=True)
class Term:
    """One scalar to run backward on, and whether it is the anchor's."""

    loss: Tensor
    anchor: bool


@dataclass(frozen=True)
class Anchor:
    """Fixed rows and the starting model's own distribution on them, in the form of the cache.

    The batch is on the device.
    """

    batch: Batch
    spec: TargetSpec

    def rows(self, position: int, size: int, runtime: Runtime) -> Batch:
        """The `size` rows of a micro-batch, taken in turn over positions and ranks, so that every row has its share."""
        total = self.batch["input_ids"].shape[0]
        first = (position * runtime.world_size + runtime.rank) * size
        # data on the device without a copy that the host waits for
        pick = (torch.arange(size, device=runtime.device) + runtime.scalar(first % total).long()) % total
        return {name: x.index_select(0, pick) for name, x in self.batch.items()}


@dataclass(frozen=True)
class KDObjective:
    """(1 - alpha) * (KD + w_hard * CE to the teacher's top-1) + alpha * next-token CE + w_anchor * KL to the start.

    KD is T^2 * KL(teacher_T || student_T), the teacher as the cache has it (see `qat_lora.kd.distillation`). `spec` is
    what the batches hold.
    """

    kd: KDConfig
    spec: TargetSpec
    runtime: Runtime
    total_steps: int
    anchor: Anchor | None = None

    def counts(self, batches: list[Batch], *, position: int) -> Counts:
        """Global counts of one optimizer step whose first micro-batch is `position`, without a host read."""
        masks = [counted_masks(b, answers_only=self.kd.loss_on == "answers") for b in batches]
        positions, labels = (torch.stack([mask.sum() for mask in kind]).sum() for kind in zip(*masks, strict=True))
        anchors = torch.zeros_like(positions)
        if self.anchor is not None:
            parts = [self._anchor_rows(b, position + i) for i, b in enumerate(batches)]
            anchors = torch.stack([counted_masks(part)[0].sum() for part in parts]).sum()
        local = torch.stack([positions, labels, anchors]).float()
        return Counts(*self.runtime.all_reduce_sum(local).clamp(min=1.0).unbind())

    def losses(self, model: nn.Module, batch: Batch, counts: Counts, *, step: int, position: int) -> Iterator[Term]:
        """Yield the scalars to run backward on, one after the other, so that only one graph is alive at a time."""
        yield Term(self._loss(model, batch, self.kd, self.spec, counts, step), anchor=False)
        if self.anchor is not None:
            part, of_anchors = self._anchor_rows(batch, position), replace(counts, positions=counts.anchors)
            kl = self._loss(model, part, PLAIN, self.anchor.spec, of_anchors, step)
            yield Term(self.kd.anchor_kl_weight * kl, anchor=True)

    def hard_weight_at(self, step: int) -> float:
        """Weight of the hard top-1 term, annealed to 0 over the run where that is asked for."""
        share = min(1.0, step / self.total_steps)
        factor = {"none": 1.0, "linear": 1.0 - share, "cosine": 0.5 * (1.0 + math.cos(math.pi * share))}
        return self.kd.hard_weight * factor[self.kd.hard_anneal]

    def _anchor_rows(self, batch: Batch, position: int) -> Batch:
        assert self.anchor is not None
        return self.anchor.rows(position, batch["input_ids"].shape[0], self.runtime)

    def _loss(
        self, model: nn.Module, batch: Batch, kd: KDConfig, spec: TargetSpec, counts: Counts, step: int
    ) -> Tensor:
        """The loss that `kd` says of a batch whose fields `spec` describes, this micro-batch's share of the step's."""
        target = targets(batch, kd.temperature, spec, top_k=kd.top_k or None)
        mask_S, label_mask_S = (mask.flatten() for mask in counted_masks(batch, answers_only=kd.loss_on == "answers"))
        labels_S = next_tokens(batch["input_ids"]).flatten()
        kind, alpha = type(target), kd.ce_alpha
        candidates = spec.top_k if spec.tail_draws else None  # draws of the tail come after them

        def chunk_loss(logits_CV: Tensor, *given: Tensor, picked: Tensor | None = None) -> Tensor:
            *of_teacher, mask_C, labels_C, label_mask_C, hard_weight, positions, labels = given
            part = kind(*of_teacher)
            picked_CK = None if picked is None else picked[:, : part[0].shape[1]]
            loss = distillation(
                logits_CV, part, mask_C, temperature=kd.temperature, support=kd.support, picked=picked_CK
            ).total
            if kd.hard_weight:
                ids_CK, scores_CK = (x[:, :candidates] for x in part[:2])
                of_candidates = None if picked_CK is None else picked_CK[:, :candidates]
                hard = hard_top1(logits_CV, ids_CK, scores_CK, mask_C, picked_SK=of_candidates)
                loss = loss + hard_weight * hard.total
            loss = loss / positions
            if alpha:
                picked_C = None if picked is None else picked[:, -1]
                ce = next_token_ce(logits_CV, labels_C, label_mask_C, picked_S=picked_C).total
                loss = (1.0 - alpha) * loss + alpha * ce / labels
            return loss

        picked_ids_SJ = torch.cat([target[0], labels_S[:, None]], dim=1) if alpha else target[0]
        hidden_SH, head = models.hidden_and_head(
            model, batch["input_ids"], self.runtime, position_ids_BT=batch.get("position_ids")
        )
        return chunked_head_loss(
            hidden_SH,
            head,
            chunk_loss,
            (*target, mask_S, labels_S, label_mask_S),
            chunk_tokens=self.kd.chunk_tokens,
            constants=(self.runtime.scalar(self.hard_weight_at(step)), counts.positions, counts.labels),
            picked_ids_SJ=picked_ids_SJ if self.runtime.static_graph and spec.store != "full" else None,
            loop=self.runtime.loop,
        )


def check_serves(spec: TargetSpec, kd: KDConfig, *, has_answers: bool) -> None:
    """Raise ConfigError where the loss needs the most probable tokens or the answers, and the cache lacks them."""
    if kd.loss_on == "answers" and not has_answers:
        raise ConfigError(
            "loss_on='answers' needs to know which tokens an assistant wrote, which this cache does not tell; build it "
            "from chats (alpaca, sharegpt or messages) with this version, or use --loss-on all."
        )
    if spec.tail_draws and kd.support != "full":
        raise ConfigError(
            f"support={kd.support!r} leaves out the tail, from which the cache has tail_draws={spec.tail_draws}; use "
            "support='full', or build a cache without --tail-draws."
        )
    if spec.store != "sampled":
        return
    if kd.hard_weight:
        raise ConfigError(
            f"hard_weight={kd.hard_weight} needs the teacher's most probable token, which a cache with store='sampled' "
            "does not tell; set hard_weight to 0 or build a cache with --store topk."
        )
    if kd.support != "full":
        raise ConfigError(
            f"support={kd.support!r} needs the teacher's most probable tokens, which a cache with store='sampled' does "
            "not tell; use support='full', or build a cache with --store topk."
        )
