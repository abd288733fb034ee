"""Layers that run as one: what is called alike, and a list that changes nothing but who loops."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from qat_lora import adapters, models
from qat_lora.config import AdapterConfig, ExecutionConfig
from qat_lora.config.presets import scheme
from qat_lora.errors import ConfigError, ModelError
from qat_lora.models.lean.layers import ScannedLayers, why_unlike
from qat_lora.quant import freeze_codes, quantize_model
from qat_lora.train.run import run_qat, run_recovery
from tests.conftest import qat_run, recovery_run

TINY = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def tiny(**settings) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(TINY | settings)))


def reason(model: nn.Module) -> str:
    lm = models.causal_lm(model)
    return why_unlike(list(lm.model.layers), lm.config)


def student(*, frozen: bool) -> nn.Module:
    model = tiny()
    quantize_model(model, scheme("q2_g32"), models.target_linears(model), search=False)
    if frozen:
        freeze_codes(model)
    return model


def test_layers_of_one_shape_are_alike_in_every_stage() -> None:
    assert reason(tiny()) == ""
    assert reason(student(frozen=False)) == ""
    coded = student(frozen=True)
    assert reason(coded) == ""
    assert reason(adapters.attach(coded, models.target_linears(coded), AdapterConfig(), base_name="")) == ""


def widened(model):
    model.model.layers[1].mlp.up_proj = nn.Linear(16, 32, bias=False)


def biased(model):
    model.model.layers[2].self_attn.q_proj.bias = nn.Parameter(torch.zeros(16))


def lowered(model):
    model.model.layers[1].mlp.down_proj.weight.data = model.model.layers[1].mlp.down_proj.weight.data.bfloat16()


def quantized_once(model):
    one = {name: role for name, role in models.target_linears(model).items() if ".1.mlp.up_proj" in name}
    quantize_model(model, scheme("q2_g32"), one, search=False)


def scaled(model):
    model.model.layers[2].self_attn.scaling *= 2


def windowed(model):
    model.model.layers[1].self_attn.sliding_window = 7


def other_epsilon(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def other_shape_of_a_norm(model):
    model.model.layers[1].post_attention_layernorm.weight = nn.Parameter(torch.ones(1))


def other_activation(model):
    act = model.model.layers[2].mlp.act_fn
    act.__class__ = type("Other", (type(act),), {})


def other_bits(model):
    for bits, part in ((2, ".0."), (4, ".1."), (2, ".2.")):
        chosen = {name: role for name, role in models.target_linears(model).items() if part in name}
        quantize_model(model, scheme(f"q{bits}_g32"), chosen, search=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (widened, "mlp.up_proj differs between layer 0 and layer 1"),
        (biased, "self_attn.q_proj.bias differs between layer 0 and layer 2"),
        (lowered, "mlp.down_proj.weight differs between layer 0 and layer 1"),
        (quantized_once, "mlp.up_proj differs between layer 0 and layer 1"),
        (scaled, "self_attn differs between layer 0 and layer 2"),
        (windowed, "self_attn differs between layer 0 and layer 1"),
        (other_epsilon, "input_layernorm differs between layer 0 and layer 1"),
        (other_shape_of_a_norm, "post_attention_layernorm.weight differs between layer 0 and layer 1"),
        (other_activation, "mlp.act_fn differs between layer 0 and layer 2"),
        (other_bits, "self_attn.q_proj.quantizer differs between layer 0 and layer 1"),
    ],
)
def test_what_differs_is_named(change, named) -> None:
    model = tiny()
    change(model)
    assert reason(model) == named
    with pytest.raises(ModelError, match=rf"layers cannot be scanned: {named}; drop --scan-layers"):
        models.scan_decoder(model, lambda *_: pytest.fail("scanned"))


def test_adapters_of_another_alpha_are_another_computation() -> None:
    coded = student(frozen=True)
    adapted = adapters.attach(coded, models.target_linears(coded), AdapterConfig(), base_name="")
    models.causal_lm(adapted).model.layers[1].mlp.up_proj.scaling["default"] *= 2
    assert reason(adapted) == "mlp.up_proj differs between layer 0 and layer 1"


def test_layers_that_attend_in_different_ways_are_unlike() -> None:
    model = tiny(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert reason(model) == "they attend in 2 ways (full_attention, sliding_attention)"


def test_dropout_is_refused_since_backward_would_draw_other_numbers() -> None:
    assert reason(tiny(attention_dropout=0.25)) == "attention drops out with p=0.25"
    coded = student(frozen=True)
    adapted = adapters.attach(coded, models.target_linears(coded), AdapterConfig(recovery_dropout=0.125), base_name="")
    assert reason(adapted).endswith(
        "lora_dropout.default drops out with p=0.125, and backward would draw other numbers"
    )


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    config = transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(ModelError, match="GPT2Model has no list of layers to scan"):
        models.scan_decoder(transformers.GPT2LMHeadModel(config), lambda *_: pytest.fail("scanned"))


def one_by_one(layers, hidden, shared):
    for layer in layers:
        hidden = layer(hidden, **shared)
    return hidden


@pytest.mark.parametrize("adapted", [False, True])
def test_names_state_dict_and_logits_stay_what_they_are(adapted) -> None:
    model = student(frozen=adapted)
    if adapted:
        model = adapters.attach(model, models.target_linears(model), AdapterConfig(), base_name="")
    plain = copy.deepcopy(model)
    calls = []
    models.scan_decoder(model, lambda *given: calls.append(len(given[0])) or one_by_one(*given))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert set(models.target_linears(model)) == set(models.target_linears(plain))
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids, use_cache=False).logits for m in (model, plain))
    assert torch.equal(ours, theirs)
    assert calls == [3]
    model.load_state_dict(plain.state_dict())


def test_generation_goes_layer_by_layer_since_it_writes_a_cache_per_layer() -> None:
    model = tiny().eval()
    ids = torch.arange(5)[None]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    models.scan_decoder(model, lambda *_: pytest.fail("scanned"))
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)


def test_the_list_can_still_be_indexed_sliced_and_counted() -> None:
    layers = [nn.Linear(1, 1) for _ in range(3)]
    scanned = ScannedLayers(nn.ModuleList(layers), one_by_one)
    assert len(scanned) == 3 and scanned[1] is layers[1] and scanned[-1] is layers[2]
    assert list(scanned[1:]) == layers[1:] and list(scanned[:2]) == layers[:2]
    whole = scanned[:3]
    assert len(whole) == len(list(scanned)) == 1 and callable(whole[0])


def test_a_local_device_refuses_to_scan_in_one_sentence_and_before_it_touches_an_earlier_run(
    tmp_path, cache_dir, runtime
) -> None:
    best = run_qat(qat_run(cache_dir, tmp_path / "qat", loop={"max_steps": 1}), runtime).best
    run = recovery_run(cache_dir, tmp_path / "rec", best, loop={"max_steps": 1})
    run_recovery(run, runtime)
    before = {path: path.read_bytes() for path in run.output.iterdir()}
    with pytest.raises(ConfigError) as error:
        run_recovery(replace(run, execution=ExecutionConfig(scan_layers=True)), runtime, launch="from_scratch")
    assert str(error.value) == "scan_layers=True needs torch_xla, but the device is cpu; drop --scan-layers."
    assert {path: path.read_bytes() for path in run.output.iterdir()} == before


def test_the_local_runtime_itself_has_no_scan(runtime) -> None:
    with pytest.raises(ConfigError, match="needs torch_xla, but the device is cpu"):
        runtime.scan(nn.ModuleList(), torch.zeros(1), {})
