"""The policy table: which device computes in what, and why. Trained tensors are float32 in every row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qat_lora.runtime.base import Precision

# device -> (compute dtype by default, whether bf16 there is native or by autocast, why)
_POLICY = {
    "cpu": (torch.float32, False, "the CPU computes in fp32 unless bf16 is asked for"),
    "cuda": (torch.bfloat16, False, "CUDA computes in bf16 autocast, weights stay fp32"),
    "mps": (torch.float32, False, "MPS computes in fp32: its bf16 autocast is incomplete"),
    "tpu": (torch.bfloat16, True, "a TPU multiplies in bf16; what is trained stays fp32, what is frozen is bf16"),
    "xla": (torch.float32, True, "torch_xla without a TPU computes in fp32 unless bf16 is asked for"),
}
_NAMED = {"fp32": torch.float32, "bf16": torch.bfloat16}


def precision_for(device_type: str, dtype: str) -> Precision:
    """Return the precision of a device type (cpu, cuda, mps, tpu, xla) for ``--dtype`` auto, fp32 or bf16."""
    compute, native, reason = _POLICY[device_type]
    if dtype != "auto":
        compute, reason = _NAMED[dtype], f"--dtype {dtype}"
    return Precision(compute, compute if native else torch.float32, reason)


def lower_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the frozen floating-point parameters of a model to `dtype`, in place; trained ones and buffers stay.

    Buffers hold what must be exact: rotary frequencies, codes, scales. Quantised layers keep their own dtypes.
    """
    if dtype is torch.float32:
        return
    buffers = {id(b) for b in model.buffers()}

    def cast(x: Tensor) -> Tensor:
        frozen = x.is_floating_point() and not x.requires_grad and id(x) not in buffers
        return x.to(dtype) if frozen else x

    apply: Callable[[Callable[[Tensor], Tensor]], nn.Module] = model._apply
    apply(cast)
