"""Whole models: what is replaced, that no logit changes, and that peft can build on the result."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from qat_lora.config import LinearQuant, QuantScheme
from qat_lora.errors import ConfigError, ModelError
from qat_lora.quant import (
    CodedLinear,
    QuantLinear,
    freeze_codes,
    quant_parameters,
    quantize_model,
    to_dense,
)

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
SCHEME = QuantScheme(
    mlp=LinearQuant(2, "balanced", "group", 16), attention=LinearQuant(4, "lut", "lowrank", 16, rank=2)
)
IDS_BT = torch.arange(12).view(2, 6) * 3


def _llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def _targets(model):
    roles = {**dict.fromkeys(ATTENTION, "attention"), **dict.fromkeys(MLP, "mlp")}
    names = [name for name, _ in model.named_modules()]
    return {name: roles[last] for name in names if (last := name.split(".")[-1]) in roles}


def _quantized():
    model = _llama()
    quantize_model(model, SCHEME, _targets(model))
    return model


def _with_lora(model):
    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)  # at its usual 0 the adapter would do nothing
    return wrapped


def test_each_role_takes_its_form_and_the_report_names_all():
    model = _llama()
    assert quantize_model(model, SCHEME, _targets(model)) == tuple(_targets(model))
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantLinear)
    assert model.model.layers[0].mlp.up_proj.quantizer.config == SCHEME.mlp
    assert model.model.layers[1].self_attn.k_proj.quantizer.config == SCHEME.attention
    assert type(model.lm_head) is nn.Linear


def test_freezing_and_densifying_change_no_logit():
    model = _quantized()
    logits = model(IDS_BT).logits
    assert len(freeze_codes(model)) == 14
    assert torch.equal(model(IDS_BT).logits, logits)
    assert len(to_dense(model)) == 14
    assert torch.equal(model(IDS_BT).logits, logits)
    assert not any(isinstance(m, QuantLinear | CodedLinear) for m in model.modules())


def test_densifying_trained_layers_directly_is_bit_equal_too():
    model = _quantized()
    logits = model(IDS_BT).logits
    to_dense(model)
    assert torch.equal(model(IDS_BT).logits, logits)


def test_a_model_with_nothing_to_convert_is_left_alone():
    model = _llama()
    assert freeze_codes(model) == to_dense(model) == ()


def test_peft_wraps_frozen_layers_and_the_gradient_reaches_the_first_layer():
    frozen = _quantized()
    freeze_codes(frozen)
    frozen = _with_lora(frozen)
    dense = _quantized()
    to_dense(dense)
    dense = _with_lora(dense)
    assert isinstance(frozen.base_model.model.model.layers[0].self_attn.q_proj.base_layer, CodedLinear)
    grads = []
    for model in (frozen, dense):
        embeddings = model.get_input_embeddings()(IDS_BT).detach().requires_grad_()
        model(inputs_embeds=embeddings, labels=IDS_BT).loss.backward()
        by_name = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        grads.append({"embeddings": embeddings.grad, **by_name})
    assert grads[0].keys() == grads[1].keys()
    assert any("layers.0.self_attn.q_proj.lora_A" in name for name in grads[0])
    for name, grad in grads[1].items():
        assert grad.abs().max() > 0
        assert torch.allclose(grads[0][name], grad, rtol=1e-4, atol=1e-7), name


def test_peft_wraps_quant_linears_and_training_moves_only_the_adapter():
    model = _with_lora(_quantized())
    model(IDS_BT, labels=IDS_BT).loss.backward()
    assert all(p.grad is None for n, p in model.named_parameters() if "lora_" not in n)
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" in n)


def test_layers_inside_a_peft_wrapper_are_found():
    model = _with_lora(_llama())
    inner = model.base_model.model
    assert "model.layers.0.self_attn.q_proj.base_layer" in quantize_model(inner, SCHEME, _targets(inner))
    logits = model(IDS_BT).logits
    freeze_codes(model)
    assert torch.equal(model(IDS_BT).logits, logits)
    to_dense(model)
    assert torch.equal(model(IDS_BT).logits, logits)
    assert type(inner.model.layers[0].self_attn.q_proj.base_layer) is nn.Linear


def test_a_layer_with_two_names_stays_one_layer():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.ReLU()})
    model["c"] = model["a"]
    quantize_model(model, SCHEME, {"a": "mlp"})
    assert model["a"] is model["c"]
    freeze_codes(model)
    assert isinstance(model["c"], CodedLinear)
    assert model["a"] is model["c"]


@pytest.mark.parametrize("training", [True, False])
def test_layers_stay_in_training_or_evaluation(training):
    model = nn.Sequential(nn.Linear(8, 8)).train(training)
    for convert in (lambda m: quantize_model(m, SCHEME, {"0": "mlp"}), freeze_codes, to_dense):
        assert convert(model) == ("0",)
        assert model[0].training == training


def test_a_subclass_of_linear_is_refused_since_what_it_adds_would_be_lost():
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    with pytest.raises(ModelError, match="0 is a Doubled, and only a plain Linear"):
        quantize_model(nn.Sequential(Doubled(8, 8)), SCHEME, {"0": "mlp"})


@pytest.mark.parametrize("shared", ["weight", "bias"])
def test_linears_that_share_a_parameter_are_refused_and_nothing_is_changed(shared):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    setattr(model[2], shared, getattr(model[0], shared))
    for targets in ({"1": "mlp", "0": "mlp", "2": "mlp"}, {"1": "mlp", "2": "mlp"}):
        with pytest.raises(ModelError, match=r"[02] and [02] share one weight"):
            quantize_model(model, SCHEME, targets)
    assert all(type(layer) is nn.Linear for layer in model)
    assert quantize_model(model, SCHEME, {"1": "mlp"}) == ("1",)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["weight", "bias", "quantizer.scale.scale_OG"])
def test_what_is_not_finite_is_not_frozen(place, value):
    for convert in (freeze_codes, to_dense):
        model = nn.ModuleDict({"down": nn.Linear(8, 8)})
        quantize_model(model, SCHEME, {"down": "mlp"})
        model["down"].get_parameter(place).data[0] = value
        with pytest.raises(ModelError, match=rf"down holds weights that are not finite \({place}\)"):
            convert(model)


def test_a_checkpoint_loads_into_blank_layers():
    model, blank = _quantized(), _llama()
    quantize_model(blank, SCHEME, _targets(blank), search=False)
    blank.load_state_dict(model.state_dict())
    assert torch.equal(blank(IDS_BT).logits, model(IDS_BT).logits)
    freeze_codes(model)
    freeze_codes(blank)
    blank.load_state_dict(model.state_dict())
    assert torch.equal(blank(IDS_BT).logits, model(IDS_BT).logits)


def test_parameters_are_listed_by_what_they_are():
    model = _quantized()
    found = {part: set(quant_parameters(model, part)) for part in ("weights", "scales", "luts")}
    layer = "model.layers.0.self_attn.q_proj"
    assert f"{layer}.weight" in found["weights"]
    assert {f"{layer}.quantizer.scale.a_OR", f"{layer}.quantizer.scale.b_RI"} <= found["scales"]
    assert f"{layer}.quantizer.levels_N" in found["luts"]
    assert len(found["luts"]) == 8
    named = dict(model.named_parameters())
    assert all(named[name] is p for name, p in quant_parameters(model, "scales").items())


def test_mistakes_name_the_layer_and_the_fix():
    model = _llama()
    with pytest.raises(ModelError, match="no layer 'model.layers.0.mlp.up_prj'.*Did you mean"):
        quantize_model(model, SCHEME, {"model.layers.0.mlp.up_prj": "mlp"})
    with pytest.raises(ModelError, match="is a Embedding"):
        quantize_model(model, SCHEME, {"model.embed_tokens": "mlp"})
    with pytest.raises(ConfigError, match="role 'head'"):
        quantize_model(model, SCHEME, {"lm_head": "head"})
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.inf
    with pytest.raises(ModelError, match="up_proj holds weights that are not finite"):
        quantize_model(model, SCHEME, _targets(model))
    quantize_model(model, SCHEME, {"model.layers.1.mlp.up_proj": "mlp"})
    with pytest.raises(ModelError, match="is a QuantLinear"):
        quantize_model(model, SCHEME, {"model.layers.1.mlp.up_proj": "mlp"})
