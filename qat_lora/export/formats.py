"""The folders of an export.

A student without adapters is one ordinary transformers folder. With adapters it is two folders, ``base`` and
``adapter``: there is no model at the top that a loader without peft could take for the student.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from qat_lora import adapters, models
from qat_lora.errors import ConfigError
from qat_lora.export.card import Facts, write_card
from qat_lora.export.verify import verify_export
from qat_lora.quant import to_dense

BASE_FOLDER, ADAPTER_FOLDER = "base", "adapter"


def write_export(student: nn.Module, tokenizer: Any, folder: Path, *, format: str, facts: Facts) -> Path:
    """Write a student into a new folder, verify it, add the cards; return the part of the folder that is the export.

    Raises ExportMismatch where the reloaded student is another, ConfigError where there is no adapter to write.
    """
    if not adapters.has_adapters(student) and format != "dequantized":
        raise ConfigError(f"{facts.checkpoint} holds no adapters, but format={format}; use --format dequantized.")
    if not adapters.has_adapters(student) or format == "merged":
        write = export_merged if format == "merged" else export_dequantized
        write(student, tokenizer, folder)
        verify_export(student, folder, exact=format != "merged")
        write_card(folder, facts, what=format, base=".")
        return folder
    base, adapter = folder / BASE_FOLDER, folder / ADAPTER_FOLDER
    export_dequantized(student, tokenizer, base)
    alone = format == "adapter"
    adapters.save(student, adapter, base_name=facts.base_to_make if alone else f"../{BASE_FOLDER}")
    verify_export(student, base, adapter=adapter, exact=True)
    if alone:
        write_card(adapter, facts, what="adapter alone", base=f"dequantized/{BASE_FOLDER}", adapter=".")
        return adapter
    write_card(adapter, facts, what="adapter", base=f"../{BASE_FOLDER}", adapter=".")
    write_card(base, facts, what="base", base=".", adapter=f"../{ADAPTER_FOLDER}")
    write_card(folder, facts, what="pair", base=f"./{BASE_FOLDER}", adapter=f"./{ADAPTER_FOLDER}")
    return folder


def export_dequantized(student: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the rounded weights in float32, bit for bit, without adapters; the student is left as it is."""
    base: Any = copy.deepcopy(student)
    if adapters.has_adapters(base):
        base = base.unload()
    to_dense(base)
    models.save_pretrained(base, tokenizer, folder)


def export_merged(student: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write W + (alpha / r) * B A in float32: one dense model, equal to the student up to the rounding of that sum."""
    dense: Any = copy.deepcopy(student)
    to_dense(dense)
    models.save_pretrained(dense.merge_and_unload(), tokenizer, folder)
