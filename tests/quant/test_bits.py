"""Bits are counted from shapes, and agree with the bytes that frozen layers hold."""

from __future__ import annotations

import pytest
from torch import nn

from qat_lora.config import LinearQuant, QuantScheme
from qat_lora.quant import CodedLinear, QuantLinear, freeze_codes, quantize_model, stored_bits
from tests.quant.cases import SHAPES, config_name, configs, linear_of, weight_of


@pytest.mark.parametrize("config", configs(), ids=config_name)
def test_counted_bits_equal_the_bytes_of_the_frozen_state(config):
    for out_features, in_features, group_size in SHAPES[:4]:
        config = LinearQuant(config.bits, config.levels, config.scales, group_size, rank=3)
        layer = QuantLinear.from_linear(linear_of(weight_of(out_features, in_features), bias=False), config)
        coded = CodedLinear.from_quant_linear(layer)
        held = sum(t.numel() * t.element_size() * 8 for t in coded.state_dict().values())
        assert stored_bits(layer) == stored_bits(coded) == held


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
    layer = QuantLinear(1024, 1024, config=config, device="meta")
    assert stored_bits(layer) / 1024**2 == bits_per_weight


def test_a_layer_counts_the_same_before_and_after_freezing():
    model = nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    scheme = QuantScheme(mlp=LinearQuant(2, "balanced", "group", 32))
    quantize_model(model, scheme, {"0": "mlp"})
    before = stored_bits(model[0])
    freeze_codes(model)
    assert stored_bits(model[0]) == before == 512 * 2 + 16 * 16
