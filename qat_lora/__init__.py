"""Low-bit language models: quantise, distil from the model's own full-precision self, recover with LoRA, export.

The public names load on first use, so that ``import qat_lora`` costs nothing and loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "KDCacheDataset": "qat_lora.kd",
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

if TYPE_CHECKING:
    from qat_lora.kd import KDCacheDataset, kd_soft_ce
    from qat_lora.quant import CodedLinear, QuantLinear
    from qat_lora.runtime.device import (
        clear_memory,
        detect_device_type,
        enable_transparent_hugepages,
        is_tpu_available,
        is_xla_device,
        log_memory_usage,
        xla_mark_step,
    )


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qat_lora' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
