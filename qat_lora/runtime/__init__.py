"""Devices: the `Runtime` protocol, its implementations, and the public words about what this machine offers."""

from qat_lora.runtime.base import CompiledGraph, MemoryUse, Phase, Precision, Runtime
from qat_lora.runtime.local import LocalRuntime
from qat_lora.runtime.select import runtime_for

__all__ = ["CompiledGraph", "LocalRuntime", "MemoryUse", "Phase", "Precision", "Runtime", "runtime_for"]
