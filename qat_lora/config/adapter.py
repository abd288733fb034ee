"""Where recovery LoRA goes and how large it is."""

from __future__ import annotations

from dataclasses import dataclass

from qat_lora.errors import ConfigError
from qat_lora.settings import Settings, setting


@dataclass(frozen=True)
class AdapterConfig(Settings):
    """Where recovery LoRA goes and how large it is (the placement of Apple's quality-recovery adapters)."""

    recovery_r: int = setting(8, "rank of the adapters", "--rank", at_least=1)
    recovery_alpha: float = setting(16.0, "LoRA alpha; the update is scaled by alpha / r", "--alpha", above=0)
    recovery_dropout: float = setting(0.0, "dropout before the adapters", "--dropout", below=1)
    include_k_proj: bool = setting(False, "adapt k_proj too")
    mlp_only: bool = setting(False, "adapt the MLP alone")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mlp_only and self.include_k_proj:
            raise ConfigError("include_k_proj=True adapts attention but mlp_only=True forbids it; drop one of them.")
