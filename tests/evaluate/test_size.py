"""Bits per weight, counted by hand."""

from __future__ import annotations

import pytest
from torch import nn

from qat_lora import adapters, models
from qat_lora.config import AdapterConfig
from qat_lora.config.presets import scheme
from qat_lora.evaluate import Size, size_of
from qat_lora.quant import freeze_codes, quantize_model

# The tiny teacher: hidden 44, 3 heads of 12 and 1 kv head, MLP 52, two layers, vocabulary 211.
LINEARS = [(36, 44), (12, 44), (12, 44), (44, 36), (52, 44), (52, 44), (44, 52)]
WEIGHTS = 2 * sum(o * i for o, i in LINEARS)
REST = 211 * 44 + 2 * (2 * 44 + 2 * 12) + 44


def test_a_dense_model_has_the_bits_it_is_stored_in(teacher_dir) -> None:
    loaded = models.load(str(teacher_dir))
    assert loaded.stored_bits == 32
    size = size_of(loaded.model, stored_bits=16)
    assert size.bits_per_weight == 16
    assert size.size_bytes == 2 * (WEIGHTS + REST)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_student_counts_codes_padding_and_scales(teacher_dir, frozen) -> None:
    model = models.load(str(teacher_dir)).model
    quantize_model(model, scheme("q2_g32"), models.target_linears(model))
    if frozen:
        freeze_codes(model)
    groups = {44: 2, 36: 2, 52: 2}
    bits = 2 * sum(o * (-(-i // 4) * 8 + groups[i] * 16) for o, i in LINEARS)
    size = size_of(model, stored_bits=16)
    assert size.bits_per_weight == pytest.approx(bits / WEIGHTS)
    assert size.size_bytes == bits // 8 + 2 * REST


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_no_matrix_of_codes_has_the_bits_it_is_stored_in(teacher_dir, frozen) -> None:
    """A quantised layer's bias too, and a Linear that is left as it is."""
    model = models.load(str(teacher_dir)).model
    model.model.layers[1].mlp.up_proj.bias = nn.Parameter(model.model.norm.weight.new_zeros(52))
    left = "model.layers.0.mlp.up_proj"
    targets = {name: role for name, role in models.target_linears(model).items() if name != left}
    quantize_model(model, scheme("q2_g32"), targets)
    if frozen:
        freeze_codes(model)
    groups = {44: 2, 36: 2, 52: 2}
    bits = 2 * sum(o * (-(-i // 4) * 8 + groups[i] * 16) for o, i in LINEARS) - 52 * (11 * 8 + 2 * 16) + 16 * 52 * 44
    assert size_of(model, stored_bits=16) == Size(bits / WEIGHTS, bits // 8 + 2 * (REST + 52))


def test_a_model_without_quantised_layers_is_of_any_family() -> None:
    assert size_of(nn.Linear(3, 2), stored_bits=16) == Size(16, 16)


def test_adapters_are_counted_in_the_dtype_they_have(teacher_dir) -> None:
    model = models.load(str(teacher_dir)).model
    quantize_model(model, scheme("q2_g32"), models.target_linears(model))
    freeze_codes(model)
    before = size_of(model, stored_bits=16)
    adapted = adapters.attach(model, models.target_linears(model), AdapterConfig(recovery_r=3), base_name="tiny")
    added = 2 * sum(3 * (o + i) for o, i in LINEARS if (o, i) != (12, 44)) + 2 * 3 * (12 + 44)  # v but not k
    after = size_of(adapted, stored_bits=16)
    assert after.bits_per_weight - before.bits_per_weight == pytest.approx(32 * added / WEIGHTS)
    assert after.size_bytes - before.size_bytes == 4 * added
