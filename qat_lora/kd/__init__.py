"""Knowledge distillation: losses, targets, draws and the head taken chunk by chunk; no files."""

from qat_lora.kd.head import chunked_head_loss
from qat_lora.kd.losses import (
    LossSum,
    SampledTarget,
    SparseTarget,
    Target,
    distillation,
    hard_top1,
    kd_soft_ce,
    next_token_ce,
    sampled_kl,
    soft_ce,
    sparse_kl,
)  # fmt: skip
from qat_lora.kd.targets import TargetSpec, counted_masks, label_mask, next_tokens, position_mask, targets
from qat_lora.models import Head

__all__ = [
    "Head", "LossSum", "SampledTarget", "SparseTarget", "Target", "TargetSpec", "chunked_head_loss", "counted_masks",
    "distillation", "hard_top1", "kd_soft_ce", "label_mask", "next_token_ce", "next_tokens", "position_mask",
    "sampled_kl", "soft_ce", "sparse_kl", "targets",
]  # fmt: skip
