"""The two layers: what they compute, what they keep, what they store."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.nn import functional as F

from qat_lora.config import LinearQuant
from qat_lora.quant import CodedLinear, QuantLinear
from tests.quant.cases import config_name, configs, linear_of, weight_of


def _pair(config, out_features=6, in_features=37, bias=True):
    layer = QuantLinear.from_linear(linear_of(weight_of(out_features, in_features), bias), config)
    return layer, CodedLinear.from_quant_linear(layer)


@pytest.mark.parametrize("config", configs(group_size=16), ids=config_name)
def test_both_layers_compute_a_linear_of_the_rounded_weight(config):
    layer, coded = _pair(config)
    x = torch.randn(2, 3, 37, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y_quant, y_coded = layer(x), coded(x)
    y_dense = F.linear(x, coded.weight, coded.bias)
    assert torch.equal(y_quant, y_dense)
    assert torch.equal(y_coded, y_dense)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (y_quant, y_coded, y_dense)]
    assert torch.equal(grads[0], grads[2])
    assert torch.allclose(grads[1], grads[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", configs(group_size=16), ids=config_name)
def test_state_dicts_round_trip_into_blank_layers(config):
    x = weight_of(4, 37, seed=5)
    for layer in _pair(config):
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        blank = type(layer)(37, 6, config=config)
        blank.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(blank(x), layer(x))


def test_the_frozen_state_holds_codes_and_small_numbers_only():
    _, coded = _pair(LinearQuant(2, "lut", "lowrank", 16, rank=2))
    kinds = {name: value.dtype for name, value in coded.state_dict().items()}
    assert kinds == {
        "bias": torch.float32,
        "packed_OP": torch.uint8,
        "a_OR": torch.float16,
        "b_RI": torch.float16,
        "levels_N": torch.float16,
    }
    assert [name for name, _ in coded.named_parameters()] == ["bias"]
    assert not coded.bias.requires_grad


def test_a_fixed_grid_is_not_stored():
    layer, coded = _pair(LinearQuant(4, "nf4"))
    assert "quantizer.levels_N" not in layer.state_dict()
    assert "levels_N" not in coded.state_dict()


def test_a_frozen_layer_saves_codes_and_neither_weight_nor_input():
    _, coded = _pair(LinearQuant(4, "affine"), 64, 128)
    x = torch.randn(16, 128, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        coded(x).sum().backward()
    assert sum(t.numel() * t.element_size() for t in saved) < 64 * 128  # a float32 weight is 4 times that
    assert all(t.data_ptr() != x.data_ptr() for t in saved)


def test_a_frozen_layer_gives_the_bias_a_gradient_when_asked():
    _, coded = _pair(LinearQuant())
    coded.bias.requires_grad_()
    coded(torch.ones(2, 3, 37)).sum().backward()
    assert torch.equal(coded.bias.grad, torch.full((6,), 6.0))


@pytest.mark.parametrize("scales", ["group", "lowrank"])
def test_bfloat16_input_gives_bfloat16_output_and_a_float32_master_gradient(scales):
    layer, coded = _pair(LinearQuant(4, "int", scales, 16, 2))
    x = torch.randn(3, 37).bfloat16().requires_grad_()
    for module in (layer, coded):
        y = module(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, F.linear(x, coded.weight.bfloat16(), coded.bias.bfloat16()))
        y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(6, 37), (32, 64)])  # a product of factors goes through bf16 from some size on
@pytest.mark.parametrize("scales", ["group", "lowrank"])
def test_autocast_keeps_both_layers_in_agreement(scales, shape):
    layer, coded = _pair(LinearQuant(4, "int", scales, 16, 2), *shape)
    x = torch.randn(3, shape[1], requires_grad=True)
    weight_OI = coded.weight
    with torch.autocast("cpu", torch.bfloat16):
        y_quant, y_coded = layer(x), coded(x)
        assert torch.equal(coded.weight, weight_OI)  # made in float32 here too
    assert y_coded.dtype == torch.bfloat16
    assert torch.equal(y_quant, y_coded)
    y_coded.float().sum().backward()
    assert x.grad.dtype == torch.float32


def test_both_layers_run_on_the_meta_device_which_has_no_autocast():
    for layer in _pair(LinearQuant(4, "lut", "lowrank", 16, 2)):
        assert layer.to("meta")(torch.ones(2, 37, device="meta")).shape == (2, 6)


def test_casting_a_model_leaves_frozen_values_bit_identical():
    _, coded = _pair(LinearQuant(4, "affine"))
    before = coded.weight
    cast = copy.deepcopy(coded).to(torch.bfloat16)
    assert cast.scale_OG.dtype == torch.float16
    assert torch.equal(cast.weight, before)
    assert cast.bias.dtype == torch.float32  # a checkpoint holds it too


def test_the_master_of_a_bfloat16_linear_is_float32():
    linear = linear_of(weight_of(4, 8)).bfloat16()
    layer = QuantLinear.from_linear(linear, LinearQuant(group_size=4))
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight, linear.weight.float())
    assert layer(torch.randn(2, 8).bfloat16()).dtype == torch.bfloat16


def test_a_layer_without_bias_stays_without():
    for module in _pair(LinearQuant(), bias=False):
        assert module.bias is None
        assert module(torch.ones(1, 37)).shape == (1, 6)


def test_frozen_parameters_stay_frozen_and_the_input_gradient_flows():
    linear = linear_of(weight_of(5, 16)).requires_grad_(False)
    layer = QuantLinear.from_linear(linear, LinearQuant())
    assert not layer.weight.requires_grad
    layer.requires_grad_(False)
    x = torch.ones(1, 16, requires_grad=True)
    layer(x).sum().backward()
    assert torch.allclose(x.grad, layer.quantizer(layer.weight).sum(0, keepdim=True))
