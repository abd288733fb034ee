"""An export is accepted only if the model read back from disk computes what the student computes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from qat_lora import adapters, models
from qat_lora.errors import ExportMismatch

# W + BA is rounded to float32 once where x W + x A B is rounded three times; a logit of a 30-layer model then moves
# by some 1e-5 of the largest. A wrong scale, a lost adapter or a bf16 save is off by 1e-2 and more.
MERGE_TOLERANCE = 1e-4


@torch.no_grad()
def probe_logits(model: nn.Module, ids_BT: Tensor) -> Tensor:
    """Logits [B, T, V] in float32 through the model's own forward; for small probes."""
    was_training = model.training
    model.eval()
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits.float()
    model.train(was_training)
    return logits_BTV


def probe_ids(vocab_size: int, *, rows: int = 2, row_length: int = 32) -> Tensor:
    """Ids spread over the whole vocabulary, the same every time: [rows, row_length]."""
    step = round(vocab_size * 0.6180339887)  # the golden ratio leaves gaps of about one size, whatever the vocabulary
    return (torch.arange(rows * row_length) * step % vocab_size).view(rows, row_length)


def verify_export(student: nn.Module, folder: Path, *, adapter: Path | None = None, exact: bool) -> float:
    """Reload a transformers folder with plain transformers (and plain peft) and compare logits with the student's.

    Returns the largest difference, 0.0 where `exact`; raises ExportMismatch where the two do not agree.
    """
    reloaded: nn.Module = models.load(str(folder)).model
    if adapter is not None:
        reloaded = adapters.load(reloaded, adapter)
    ids_BT = probe_ids(models.causal_lm(student).config.get_text_config().vocab_size)
    ours, theirs = probe_logits(student, ids_BT), probe_logits(reloaded, ids_BT)
    difference = (ours - theirs).abs().max().item()
    allowed = 0.0 if exact else MERGE_TOLERANCE * ours.abs().max().item()
    if not difference <= allowed:
        raise ExportMismatch(
            f"the model reloaded from {folder} differs from the student by {difference:.3g} in a logit, {allowed:.3g} "
            "is allowed; do not use it, and report the model and the scheme."
        )
    return difference
