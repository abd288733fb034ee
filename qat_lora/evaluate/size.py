"""What a model costs to store: bits per weight with scales and adapters counted, and bytes in all."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qat_lora import models, quant
from qat_lora.quant import CodedLinear, QuantLinear


@dataclass(frozen=True)
class Size:
    """What `size_of` counts.

    Attributes:
        bits_per_weight: bits of codes, scales, offsets, LUTs and adapters over the number of weights in the block
            Linears.
        size_bytes: of the whole model, embeddings and norms included.
        adapter_bits: the adapters' share of `bits_per_weight`.
    """

    bits_per_weight: float
    size_bytes: int
    adapter_bits: float = 0.0


def size_of(model: nn.Module, *, stored_bits: int) -> Size:
    """Count a dense model or a student, with or without adapters.

    Codes count as packed, scales as their dtype says, adapters as their own dtype; all else (dense block Linears,
    embeddings, norms) at `stored_bits`, the width it has on disk.
    """
    students = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear | CodedLinear)}
    of_adapters = [p for name, p in model.named_parameters() if ".lora_" in name]
    inside = {p for layer in students.values() for p in layer.parameters() if p is not layer.bias}
    others = sum(p.numel() for p in model.parameters() if p not in inside)
    if not students and not of_adapters:  # of any family, then
        return Size(stored_bits, others * stored_bits // 8)
    left = [name for name in models.target_linears(model) if name not in students]
    dense = sum(model.get_parameter(f"{name}.weight").numel() for name in left)
    adapter_bits = sum(p.nbytes * 8 for p in of_adapters)
    weight_bits = sum(map(quant.stored_bits, students.values())) + dense * stored_bits + adapter_bits
    weights = sum(layer.in_features * layer.out_features for layer in students.values()) + dense
    rest = others - sum(p.numel() for p in of_adapters) - dense
    return Size(weight_bits / weights, (weight_bits + rest * stored_bits) // 8, adapter_bits / weights)
