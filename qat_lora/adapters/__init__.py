"""Recovery LoRA on top of peft: where it goes, attached, saved, read back, merged."""

from qat_lora.adapters.lora import (
    _KEY_PROJECTIONS,
    adapter_tensors,
    attach,
    has_adapters,
    load,
    load_tensors,
    merged,
    placement,
    save,
    without,
)

__all__ = [
    "_KEY_PROJECTIONS",
    "adapter_tensors",
    "attach",
    "has_adapters",
    "load",
    "load_tensors",
    "merged",
    "placement",
    "save",
    "without",
]
