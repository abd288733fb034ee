"""Bits are counted from shapes, and agree with the bytes that frozen layers hold."""

from __future__ import annotations

import pytest
from torch import nn

from qat_lora.config import LinearQuant, QuantScheme
from qat_lora.quant import CodedLinear, QuantLinear, freeze_codes, quantize_model, storage
from qat_lora.quant.report import layer_storage
from tests.quant.cases import SHAPES, config_name, configs, linear_of, weight_of


@pytest.mark.parametrize("config", configs(), ids=config_name)
def test_counted_bits_equal_the_bytes_of_the_frozen_state(config):
    for out_features, in_features, group_size in SHAPES[:4]:
        config = LinearQuant(config.bits, config.levels, config.scales, group_size, rank=3)
        layer = QuantLinear.from_linear(linear_of(weight_of(out_features, in_features), bias=False), config)
        held = CodedLinear.from_quant_linear(layer).state_dict().values()
        row = layer_storage("", out_features, in_features, config)
        assert row.code_bits + row.side_bits == sum(t.numel() * t.element_size() * 8 for t in held)


@pytest.mark.parametrize(
    ("config", "bits_per_weight"),
    [
        (LinearQuant(4, "int", "group", 32), 4.5),
        (LinearQuant(3, "int", "group", 32), 3.5),
        (LinearQuant(2, "balanced", "group", 32), 2.5),
        (LinearQuant(2, "balanced", "group", 64), 2.25),
        (LinearQuant(2, "affine", "group", 64), 2.5),
        (LinearQuant(2, "balanced", "group", 64, scale_dtype="float32"), 2.5),
        (LinearQuant(4, "int", "channel"), 4 + 16 / 1024),
        (LinearQuant(4, "lut", "lowrank", rank=32), 4 + 16 * (32 * 2048 + 16) / 1024**2),
    ],
)
def test_bits_per_weight_of_a_square_matrix(config, bits_per_weight):
    _, weights, code_bits, side_bits = layer_storage("", 1024, 1024, config)
    assert (code_bits + side_bits) / weights == bits_per_weight


def test_a_model_counts_the_same_before_and_after_freezing():
    model = nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    scheme = QuantScheme(mlp=LinearQuant(2, "balanced", "group", 32))
    quantize_model(model, scheme, {"0": "mlp"})
    before = storage(model)
    freeze_codes(model)
    assert storage(model) == before
    assert before.quantized_weights == 512
    assert before.stored_bits == 512 * 2 + 16 * 16
    assert before.layers[0].name == "0"
    assert before.other_parameters == 8 + 16 + 36


def test_a_model_without_quantised_layers_has_no_bits():
    report = storage(nn.Linear(3, 2))
    assert (report.quantized_weights, report.stored_bits, report.other_parameters) == (0, 0, 8)
