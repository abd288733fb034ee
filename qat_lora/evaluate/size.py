"""What a model costs to store: bits per weight with scales and adapters counted, and bytes in all."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qat_lora import models
from qat_lora.quant import storage


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
    report = storage(model)
    of_adapters = [p for name, p in model.named_parameters() if ".lora_" in name]
    adapter_bits = sum(p.numel() * p.element_size() * 8 for p in of_adapters)
    if not report.layers and not of_adapters:  # of any family, then
        return Size(stored_bits, report.other_parameters * stored_bits // 8)
    modules = dict(model.named_modules())
    quantized = {layer.name for layer in report.layers}
    dense = sum(modules[name].weight.numel() for name in models.target_linears(model) if name not in quantized)
    rest = report.other_parameters - sum(p.numel() for p in of_adapters) - dense
    weight_bits = report.stored_bits + dense * stored_bits + adapter_bits
    weights = report.quantized_weights + dense
    return Size(weight_bits / weights, (weight_bits + rest * stored_bits) // 8, adapter_bits / weights)
