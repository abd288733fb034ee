"""Low-bit language models: quantise, distil from the model's own full-precision self, recover with LoRA, export.

The public names load on first use, so that ``import qat_lora`` costs nothing and loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "CodedLinear", "KDCacheDataset", "QuantLinear", "__version__", "clear_memory", "detect_device_type",
    "enable_transparent_hugepages", "is_tpu_available", "is_xla_device", "kd_soft_ce", "log_memory_usage",
    "xla_mark_step",
]  # fmt: skip

if TYPE_CHECKING:  # the same names for type checkers and editors
    from qat_lora.cache import KDCacheDataset
    from qat_lora.kd import kd_soft_ce
    from qat_lora.quant import CodedLinear, QuantLinear
    from qat_lora.runtime.device import (
        clear_memory,
        detect_device_type,
        enable_transparent_hugepages,
        is_tpu_available,
        is_xla_device,
        log_memory_usage,
        xla_mark_step,
    )  # fmt: skip

# All others come from runtime.device.
_HOME = {"KDCacheDataset": "cache", "kd_soft_ce": "kd", "CodedLinear": "quant", "QuantLinear": "quant"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'qat_lora' has no attribute {name!r}")
    return getattr(importlib.import_module(f"qat_lora.{_HOME.get(name, 'runtime.device')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
