"""How many bits the quantised layers of a model take, counted from their shapes.

Owns the count: codes as packed, the padding of each row included, plus scales, offsets, factors and learned
levels in the dtype they are stored in. Fixed grids cost nothing. Biases, embeddings, norms and adapters are
not quantised; they are `other_parameters`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from qat_lora.config import LinearQuant
from qat_lora.quant.linear import CodedLinear, QuantLinear
from qat_lora.quant.packing import packed_bytes
from qat_lora.quant.scales import group_count


@dataclass(frozen=True)
class LayerStorage:
    """The count of one matrix.

    Attributes:
        name: its name in the model.
        weights: number of weights, O * I.
        code_bits: bits of its packed codes.
        side_bits: bits of its scales, factors, offsets and learned levels.
    """

    name: str
    weights: int
    code_bits: int
    side_bits: int

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over weights."""
        return (self.code_bits + self.side_bits) / self.weights


@dataclass(frozen=True)
class StorageReport:
    """The count of a model.

    Attributes:
        layers: one row per quantised layer.
        other_parameters: parameters outside these matrices, each counted once.
    """

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

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over quantised weights; 0 where nothing is quantised."""
        return self.stored_bits / self.quantized_weights if self.layers else 0.0


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
    grouped = out_features * group_count(in_features, config)
    values = (out_features + in_features) * config.rank if config.scales == "lowrank" else grouped
    values += grouped if config.levels == "affine" else 0
    values += 2**config.bits if config.levels == "lut" else 0
    return LayerStorage(
        name=name,
        weights=out_features * in_features,
        code_bits=out_features * packed_bytes(in_features, config.bits) * 8,
        side_bits=values * torch.finfo(getattr(torch, config.scale_dtype)).bits,
    )
