"""Recovery LoRA on top of peft: where it goes, how it is put on, as tensors and in peft's own files.

Not here: training it (`train`), and the layers that it goes on (`quant`).
"""

from qat_lora.adapters.attach import adapted_linears, attach, has_adapters
from qat_lora.adapters.stored import adapter_tensors, load, load_tensors, save

__all__ = [
    "adapted_linears",
    "adapter_tensors",
    "attach",
    "has_adapters",
    "load",
    "load_tensors",
    "save",
]
