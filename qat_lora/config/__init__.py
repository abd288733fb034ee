"""What a run may be told: frozen dataclasses, one group a file, their checks, and the named presets.

How such values are read, overridden and written is `qat_lora.settings`; the flags are made in `qat_lora.cli.flags`.
Every leaf field has a unique name over all groups of a run, so that ``--batch-size`` and ``--set loop.batch_size=`` can
only mean one thing.
"""

from qat_lora.config.adapter import AdapterConfig
from qat_lora.config.kd import KDConfig, Packing, Store, Support
from qat_lora.config.loop import LoopConfig
from qat_lora.config.optim import OptimConfig
from qat_lora.config.place import ExecutionConfig, MemDebug, PlaceConfig, Shard, Sync
from qat_lora.config.quant import LinearQuant, QuantScheme
from qat_lora.config.runs import AnyRun, EvalRun, ExportRun, QatRun, RecoveryRun

__all__ = [
    "AdapterConfig", "AnyRun", "EvalRun", "ExecutionConfig", "ExportRun", "KDConfig", "LinearQuant", "LoopConfig",
    "MemDebug", "OptimConfig", "Packing", "PlaceConfig", "QatRun", "QuantScheme", "RecoveryRun", "Shard", "Store",
    "Support", "Sync",
]  # fmt: skip
