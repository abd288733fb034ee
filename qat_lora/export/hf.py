"""Ordinary transformers folders: the student with its rounding carried out, or with its adapters folded in."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from qat_lora import adapters, models
from qat_lora.quant import to_dense

ADAPTER_FOLDER = "adapter"  # where adapters lie inside the folder of the model that they belong on


def export_dequantized(student: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the rounded weights in float32, bit for bit, without adapters; the student is left as it is."""
    base = copy.deepcopy(student)
    if adapters.has_adapters(base):
        base = adapters.without(base)
    to_dense(base)
    models.save_pretrained(base, tokenizer, folder)


def export_merged(student: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write W + (alpha / r) * B A in float32: one dense model, equal to the student up to the rounding of that sum."""
    whole = copy.deepcopy(student)
    to_dense(whole)
    models.save_pretrained(adapters.merged(whole), tokenizer, folder)
