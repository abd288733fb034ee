"""Loading, identity, and the split into trunk and head, over the families that do something to their logits."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers

from qat_lora import models
from qat_lora.errors import ModelError
from qat_lora.models.identity import tokenizer_digest

TINY = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
FAMILIES = {
    "Llama": {"num_key_value_heads": 1},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 8},
    "Gemma2": {"num_key_value_heads": 1, "head_dim": 8, "final_logit_softcapping": 3.0},
    "Cohere": {"num_key_value_heads": 1, "logit_scale": 0.125},
    "Granite": {"num_key_value_heads": 1, "logits_scaling": 4.0},
    "Phi": {},
}


def tiny(family: str) -> torch.nn.Module:
    config = getattr(transformers, f"{family}Config")(
        **TINY, **FAMILIES[family], pad_token_id=0, bos_token_id=0, eos_token_id=0
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_trunk_and_head_give_the_models_own_logits(family: str) -> None:
    models.check_head(tiny(family))


def test_a_head_that_is_not_understood_is_refused(monkeypatch) -> None:
    model = tiny("Gemma2")
    head = models.head_parts(model, torch.float32)
    monkeypatch.setattr(models.forward, "head_parts", lambda *_: head._replace(transform=None))
    with pytest.raises(ModelError, match="Gemma2ForCausalLM does something to its logits"):
        models.check_head(model)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Phi"])
def test_targets_are_the_blocks_linears_and_not_the_head(family: str) -> None:
    model = tiny(family)
    targets = models.target_linears(model)
    linears = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert set(targets) == {name for name in linears if "lm_head" not in name}
    assert {targets[name] for name in targets if "attn" in name} == {"attention"}
    assert {targets[name] for name in targets if "mlp" in name} == {"mlp"}


def test_a_model_without_linears_is_refused_by_name() -> None:
    config = transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(ModelError, match="Conv1D"):
        models.target_linears(transformers.GPT2LMHeadModel(config))


def test_identity_follows_the_content_not_the_place(teacher_dir, tmp_path) -> None:
    shutil.copytree(teacher_dir, tmp_path / "copy")
    ours, copy = models.load(str(teacher_dir)).identity, models.load(str(tmp_path / "copy")).identity
    assert (ours.weights, ours.tokenizer) == (copy.weights, copy.tokenizer)
    assert ours.name != copy.name


def test_the_tokenizers_digest_is_not_moved_by_use(teacher_dir) -> None:
    tokenizer = models.load_tokenizer(teacher_dir)
    before = tokenizer_digest(tokenizer)
    tokenizer(["the fox", "a dog and a fox"], padding=True, truncation=True, max_length=3)
    assert tokenizer_digest(tokenizer) == before


def test_the_embedded_teacher_is_what_its_record_says() -> None:
    loaded = models.load(models.EMBEDDED)
    parameters = sum(p.numel() for p in loaded.model.parameters())
    assert 2e6 <= parameters <= 4e6
    assert loaded.model.config.model_type == "qwen3"
    assert sum(p.stat().st_size for p in models.resolve(models.EMBEDDED).iterdir()) <= 8e6
    ids = loaded.tokenizer("Return the ", return_tensors="pt")["input_ids"]
    assert loaded.tokenizer.decode(ids[0]) == "Return the "
