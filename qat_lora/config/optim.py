"""AdamW, its schedule and its clipping."""

from __future__ import annotations

from dataclasses import dataclass

from qat_lora.settings import Settings, setting


@dataclass(frozen=True)
class OptimConfig(Settings):
    """AdamW, its schedule and its clipping."""

    lr: float = setting(1e-3, "peak learning rate", "--learning-rate", above=0)
    scale_lr_ratio: float = setting(0.1, "learning rate of scales, offsets and LUTs, as a share of --lr", above=0)
    weight_decay: float = setting(0.0, "decoupled weight decay")
    beta1: float = setting(0.9, "AdamW beta1", below=1)
    beta2: float = setting(0.99, "AdamW beta2", below=1)
    eps: float = setting(1e-8, "AdamW epsilon", above=0)
    warmup_steps: int = setting(20, "optimizer steps of linear warm-up, from lr / warmup_steps upwards")
    min_lr_ratio: float = setting(0.05, "learning rate at the end of the cosine, as a share of --lr", at_most=1)
    clip_norm: float = setting(1.0, "largest norm of the whole gradient; 0 turns clipping off")
    ema_decay: float = setting(
        0.0, "decay per step of a moving average of the trained tensors; 0 turns it off", below=1
    )
