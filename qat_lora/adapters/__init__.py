"""Recovery LoRA on top of peft: where it goes, put on and taken off, as tensors and in peft's own files.

Not here: training it (`train`), and the layers that it goes on (`quant`).
"""

from qat_lora.adapters.attach import attach, has_adapters, merged, without
from qat_lora.adapters.stored import adapter_tensors, load, load_tensors, save
from qat_lora.adapters.where import adapted_linears

__all__ = [
    "adapted_linears",
    "adapter_tensors",
    "attach",
    "has_adapters",
    "load",
    "load_tensors",
    "merged",
    "save",
    "without",
]
