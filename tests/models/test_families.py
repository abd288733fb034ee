"""Twenty families of models, tiny and random, from a folder on disk to an export and back; and those that are refused.

Whatever is known of a family is tried through `models.load`, since a model that is built in memory has passed none of
its checks.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from qat_lora import adapters, models
from qat_lora.config import AdapterConfig
from qat_lora.config.presets import scheme
from qat_lora.errors import ModelError
from qat_lora.evaluate import size_of
from qat_lora.export import export_dequantized, probe_logits, verify_export
from qat_lora.models.lean.layers import trunk_and_layers
from qat_lora.quant import CodedLinear, freeze_codes, quantize_model

TINY = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
KV, WIDE = {"num_key_value_heads": 1}, {"num_key_value_heads": 1, "head_dim": 8}
# test name -> transformers' name and settings
FAMILIES = {
    "Llama": ("Llama", KV | {"tie_word_embeddings": False}),
    "Llama tied": ("Llama", KV | {"tie_word_embeddings": True}),
    "Llama biased": ("Llama", KV | {"attention_bias": True, "mlp_bias": True}),
    "SmolLM3": ("SmolLM3", KV),
    "Mistral": ("Mistral", WIDE | {"sliding_window": 5}),
    "Qwen2": ("Qwen2", KV),
    "Qwen3": ("Qwen3", WIDE),
    "Gemma": ("Gemma", WIDE),
    "Gemma2": ("Gemma2", WIDE),
    "Gemma3": ("Gemma3Text", WIDE),
    "Phi": ("Phi", {}),
    "Phi3": ("Phi3", KV),
    "GPT-NeoX": ("GPTNeoX", {}),
    "Falcon": ("Falcon", {"ffn_hidden_size": 24, "bias": True}),
    "StarCoder2": ("Starcoder2", KV),
    "OLMo2": ("Olmo2", KV),
    "Granite": ("Granite", KV | {"logits_scaling": 4.0}),
    "Cohere": ("Cohere", KV | {"logit_scale": 0.125, "use_qk_norm": True}),
    "GLM": ("Glm", WIDE),
    "StableLM": ("StableLm", KV),
    "OPT": ("OPT", {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "OPT projected": ("OPT", {"ffn_dim": 24, "word_embed_proj_dim": 8}),
    "LFM2": ("Lfm2", KV | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
}
# matrices per layer, where they are not q, k, v, o, gate, up, down
COUNTS = {
    "Phi": 6, "Phi3": 4, "GPT-NeoX": 4, "Falcon": 4, "StarCoder2": 6, "GLM": 6, "OPT": 6, "OPT projected": 6, "LFM2": 6,
}  # fmt: skip
MIXTURE = {"num_experts_per_tok": 1, "num_local_experts": 4}
REFUSED = {
    "GPT-2": ("GPT2", {}, r"h\.0\.attn\.c_attn\.weight \(of a Conv1D\) and 7 other matrices .* stay unquantised"),
    "Qwen3-MoE": (
        "Qwen3Moe",
        WIDE | {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
        r"layers\.0\.mlp\.experts\.gate_up_proj holds the experts of a mixture",
    ),
    "Mixtral": ("Mixtral", KV | MIXTURE, r"layers\.0\.mlp\.experts\.gate_up_proj holds the experts of a mixture"),
    "GPT-OSS": ("GptOss", WIDE | MIXTURE, r"layers\.0\.mlp\.experts\.gate_up_proj holds the experts of a mixture"),
    "Falcon-H1": (
        "FalconH1",
        WIDE | {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_state": 8, "mamba_d_head": 8},
        r"layers\.0\.mamba\.in_proj\.weight \(of a Linear\) and 3 other matrices",
    ),
}
VISION = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}


def config_of(name: str, settings: dict) -> transformers.PretrainedConfig:
    return getattr(transformers, f"{name}Config")(**(TINY | {"vocab_size": VOCAB} | settings))


VOCAB = models.identify(models.EMBEDDED).tokenizer_size + 3


def saved(config: transformers.PretrainedConfig, folder: Path) -> Path:
    """A random model of a config with the embedded teacher's tokenizer, as transformers writes them."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    for path in models.resolve(models.EMBEDDED).glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def check_whole_way(loaded: models.Loaded, folder: Path) -> dict[str, str]:
    """Quantise, freeze, export, read back, adapt and measure a loaded model; return its targets."""
    loaded.check(seq_len=32)
    model, targets = loaded.model, models.target_linears(loaded.model)
    quantize_model(model, scheme("q4_g32"), targets)
    student = probe_logits(model, IDS)
    assert size_of(model, stored_bits=loaded.stored_bits).bits_per_weight == pytest.approx(4.5, abs=1)
    freeze_codes(model)
    assert torch.equal(probe_logits(model, IDS), student)
    assert sum(isinstance(m, CodedLinear) for m in model.modules()) == len(targets)
    export_dequantized(model, loaded.tokenizer, folder)
    assert verify_export(model, folder, exact=True) == 0.0
    adapted = adapters.attach(model, targets, AdapterConfig(), base_name="tiny")
    assert torch.equal(probe_logits(adapted, IDS), student)
    assert set(models.target_linears(adapted)) == {f"base_model.model.{n}.base_layer" for n in names_of(adapted)} | {
        f"base_model.model.{n}" for n in set(targets) - names_of(adapted)
    }
    return targets


