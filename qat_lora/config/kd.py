"""What the student is asked to match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qat_lora.settings import Settings, setting

Packing = Literal["stream", "documents", "pad"]
Support = Literal["full", "candidates"]
Store = Literal["topk", "sampled", "full"]
Anneal = Literal["none", "linear", "cosine"]
LossOn = Literal["all", "answers"]


@dataclass(frozen=True)
class KDConfig(Settings):
    """What the student is asked to match, and how much each part weighs."""

    temperature: float = setting(
        1.0, "softmax temperature of the distillation loss; the loss is scaled by T^2", above=0
    )
    support: Support = setting(
        "full", "normalise the student over the full vocabulary, or over the cached candidates alone (biased)"
    )
    hard_weight: float = setting(0.0, "weight of cross entropy against the teacher's most probable token")
    hard_anneal: Anneal = setting("none", "how the hard weight falls to 0 over the run")
    ce_alpha: float = setting(0.0, "share of next-token cross entropy: (1 - alpha) * KD + alpha * CE", at_most=1)
    loss_on: LossOn = setting(
        "all", "answers: count only predictions of tokens that an assistant wrote, for a cache of chats; all: every one"
    )
    anchor_kl_weight: float = setting(0.0, "weight of the KL to the model's own start on fixed anchor rows")
    anchor_samples: int = setting(32, "how many anchor rows", at_least=1)
    chunk_tokens: int = setting(256, "tokens whose logits exist at once in the loss", at_least=1)
    seq_len: int = setting(0, "tokens per row that the cache must have; 0 takes what it has")
    top_k: int = setting(0, "cached candidates to use per position; 0 uses all that are stored")
