"""What is shipped: folders that transformers and peft load, each with a card, each verified by reloading it.

Not here: reading a checkpoint (`train`), the command (`cli`), LoRA itself (`adapters`).
"""

from qat_lora.export.card import Facts
from qat_lora.export.formats import ADAPTER_FOLDER, BASE_FOLDER, export_dequantized, write_export
from qat_lora.export.verify import probe_ids, probe_logits, verify_export

__all__ = [
    "ADAPTER_FOLDER", "BASE_FOLDER", "Facts", "export_dequantized", "probe_ids", "probe_logits", "verify_export",
    "write_export",
]  # fmt: skip