IDS = torch.arange(40).view(2, 20)


def names_of(adapted: nn.Module) -> set[str]:
    found = {name.split(".lora_A")[0] for name, _ in adapted.named_parameters() if ".lora_A" in name}
    return {name.removeprefix("base_model.model.") for name in found}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_goes_the_whole_way(name, tmp_path) -> None:
    family, settings = FAMILIES[name]
    loaded = models.load(str(saved(config_of(family, settings), tmp_path / "teacher")))
    matrices = {n for n, p in loaded.model.named_parameters() if p.dim() == 2 and "layers." in n or ".h." in n}
    targets = check_whole_way(loaded, tmp_path / "export")
    if name == "LFM2":
        assert len(targets) == 5 + 7
    else:
        assert len(targets) == 2 * COUNTS.get(name, 7)
    assert {n.rpartition(".")[0] for n in matrices if "norm" not in n and not n.endswith("bias")} == set(targets)
    assert set(targets.values()) == {"attention", "mlp"}


def test_a_vision_tower_stays_as_it_is(tmp_path) -> None:
    """Though it has more layers than the text decoder, whose training would never move it."""
    config = transformers.Gemma3Config(
        text_config=TINY | WIDE | {"vocab_size": VOCAB},
        vision_config=VISION | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    loaded = models.load(str(saved(config, tmp_path / "teacher")))
    assert type(loaded.model).__name__ == "Gemma3ForConditionalGeneration"
    targets = check_whole_way(loaded, tmp_path / "export")
    assert len(targets) == 14 and all(name.startswith("model.language_model.layers.") for name in targets)
    loaded.model.train()
    assert models.trunk_hidden(loaded.model, IDS).isfinite().all()
    assert trunk_and_layers(loaded.model) == (trunk := models.decoder(loaded.model), trunk.layers)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_not_covered_says_which_matrix(name, tmp_path) -> None:
    family, settings, said = REFUSED[name]
    loaded = models.load(str(saved(config_of(family, settings), tmp_path)))
    loaded.check(seq_len=32)  # it can be a teacher
    with pytest.raises(ModelError, match=said):
        models.target_linears(loaded.model)
    assert size_of(loaded.model, stored_bits=loaded.stored_bits).bits_per_weight == 32


def test_a_model_whose_decoder_is_not_found_is_refused(tmp_path) -> None:
    settings = WIDE | {"num_local_experts": 2, "intermediate_size_mlp": 24}
    model = transformers.Llama4ForCausalLM(config_of("Llama4Text", settings))
    with pytest.raises(ModelError, match="Llama4ForCausalLM does not say which part of it is the decoder"):
        models.check_head(model)


def load_of(name: str, settings: dict, folder: Path) -> models.Loaded:
    return models.load(str(saved(config_of(name, settings), folder)))


def test_attention_is_fused_where_that_is_known_and_else_the_familys_own(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, logger="qat_lora")
    for name, attention in (("Llama", "sdpa"), ("Gemma2", "eager"), ("Bloom", "eager")):
        loaded = load_of(name, WIDE if name == "Gemma2" else {}, tmp_path / name)
        assert loaded.model.config._attn_implementation == attention
        loaded.check(seq_len=32)
    assert [r.getMessage() for r in caplog.records if "attention" in r.getMessage()] == [
        f"{name}ForCausalLM has no fused attention: its own is used, which takes more memory"
        for name in ("Gemma2", "Bloom")
    ]


def test_a_model_with_no_known_attention_is_refused_and_the_advice_is_not_to_download_it_again(
    teacher_dir, monkeypatch
) -> None:
    def refuse(folder, *, attn_implementation, **words):
        raise ValueError(f'Specified `attn_implementation="{attn_implementation}"` is not supported.')

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(ModelError, match=r"runs with neither sdpa nor eager attention \(.*eager.*\); use another"):
        models.load(str(teacher_dir))


def test_a_file_that_cannot_be_read_is_not_read_twice(teacher_dir, monkeypatch) -> None:
    asked = []

    def fail(folder, *, attn_implementation, **words):
        asked.append(attn_implementation)
        raise ValueError("header too large")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ModelError, match=r"no causal LM can be read in .* \(header too large\); check config.json"):
        models.load(str(teacher_dir))
    assert asked == ["sdpa"]


