"""How many bits the quantised layers of a model take, counted from their shapes.

Owns the count: codes as packed, the padding of each row included, plus scales, offsets, factors and learned levels in
the dtype they are stored in. Fixed grids cost nothing. Biases, embeddings, norms and adapters are not quantised; they
are `other_parameters`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from qat_lora.config import LinearQuant
from qat_lora.quant.layers import CodedLinear, QuantLinear
from qat_lora.quant.packing import packed_bytes
from qat_lora.quant.scales import group_count, scale_shapes


class LayerStorage(NamedTuple):
    """The count of one matrix: its name in the model, weights, bits of packed codes, bits of all else that it needs."""

    name: str
    weights: int
    code_bits: int
    side_bits: int


class StorageReport(NamedTuple):
    """The count of a model: one row per quantised layer, and the parameters outside these matrices, each once."""

    layers: tuple[LayerStorage, ...]
    other_parameters: int

    @property
    def quantized_weights(self) -> int:
        """Weights that are held as codes."""
        return sum(layer.weights for layer in self.layers)

    @property
    def stored_bits(self) -> int:
        """Bits of codes and side values over all quantised layers."""
        return sum(layer.code_bits + layer.side_bits for layer in self.layers)


def storage(model: nn.Module) -> StorageReport:
    """Count the bits of a model's QuantLinears and CodedLinears."""
    layers = []
    counted: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            counted |= {id(p) for p in (module.weight, *module.quantizer.parameters())}
            layers.append(layer_storage(name, module.out_features, module.in_features, module.quantizer.config))
        elif isinstance(module, CodedLinear):
            layers.append(layer_storage(name, module.out_features, module.in_features, module.config))
    others = sum(p.numel() for p in model.parameters() if id(p) not in counted)
    return StorageReport(tuple(layers), others)


def layer_storage(name: str, out_features: int, in_features: int, config: LinearQuant) -> LayerStorage:
    """Count one matrix of a given shape and form; no tensors are needed."""
    values = sum(rows * columns for rows, columns in scale_shapes(out_features, in_features, config))
    values += out_features * group_count(in_features, config) if config.has_offset else 0
    values += 2**config.bits if config.is_learned else 0
    code_bits = out_features * packed_bytes(in_features, config.bits) * 8
    side_bits = values * torch.finfo(getattr(torch, config.scale_dtype)).bits
    return LayerStorage(name, out_features * in_features, code_bits, side_bits)
