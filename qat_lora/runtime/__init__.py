"""Devices behind one class, `Runtime`, and the public words about what this machine offers. No training, no files."""

from qat_lora.runtime.base import CompiledGraph, Phase, Precision, Runtime
from qat_lora.runtime.local import LocalRuntime
from qat_lora.runtime.memory import MemoryUse
from qat_lora.runtime.select import runtime_for

__all__ = ["CompiledGraph", "LocalRuntime", "MemoryUse", "Phase", "Precision", "Runtime", "runtime_for"]
