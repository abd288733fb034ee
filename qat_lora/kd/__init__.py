"""Knowledge distillation: the cache of the teacher's next-token distributions, and the losses against it."""

from qat_lora.kd.format import CacheManifest, ShardRecord
from qat_lora.kd.head import Head, chunked_head_loss
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
)
from qat_lora.kd.older import convert_older, is_older
from qat_lora.kd.operations import convert, merge, split_parts, split_rows
from qat_lora.kd.parts import Part, load_manifest
from qat_lora.kd.reader import KDCacheDataset
from qat_lora.kd.soundness import verify
from qat_lora.kd.summary import CacheSummary, summarise
from qat_lora.kd.targets import label_mask, next_tokens, position_mask, targets
from qat_lora.kd.teacher import build_cache, topk_rows
from qat_lora.kd.vocabulary import differ_in_padding
from qat_lora.kd.writer import CacheWriter

__all__ = [
    "CacheManifest",
    "CacheSummary",
    "CacheWriter",
    "Head",
    "KDCacheDataset",
    "LossSum",
    "Part",
    "SampledTarget",
    "ShardRecord",
    "SparseTarget",
    "Target",
    "build_cache",
    "chunked_head_loss",
    "convert",
    "convert_older",
    "differ_in_padding",
    "distillation",
    "hard_top1",
    "is_older",
    "kd_soft_ce",
    "label_mask",
    "load_manifest",
    "merge",
    "next_tokens",
    "next_token_ce",
    "position_mask",
    "sampled_kl",
    "soft_ce",
    "sparse_kl",
    "split_parts",
    "split_rows",
    "summarise",
    "targets",
    "topk_rows",
    "verify",
]
