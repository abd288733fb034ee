"""Quantised linear layers: W ~ S * L[I] (+ Z), trained through the rounding and stored as packed codes.

`primitives` is the maths, `scales` the forms of S, `packing` the bytes. `search` finds scales, `factors` low-rank ones,
and `init` all that a layer starts from. `linear` is the layers, `convert` the walk over a model, `report` the count of
bits. See docs/quantization.md.
"""

from qat_lora.quant.convert import (
    ConversionReport,
    QuantPart,
    freeze_codes,
    quant_parameters,
    quantize_model,
    to_dense,
)
from qat_lora.quant.init import InitialState, search_initial_state, search_scales
from qat_lora.quant.linear import CodedLinear, Quantizer, QuantLinear
from qat_lora.quant.packing import pack, unpack
from qat_lora.quant.primitives import dequantize, fake_quantize, level_values, nearest_code, quantize
from qat_lora.quant.report import LayerStorage, StorageReport, layer_storage, storage
from qat_lora.quant.scales import GroupScale, LowRankScale

__all__ = [
    "CodedLinear",
    "ConversionReport",
    "GroupScale",
    "InitialState",
    "LayerStorage",
    "LowRankScale",
    "QuantLinear",
    "QuantPart",
    "Quantizer",
    "StorageReport",
    "dequantize",
    "fake_quantize",
    "freeze_codes",
    "layer_storage",
    "level_values",
    "nearest_code",
    "pack",
    "quant_parameters",
    "quantize",
    "quantize_model",
    "search_initial_state",
    "search_scales",
    "storage",
    "to_dense",
    "unpack",
]
