"""Low-bit language models: quantise, distil from the model's own full-precision self, recover with LoRA, export.

The public names load on first use, so that ``import qat_lora`` costs nothing and loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "KDCacheDataset": "qat_lora.cache",
    "kd_soft_ce": "qat_lora.kd",
    "QuantLinear": "qat_lora.quant",
    "CodedLinear": "qat_lora.quant",
    "clear_memory": "qat_lora.runtime.device",
    "detect_device_type": "qat_lora.runtime.device",
    "enable_transparent_hugepages": "qat_lora.runtime.device",
    "is_tpu_available": "qat_lora.runtime.device",
    "is_xla_device": "qat_lora.runtime.device",
    "log_memory_usage": "qat_lora.runtime.device",
    "xla_mark_step": "qat_lora.runtime.device",
}

__all__ = [*_HOME, "__version__"]  # noqa: PLE0604

if TYPE_CHECKING:  # the same names for type checkers and editors
    from qat_lora.cache import KDCacheDataset as KDCacheDataset
    from qat_lora.kd import kd_soft_ce as kd_soft_ce
    from qat_lora.quant import CodedLinear as CodedLinear
    from qat_lora.quant import QuantLinear as QuantLinear
    from qat_lora.runtime.device import clear_memory as clear_memory
    from qat_lora.runtime.device import detect_device_type as detect_device_type
    from qat_lora.runtime.device import enable_transparent_hugepages as enable_transparent_hugepages
    from qat_lora.runtime.device import is_tpu_available as is_tpu_available
    from qat_lora.runtime.device import is_xla_device as is_xla_device
    from qat_lora.runtime.device import log_memory_usage as log_memory_usage
    from qat_lora.runtime.device import xla_mark_step as xla_mark_step


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qat_lora' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
