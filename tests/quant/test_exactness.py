"""Fake quantisation equals real quantisation bit for bit, and both equal the NumPy oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qat_lora.config import LinearQuant
from qat_lora.quant import CodedLinear, QuantLinear, dequantize, fake_quantize, quantize
from qat_lora.quant.grids import Grid
from qat_lora.quant.packing import pack, unpack
from tests.quant.cases import GRIDS, SHAPES, config_name, configs, form_of, linear_of, weight_of
from tests.reference import quant as oracle


@pytest.mark.parametrize("config", configs(), ids=config_name)
def test_dequantized_codes_equal_fake_quantized_weight_bit_for_bit(config):
    for out_features, in_features, group_size in SHAPES:
        config = LinearQuant(config.bits, config.levels, config.scales, group_size, rank=3)
        layer = QuantLinear.from_linear(linear_of(weight_of(out_features, in_features)), config)
        faked_OI = layer.quantizer(layer.weight)
        codes_OI = layer.quantizer.encode(layer.weight)
        again_OI = unpack(pack(codes_OI, config.bits), config.bits, in_features)
        assert torch.equal(again_OI, codes_OI)
        assert torch.equal(dequantize(again_OI, layer.quantizer.form()), faked_OI)
        assert torch.equal(CodedLinear.from_quant_linear(layer).weight, faked_OI)
        assert torch.isfinite(faked_OI).all()


@pytest.mark.parametrize("config", configs(), ids=config_name)
def test_codes_and_weights_equal_the_oracle(config):
    for out_features, in_features, group_size in [(3, 37, 16), (2, 5, 8), (3, 6, 1)]:
        config = LinearQuant(config.bits, config.levels, config.scales, group_size, rank=2)
        quantizer = QuantLinear.from_linear(linear_of(weight_of(out_features, in_features)), config).quantizer
        weight_OI = weight_of(out_features, in_features, seed=1)  # other weights, so that some saturate
        form = quantizer.form()
        scale, grid, offset = _arrays(form.scale_OC(), form.levels_N, form.offset_OG)
        is_even_grid = config.levels in ("balanced", "int", "affine", "ternary")
        codes = oracle.quantize(weight_OI.numpy(), scale, grid, offset, group_size, is_even_grid)
        rounded = oracle.dequantize(codes, scale, grid, offset, group_size)
        assert np.array_equal(quantizer.encode(weight_OI).numpy(), codes)
        assert np.array_equal(quantizer(weight_OI).detach().numpy(), rounded)


@pytest.mark.parametrize(("levels", "bits"), [grid for grid in GRIDS if grid[0] != "lut"])
def test_grids_are_the_documented_ones(levels, bits):
    grid_N = Grid.of(LinearQuant(bits=bits, levels=levels)).levels_N.numpy()
    assert np.array_equal(grid_N, oracle.levels(levels, bits))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 64, 172])
def test_packing_and_unpacking_are_inverses_in_the_documented_layout(bits, columns):
    generator = torch.Generator().manual_seed(columns)
    codes_OI = torch.randint(0, 2**bits, (5, columns), generator=generator, dtype=torch.uint8)
    packed_OP = pack(codes_OI, bits)
    assert np.array_equal(packed_OP.numpy(), oracle.pack(codes_OI.numpy(), bits))
    assert torch.equal(unpack(packed_OP, bits, columns), codes_OI)
    assert torch.equal(pack(unpack(packed_OP, bits, columns), bits), packed_OP)


def test_a_tie_on_an_integer_grid_rounds_half_to_even():
    config = LinearQuant(bits=4, levels="int")
    weight_OI = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    faked_OI = fake_quantize(weight_OI, form_of(config, torch.ones(1, 1)))
    assert torch.equal(faked_OI, torch.tensor([[0.0, 2.0, 2.0, 0.0, -2.0, -2.0]]))


@pytest.mark.parametrize(("levels", "bits"), GRIDS)
def test_a_zero_scale_gives_exactly_the_offset_and_never_nan(levels, bits):
    config = LinearQuant(bits=bits, levels=levels, group_size=2)
    weight_OI = torch.tensor([[1.0, -2.0, 0.0, 3.0], [0.0, 0.0, 1e30, -1e30]])
    scale_OG = torch.tensor([[0.0, 0.5], [0.0, 0.0]])
    faked_OI = fake_quantize(weight_OI, form_of(config, scale_OG))
    assert torch.equal(faked_OI[:, :2], torch.zeros(2, 2))
    assert torch.isfinite(faked_OI).all()
    offset_OG = torch.tensor([[0.25, -1.0], [0.5, 2.0]])
    form = form_of(config, scale_OG, offset_OG)
    shifted_OI = fake_quantize(weight_OI, form)
    assert torch.equal(shifted_OI[1], torch.tensor([0.5, 0.5, 2.0, 2.0]))
    assert torch.equal(dequantize(quantize(weight_OI, form), form), shifted_OI)


@pytest.mark.parametrize("config", configs(group_size=8), ids=config_name)
def test_extreme_weights_stay_finite_and_exact(config):
    weight_OI = weight_of(6, 20)
    weight_OI[0] = 0  # a row of nothing
    weight_OI[1, :8] = 0  # a group of nothing
    weight_OI[2, 3] = 1e6  # an outlier beyond what a float16 scale can follow
    weight_OI[3] = 1e-12  # below float16's smallest number
    weight_OI[4] = 0.5  # constant
    layer = QuantLinear.from_linear(linear_of(weight_OI), config)
    faked_OI = layer.quantizer(layer.weight)
    assert torch.isfinite(faked_OI).all()
    assert torch.equal(CodedLinear.from_quant_linear(layer).weight, faked_OI)


def test_a_learned_table_whose_values_crossed_is_still_rounded_to_the_nearest():
    config = LinearQuant(bits=2, levels="lut", scales="channel")
    layer = QuantLinear.from_linear(linear_of(weight_of(4, 9)), config)
    with torch.no_grad():
        layer.quantizer.levels_N.copy_(torch.tensor([0.5, -1.0, 1.0, -0.25]))
    scale_O1 = layer.quantizer.form().scale_OC()
    distance_OIN = (layer.weight / scale_O1).unsqueeze(2) - torch.tensor([-1.0, -0.25, 0.5, 1.0])
    nearest_OI = torch.tensor([-1.0, -0.25, 0.5, 1.0])[distance_OIN.abs().argmin(2)]
    assert torch.equal(layer.quantizer(layer.weight), nearest_OI * scale_O1)
    assert torch.equal(CodedLinear.from_quant_linear(layer).weight, layer.quantizer(layer.weight))


def _arrays(*tensors):
    return [None if tensor is None else tensor.detach().numpy() for tensor in tensors]
