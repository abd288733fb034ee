"""Anchor rows: the starting model's predictions on a few fixed rows, computed once, to hold the model near them."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from qat_lora import models
from qat_lora.cache import KDCacheDataset
from qat_lora.config import QatRun, RecoveryRun
from qat_lora.kd import TargetSpec
from qat_lora.kd.reduce import topk_rows
from qat_lora.runtime import Runtime
from qat_lora.train.checkpoint import load_tensors
from qat_lora.train.objective import Anchor, Batch

ANCHOR_TOP_K = 64
log = logging.getLogger(__name__)


def anchor_of(
    model: nn.Module, rows: KDCacheDataset, run: QatRun | RecoveryRun, runtime: Runtime, *, is_resumed: bool
) -> Anchor | None:
    """The run's anchor rows if it has any, of the model that it began with: a resumed run reads what that wrote."""
    kd, path = run.kd, run.output / "anchor.pt"
    if not kd.anchor_kl_weight:
        return None
    if is_resumed:
        return Anchor(runtime.to_device(load_tensors(path)), anchor_spec(rows.manifest.target_spec))
    log.info("computing the anchor rows' targets")
    size = run.loop.batch_size * runtime.devices
    anchor = build_anchor(
        model, rows, samples=kd.anchor_samples, batch_size=size, chunk_tokens=kd.chunk_tokens, runtime=runtime
    )
    runtime.save(anchor.batch, path)
    return anchor


def anchor_spec(spec: TargetSpec) -> TargetSpec:
    """What the anchor rows' fields are: candidates at T = 1 in float32, as many as the cache's where it has some."""
    return TargetSpec("topk", spec.vocab_size, top_k=spec.top_k or min(ANCHOR_TOP_K, spec.vocab_size))


@torch.no_grad()
def build_anchor(
    model: nn.Module, dataset: KDCacheDataset, *, samples: int, batch_size: int, chunk_tokens: int, runtime: Runtime
) -> Anchor:
    """Take the first rows of the data set's split and the model's top-k distribution at T = 1 on them.

    The targets have the cache's k and its fields, in float32, so that the anchor term is the cache's loss with
    another teacher.
    """
    was_training = model.training
    model.eval()
    spec = anchor_spec(dataset.manifest.target_spec)
    parts: list[dict[str, Tensor]] = []
    for begin in range(0, min(samples, len(dataset)), batch_size):
        rows = [dataset[row] for row in range(begin, min(begin + batch_size, samples, len(dataset)))]
        names = [name for name in ("input_ids", "length", "position_ids") if name in rows[0]]
        batch = runtime.to_device({name: torch.stack([r[name] for r in rows]) for name in names})
        parts.append(batch | _targets(model, batch, min(spec.top_k, dataset.vocab_size), chunk_tokens, runtime))
        runtime.mark_step("anchor rows")
    model.train(was_training)
    return Anchor({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, spec)


def _targets(model: nn.Module, batch: Batch, top_k: int, chunk_tokens: int, runtime: Runtime) -> dict[str, Tensor]:
    ids_BT = batch["input_ids"]
    hidden_SH, head = models.hidden_and_head(model, ids_BT, runtime, position_ids_BT=batch.get("position_ids"))
    chunks = [topk_rows(head(part_CH), top_k, (1.0,)) for part_CH in hidden_SH.split(chunk_tokens)]
    return {name: torch.cat([chunk[name] for chunk in chunks]).unflatten(0, ids_BT.shape) for name in chunks[0]}
