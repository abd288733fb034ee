"""Quantised linear layers, W ~ S * L[I] (+ Z): trained through the rounding, then held as packed codes. No runs.

`grids` has the levels, `scales` the shapes of S, `rounding` the maths and its gradients, `packing` the bytes. `start`
finds what a layer starts from. `layers` has the modules and the count of their bits,
`conversion` the walk over a model. See docs/quantization.md.
"""

from qat_lora.quant.conversion import QuantPart, freeze_codes, quant_parameters, quantize_model, to_dense
from qat_lora.quant.layers import CodedLinear, QuantLinear, stored_bits
from qat_lora.quant.rounding import Form, dequantize, fake_quantize, quantize

__all__ = [
    "CodedLinear",
    "Form",
    "QuantLinear",
    "QuantPart",
    "dequantize",
    "fake_quantize",
    "freeze_codes",
    "quant_parameters",
    "quantize",
    "quantize_model",
    "stored_bits",
    "to_dense",
]
