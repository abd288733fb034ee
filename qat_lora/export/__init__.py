"""Exports in forms that others load, each verified by reloading it."""

from qat_lora.export.hf import ADAPTER_FOLDER, export_dequantized, export_merged
from qat_lora.export.peft import export_adapter
from qat_lora.export.verify import probe_ids, probe_logits, verify_export

__all__ = [
    "ADAPTER_FOLDER",
    "export_adapter",
    "export_dequantized",
    "export_merged",
    "probe_ids",
    "probe_logits",
    "verify_export",
]