@pytest.mark.parametrize("name", ["Falcon", "GPTJ"])
def test_xla_says_where_its_attention_cannot_stand_in(name) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config_of(name, {"rotary_dim": 4} if name == "GPTJ" else {}))
    said = f"{name}ForCausalLM does not let its attention be replaced, which XLA needs; use --device cpu or cuda"
    with pytest.raises(ModelError, match=said):
        models.use_chunked_attention(model)


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Other(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


def test_only_a_linear_that_computes_the_same_becomes_torchs() -> None:
    """By what it does with its own settings: two of one class may differ."""
    model = nn.ModuleList([Doubling(3, 2), Other(7, 5), Scaled(7, 5), Scaled(7, 5, bias=False), nn.Linear(3, 2)])
    model[2].scale = 2.0
    weight, state = model[1].weight, torch.get_rng_state()
    models.loading._use_plain_linears(model)
    assert [type(m) for m in model] == [Doubling, nn.Linear, Scaled, nn.Linear, nn.Linear]
    assert model[1].weight is weight and (model[1].in_features, model[1].out_features) == (7, 5)
    assert torch.equal(torch.get_rng_state(), state)


def mixture(*, rows_of_gate: int) -> nn.Module:
    """A Llama whose second layer is a mixture of two Linears of experts, not fused."""
    model = transformers.LlamaForCausalLM(config_of("Llama", KV))
    layer = model.model.layers[1]
    layer.mlp = nn.ModuleDict({
        "gate": nn.Linear(16, rows_of_gate, bias=False),
        "experts": nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2)),
    })  # fmt: skip
    return model


def test_a_router_stays_exact_and_the_experts_beside_it_are_targets() -> None:
    targets = models.target_linears(mixture(rows_of_gate=2))
    experts = {name for name in targets if "layers.1.mlp" in name}
    assert experts == {f"model.layers.1.mlp.experts.{i}" for i in range(2)}
    assert "model.layers.1.mlp.gate" in models.target_linears(mixture(rows_of_gate=16)), "a projection, by its size"


def test_a_matrix_outside_of_known_blocks_is_named() -> None:
    model = transformers.LlamaForCausalLM(config_of("Llama", KV))
    model.model.layers[1].extra = nn.Linear(16, 3, bias=False)
    said = r"model\.layers\.1\.extra\.weight \(of a Linear\) and 0 other matrices of LlamaForCausalLM"
    with pytest.raises(ModelError, match=said):
        models.target_linears(model)


class PreNormBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(8, 8))
        self.inner = nn.ModuleDict({"extra": nn.Linear(16, 3, bias=False)})


