"""AdamW, its schedule and its clipping."""

from __future__ import annotations

from dataclasses import dataclass

from qat_lora.settings import check_range, setting


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its schedule and its clipping."""

    lr: float = setting(1e-3, "peak learning rate", "--learning-rate")
    scale_lr_ratio: float = setting(0.1, "learning rate of scales, offsets and LUTs, as a share of --lr")
    weight_decay: float = setting(0.0, "decoupled weight decay")
    beta1: float = setting(0.9, "AdamW beta1")
    beta2: float = setting(0.99, "AdamW beta2")
    eps: float = setting(1e-8, "AdamW epsilon")
    warmup_steps: int = setting(20, "optimizer steps of linear warm-up, from lr / warmup_steps upwards")
    min_lr_ratio: float = setting(0.05, "learning rate at the end of the cosine, as a share of --lr")
    clip_norm: float = setting(1.0, "largest norm of the whole gradient; 0 turns clipping off")
    ema_decay: float = setting(0.0, "decay per step of a moving average of the trained tensors; 0 turns it off")

    def __post_init__(self) -> None:
        for name in ("lr", "scale_lr_ratio", "eps"):  # to freeze the scales is another setting: what is trained
            check_range(self, name, above=0.0)
        for name in ("weight_decay", "clip_norm", "warmup_steps"):
            check_range(self, name, at_least=0.0)
        for name in ("beta1", "beta2", "ema_decay"):
            check_range(self, name, at_least=0.0, below=1.0)
        check_range(self, "min_lr_ratio", at_least=0.0, at_most=1.0)
