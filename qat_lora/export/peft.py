"""Adapters alone, in peft's own format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from qat_lora import adapters
from qat_lora.errors import ConfigError


def export_adapter(student: nn.Module, folder: Path, *, base_name: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors; `base_name` is the dequantised model they belong on."""
    if not adapters.has_adapters(student):
        raise ConfigError("the checkpoint holds no adapters; give one of `qat-lora recover`, or export dequantized.")
    whole: Any = student
    adapters.save(whole, folder, base_name=base_name)