class NormOfChannels(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


def tiny_tower() -> nn.Module:
    """A model of its own, as Phi-4-multimodal's decoder holds one for images."""
    return transformers.LlamaModel(config_of("Llama", KV))


@pytest.mark.parametrize(
    ("place", "module", "said"),
    [
        ("model.layers.1", PreNormBlock(), r"layers\.1\.odd\.mix \(of a PreNormBlock\) and 1 other"),
        ("model.layers.1", NormOfChannels(8, 8), r"layers\.1\.odd\.weight \(of a NormOfChannels\) and 0 other"),
        ("model", nn.Linear(16, 16), r"model\.odd\.weight \(of a Linear\) and 0 other"),
        ("model", nn.ModuleList([nn.Linear(16, 16)]), r"model\.odd\.0\.weight \(of a Linear\) and 0 other"),
        ("model", tiny_tower(), r"model\.odd\.layers\.0\.self_attn\.q_proj\.weight \(of a Linear\) and 13 other"),
        ("model.layers.1", nn.Conv1d(16, 16, 3), r"layers\.1\.odd\.weight \(of a Conv1d\) and 0 other"),
    ],
)
def test_no_matrix_of_the_decoder_hides_wherever_it_is(place, module, said) -> None:
    model = transformers.LlamaForCausalLM(config_of("Llama", KV))
    model.get_submodule(place).odd = module
    with pytest.raises(ModelError, match=said):
        models.target_linears(model)


def test_a_norm_with_a_row_for_each_head_and_a_depthwise_kernel_stay_as_they_are() -> None:
    model = transformers.LlamaForCausalLM(config_of("Llama", KV))
    before = models.target_linears(model)
    model.model.layers[1].odd = nn.ModuleList([NormOfChannels(2, 8), nn.Conv1d(16, 16, 3, groups=16)])
    assert models.target_linears(model) == before


def test_projections_of_embeddings_stay_exact_are_counted_so_and_said_once(caplog) -> None:
    caplog.set_level(logging.INFO, logger="qat_lora")
    models.families._say_unquantised.cache_clear()
    model = transformers.OPTForCausalLM(config_of(*FAMILIES["OPT projected"]))
    targets = models.target_linears(model)
    quantize_model(model, scheme("q4_g32"), targets)
    assert type(model.model.decoder.project_in) is type(model.model.decoder.project_out) is nn.Linear
    whole = size_of(model, stored_bits=16).size_bytes
    model.model.decoder.project_in = model.model.decoder.project_out = None
    assert whole - size_of(model, stored_bits=16).size_bytes == 2 * (16 * 8) * 2
    said = "OPTForCausalLM: project_in, project_out lie outside the layers and stay in full precision"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_what_a_loaded_model_says_of_itself(tmp_path) -> None:
    loaded = load_of("Qwen3", WIDE, tmp_path)
    assert (loaded.context, loaded.stored_bits, loaded.identity.vocab_size) == (64, 32, VOCAB)
    loaded.check(seq_len=64, documents=True)
    with pytest.raises(ModelError, match="seq_len=65 tokens exceed the model's context of 64; use --seq-len 64"):
        loaded.check(seq_len=65)
    plain = loaded.model.model.forward
    loaded.model.model.forward = lambda input_ids, **_: plain(input_ids)
    loaded.check(seq_len=8)
    with pytest.raises(ModelError, match="Qwen3ForCausalLM cannot keep documents"):
        loaded.check(seq_len=8, documents=True)


def test_activation_bytes_know_every_familys_width_of_the_mlp() -> None:
    def counted(name: str, settings: dict) -> int:
        model = transformers.AutoModelForCausalLM.from_config(config_of(name, settings))
        return models.activation_bytes(model, 10, torch.bfloat16, lean=False)

    wide = 2 * 10 * 1.5 * (8 * 16 + 4 * 16 + 5 * 24) * 2
    assert counted("Llama", {}) == wide
    assert counted("OPT", FAMILIES["OPT"][1]) == counted("Falcon", FAMILIES["Falcon"][1]) == wide
