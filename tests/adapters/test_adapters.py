"""Where recovery LoRA goes, and that it starts as nothing."""

from __future__ import annotations

import json

import pytest
import torch

from qat_lora import adapters, models
from qat_lora.config import AdapterConfig
from qat_lora.config.presets import scheme
from qat_lora.errors import CheckpointError, ConfigError
from qat_lora.quant import CodedLinear, freeze_codes, quantize_model

MLP = {"gate_proj", "up_proj", "down_proj"}
ATTENTION = {"q_proj", "v_proj", "o_proj"}


def frozen_student(teacher_dir):
    model = models.load(str(teacher_dir)).model
    quantize_model(model, scheme("q2_g32"), models.target_linears(model))
    freeze_codes(model)
    return model


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AdapterConfig(), MLP | ATTENTION),
        (AdapterConfig(include_k_proj=True), MLP | ATTENTION | {"k_proj"}),
        (AdapterConfig(mlp_only=True), MLP),
    ],
)
def test_placement(teacher_dir, tmp_path, config, expected) -> None:
    model = frozen_student(teacher_dir)
    adapted = adapters.attach(model, models.target_linears(model), config, base_name="tiny")
    names = {n.split(".lora_A")[0].rsplit(".", 1)[-1] for n, _ in adapted.named_parameters() if "lora_A" in n}
    assert names == expected
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in n for n in trained)
    adapters.save(adapted, tmp_path, base_name="some/base")
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert set(saved["target_modules"]) == expected
    assert saved["base_model_name_or_path"] == "some/base"


def test_fresh_adapters_change_nothing(teacher_dir) -> None:
    model = frozen_student(teacher_dir)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        adapted = adapters.attach(model, models.target_linears(model), AdapterConfig(), base_name="tiny")
        assert torch.equal(adapted(input_ids=ids).logits, before)
    assert sum(isinstance(m, CodedLinear) for m in adapted.modules()) == 14


def test_rank_alpha_and_dropout_reach_peft(teacher_dir) -> None:
    model = frozen_student(teacher_dir)
    config = AdapterConfig(recovery_r=3, recovery_alpha=12.0, recovery_dropout=0.25)
    adapted = adapters.attach(model, models.target_linears(model), config, base_name="tiny")
    layer = next(m for m in adapted.modules() if hasattr(m, "lora_A") and "default" in m.lora_A)
    assert (layer.r["default"], layer.scaling["default"], layer.lora_dropout["default"].p) == (3, 4.0, 0.25)


def test_tensors_of_another_placement_are_refused(teacher_dir) -> None:
    one, other = (frozen_student(teacher_dir) for _ in range(2))
    one = adapters.attach(one, models.target_linears(one), AdapterConfig(), base_name="tiny")
    other = adapters.attach(other, models.target_linears(other), AdapterConfig(mlp_only=True), base_name="tiny")
    with pytest.raises(CheckpointError, match="placement"):
        adapters.load_tensors(one, adapters.adapter_tensors(other))


def test_nothing_left_to_adapt_is_refused() -> None:
    with pytest.raises(ConfigError, match="no Linear is left"):
        adapters.adapted_linears({"layers.0.self_attn.q_proj": "attention"}, AdapterConfig(mlp_only=True))


def test_attaching_decodes_no_codes(teacher_dir, monkeypatch) -> None:
    """Peft asks for a layer's weight some 20 times, and each time all codes of the layer were decoded."""
    model, accesses = frozen_student(teacher_dir), []
    decode = CodedLinear.weight.fget
    monkeypatch.setattr(CodedLinear, "weight", property(lambda layer: accesses.append(layer) or decode(layer)))
    adapted = adapters.attach(model, models.target_linears(model), AdapterConfig(), base_name="tiny")
    assert not accesses
    assert {type(m) for m in adapted.modules() if isinstance(m, CodedLinear)} == {CodedLinear}
    layer = models.causal_lm(adapted).model.layers[0].mlp.up_proj
    assert torch.equal(layer.base_layer.weight, decode(layer.base_layer)) and accesses, "the weight is there again"
    assert (layer.lora_A["default"].weight.dtype, layer.lora_A["default"].weight.device.type) == (torch.float32, "cpu")


@pytest.mark.parametrize("fused", ["qkv_proj", "query_key_value"])
def test_keys_that_are_fused_with_queries_are_adapted_and_it_is_said(fused, caplog) -> None:
    targets = {f"layers.{i}.attn.{name}": "attention" for i in range(2) for name in (fused, "dense")}
    assert adapters.adapted_linears(targets, AdapterConfig()) == list(targets)
    assert [r.getMessage() for r in caplog.records] == [
        f"{fused} holds q, k and v in one matrix, so k is adapted too; --mlp-only adapts none of them"
    ]
    caplog.clear()
    adapters.adapted_linears(targets, AdapterConfig(include_k_proj=True))
    adapters.adapted_linears({"layers.0.attn.q_proj": "attention"}, AdapterConfig())
    assert not caplog.records
