"""The policy table: which device computes in what, and why. Trained tensors are float32 in every row."""

from __future__ import annotations

import torch

from qat_lora.runtime.base import Precision

_AUTO = {
    "cpu": (torch.float32, "the CPU computes in fp32 unless bf16 is asked for"),
    "cuda": (torch.bfloat16, "CUDA computes in bf16 autocast, weights stay fp32"),
    "mps": (torch.float32, "MPS computes in fp32: its bf16 autocast is incomplete"),
    "tpu": (torch.bfloat16, "a TPU multiplies in bf16, weights stay fp32"),
}
_NAMED = {"fp32": torch.float32, "bf16": torch.bfloat16}


def precision_for(device_type: str, dtype: str) -> Precision:
    """Return the precision of a device type (cpu, cuda, mps, tpu) for ``--dtype`` auto, fp32 or bf16."""
    compute, reason = _AUTO[device_type]
    if dtype != "auto":
        compute, reason = _NAMED[dtype], f"--dtype {dtype}"
    return Precision(compute, reason)
