"""Gradients of all that can be trained, against the oracle and finite differences with codes held."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from qat_lora.config import LinearQuant
from qat_lora.quant import Form, QuantLinear, fake_quantize
from tests.quant.cases import config_name, configs, linear_of, weight_of
from tests.reference import quant as oracle


@pytest.mark.parametrize("config", configs(), ids=config_name)
def test_gradients_equal_the_oracle(config):
    for out_features, in_features, group_size in [
        (3, 37, 16),
        (2, 33, 32),
        (3, 1, 32),
        (2, 20, 32),
        (2, 32, 16),
        (3, 6, 1),
    ]:
        config = LinearQuant(config.bits, config.levels, config.scales, group_size, rank=3)
        quantizer = QuantLinear.from_linear(linear_of(weight_of(out_features, in_features)), config).quantizer
        weight_OI = weight_of(out_features, in_features, seed=2).requires_grad_()
        form = quantizer.form()
        parts = [form.scale_OC(), form.levels_N, form.offset_OG]
        leaves = [None if p is None else p.detach().requires_grad_() for p in parts]
        grad_OI = weight_of(out_features, in_features, seed=3)
        scale_OC, levels_N, offset_OG = leaves
        fake_quantize(weight_OI, Form((scale_OC,), levels_N, offset_OG, config)).backward(grad_OI)
        arrays = [None if p is None else p.detach().numpy() for p in parts]
        codes = quantizer.encode(weight_OI).numpy()
        expected = oracle.gradients(grad_OI.numpy(), codes, *arrays, group_size)
        assert torch.equal(weight_OI.grad, grad_OI)  # straight through: the very same gradient
        for name, leaf in zip(("scale", "levels", "offset"), leaves, strict=True):
            if leaf is not None:
                assert leaf.grad.shape == leaf.shape
                size = np.abs(expected[name]).max() + 1e-12
                assert np.abs(leaf.grad.numpy() - expected[name]).max() <= 2e-6 * size * in_features**0.5, name


@pytest.mark.parametrize("config", configs(group_size=8), ids=config_name)
def test_parameter_gradients_equal_finite_differences_with_codes_held(config):
    config = LinearQuant(config.bits, config.levels, config.scales, 8, rank=3, scale_dtype="float32")
    layer = QuantLinear.from_linear(linear_of(weight_of(5, 21)), config)
    quantizer = layer.quantizer
    grad_OI = weight_of(5, 21, seed=3)
    quantizer(layer.weight).backward(grad_OI)
    codes_OI = quantizer.encode(layer.weight).long()
    assert torch.equal(layer.weight.grad, grad_OI)
    parameters = dict(quantizer.named_parameters())
    values = {name: p.detach().double() for name, p in parameters.items()}
    for name, parameter in parameters.items():
        for index in range(0, parameter.numel(), max(1, parameter.numel() // 7)):
            slope = _slope(values, name, index, grad_OI, codes_OI, quantizer.form().levels_N.detach(), config)
            size = float(parameter.grad.abs().max()) + 1e-9
            assert abs(float(parameter.grad.view(-1)[index]) - slope) < 1e-5 * size, (name, index)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scales", ["group", "lowrank"])
@pytest.mark.parametrize("levels", ["affine", "lut"])
def test_rounding_of_stored_values_passes_gradients_unchanged(levels, scales, dtype):
    """A layer that rounds nothing, and holds what the other is rounded to, has the same gradients bit for bit."""
    config = LinearQuant(3, levels, scales, 8, rank=2, scale_dtype=dtype)
    rounded = QuantLinear.from_linear(linear_of(weight_of(4, 16)), config)
    with torch.no_grad():
        for parameter in rounded.quantizer.parameters():
            parameter.mul_(1 + 1e-5)  # below the resolution of the dtype, so that rounding does something
    exact = QuantLinear(16, 4, config=dataclasses.replace(config, scale_dtype="float32"))
    exact.load_state_dict(rounded.state_dict())
    form = rounded.quantizer.form()
    stored = (form.levels_N, *form.side_values())
    with torch.no_grad():
        for parameter, value in zip(_tensors(exact), stored, strict=True):
            parameter.copy_(value)
    for layer in (rounded, exact):
        layer.quantizer(layer.weight).square().sum().backward()
    for parameter, same, value in zip(_tensors(rounded), _tensors(exact), stored, strict=True):
        assert torch.equal(same, value)
        if parameter.requires_grad:
            assert not torch.equal(parameter, value)
            assert parameter.grad.abs().max() > 0
            assert torch.equal(parameter.grad, same.grad)


def test_nothing_is_saved_for_backward_when_only_the_weight_is_trained():
    for levels in ("int", "affine", "nf4"):
        layer = QuantLinear.from_linear(linear_of(weight_of(8, 64)), LinearQuant(levels=levels))
        layer.quantizer.requires_grad_(False)
        assert _saved_by_forward(layer) == []
        assert torch.equal(layer.weight.grad, torch.ones(8, 64))


def test_training_scales_saves_one_byte_per_weight():
    layer = QuantLinear.from_linear(linear_of(weight_of(8, 64)), LinearQuant(levels="int"))
    layer.weight.requires_grad_(False)
    assert [t.dtype for t in _saved_by_forward(layer) if t.numel() == 8 * 64] == [torch.uint8]


def test_unused_rank_columns_learn():
    config = LinearQuant(levels="lut", scales="lowrank", group_size=32, rank=8)  # 2 groups, so 6 columns are unused
    layer = QuantLinear.from_linear(linear_of(weight_of(16, 64)), config)
    scale = layer.quantizer.scale
    assert torch.equal(scale.a_OR[:, 2:], torch.zeros(16, 6))
    layer.quantizer(layer.weight).square().sum().backward()
    assert (scale.a_OR.grad.abs().amax(0) > 0).all()


def _tensors(layer) -> list[torch.Tensor]:
    """What a form is made of, as the quantiser holds it, in the order of `Form.tensors`."""
    quantizer = layer.quantizer
    offset = [] if quantizer.offset_OG is None else [quantizer.offset_OG]
    return [quantizer.levels_N, *quantizer.scale.values(), *offset]


def _saved_by_forward(layer) -> list[torch.Tensor]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer.quantizer(layer.weight).sum().backward()
    return saved


def _slope(values, name, index, grad_OI, codes_OI, levels_N, config) -> float:
    """Central difference of sum grad * W with respect to one number, in float64."""
    step = 1e-6
    sums = []
    for sign in (1, -1):
        moved = {key: value.clone() for key, value in values.items()}
        moved[name].view(-1)[index] += sign * step
        sums.append(float((grad_OI.double() * _rebuild(moved, codes_OI, levels_N.double(), config)).sum()))
    return (sums[0] - sums[1]) / (2 * step)


def _rebuild(values, codes_OI, levels_N, config):
    group_I = torch.arange(codes_OI.shape[1]) // (
        codes_OI.shape[1] if config.scales == "channel" else config.group_size
    )
    if config.scales == "lowrank":
        scale_OI = values["scale.a_OR"] @ values["scale.b_RI"]
    else:
        scale_OI = values["scale.scale_OG"][:, group_I]
    levels_N = values.get("levels_N", levels_N)
    weight_OI = levels_N[codes_OI] * scale_OI
    return weight_OI + values["offset_OG"][:, group_I] if "offset_OG" in values else weight_OI
