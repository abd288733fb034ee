"""A document in a row of several is to a model what it is alone in a row, however attention is computed.

The same sums in kernels of other lengths: models of doubles agree to 1e-10 of a tensor's largest entry, to 3e-6 (5e-7
seen) where they go through float32, as transformers' eager softmax and Gemma's norms do. No bit of one document depends
on what stands in another.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qat_lora import models
from qat_lora.errors import ModelError
from qat_lora.kd.positions import document_positions
from qat_lora.models.lean import attention
from tests.models.test_attention import FAMILIES, TINY, tiny
from tests.tolerances import assert_close_to_largest

SETTINGS = FAMILIES
LENGTH = 17
DOCUMENTS = [[5, 1, 11], [17], [8, 8, 1]]
FAMILIES = [*FAMILIES, "Gemma3Text"]
IMPLEMENTATIONS = ["sdpa", "eager", "chunked"]


def model_of(family: str, implementation: str) -> nn.Module:
    if family == "Gemma3Text":
        import transformers

        config = transformers.Gemma3TextConfig(
            **TINY, head_dim=4, sliding_window=3, layer_types=["sliding_attention", "full_attention"]
        )
        model = transformers.Gemma3ForCausalLM(config)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
        models.causal_lm(model).set_attn_implementation("eager" if implementation == "eager" else "sdpa")
    else:
        model = tiny(family, attention="eager" if implementation == "eager" else "sdpa", **SETTINGS[family])
    if implementation == "chunked":
        models.use_chunked_attention(model)
    return model


def rows() -> tuple[Tensor, Tensor]:
    """Token ids and positions [B, T]."""
    starts = torch.zeros(len(DOCUMENTS), LENGTH, dtype=torch.bool)
    for row, lengths in zip(starts, DOCUMENTS, strict=True):
        row[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    return torch.randint(1, 61, starts.shape), torch.from_numpy(document_positions(starts.numpy()))


def logits_and_gradients(model: nn.Module, ids_BT: Tensor, positions_BT: Tensor | None, weight_BTV: Tensor):
    logits_BTV = models.causal_lm(model).lm_head(models.trunk_hidden(model, ids_BT, positions_BT))
    leaves = [p for p in model.parameters() if p.requires_grad]
    return logits_BTV.detach(), torch.autograd.grad((logits_BTV * weight_BTV).sum(), leaves)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_of_a_document_do_not_depend_on_its_row(
    family, implementation, recomputed, runtime, monkeypatch
) -> None:
    monkeypatch.setattr(attention, "CHUNK_QUERIES", 5)
    model = model_of(family, implementation).double().train()
    if recomputed:
        models.checkpoint_layers(model, runtime.checkpoint)
    ids_BT, positions_BT = rows()
    weight_BTV = torch.randn(*ids_BT.shape, 61, dtype=torch.float64)
    found, grads = logits_and_gradients(model, ids_BT, positions_BT, weight_BTV)
    expected, sums = torch.empty_like(found), [torch.zeros_like(g) for g in grads]
    for b, lengths in enumerate(DOCUMENTS):
        stop = 0
        for length in lengths:
            one = (slice(b, b + 1), slice(stop, stop + length))
            expected[one], alone = logits_and_gradients(model, ids_BT[one], None, weight_BTV[one])
            sums = [total + grad for total, grad in zip(sums, alone, strict=True)]
            stop += length
    share = 3e-6 if implementation == "eager" or family == "Gemma3Text" else 1e-10
    assert_close_to_largest(found, expected, share=share, name="logits")
    for grad, total in zip(grads, sums, strict=True):
        assert_close_to_largest(grad, total, share=share)
    as_one, _ = logits_and_gradients(model, ids_BT, None, weight_BTV)
    assert (as_one - found)[[0, 2]].abs().amax((1, 2)).min() > 0.01, "boundaries that change nothing prove nothing"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Mistral"])
def test_what_stands_in_another_document_changes_no_bit(family, implementation, runtime) -> None:
    model = model_of(family, implementation).eval()
    ids_BT, positions_BT = rows()
    with torch.no_grad():
        before = models.trunk_hidden(model, ids_BT, positions_BT)
        for b, lengths in enumerate(DOCUMENTS):
            stop = 0
            for length in lengths:
                other = ids_BT.clone()
                other[b, stop : stop + length] = other[b, stop : stop + length] % 60 + 1
                same = torch.ones(ids_BT.shape, dtype=torch.bool)
                same[b, stop : stop + length] = False
                after = models.trunk_hidden(model, other, positions_BT)
                assert torch.equal(after[same], before[same])
                assert not torch.equal(after[~same], before[~same])
                stop += length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_keep_documents_apart_pass_the_check(family, implementation, dtype) -> None:
    models.check_documents(model_of(family, implementation).to(dtype).eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_does_not_is_refused_before_anything_is_built(dtype) -> None:
    import transformers

    config = transformers.OPTConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, ffn_dim=24, word_embed_proj_dim=16
    )
    opt = transformers.OPTForCausalLM(config).eval()
    with torch.no_grad():
        for p in opt.parameters():
            p.add_(0.3 * torch.randn_like(p))
    with pytest.raises(ModelError, match="OPTForCausalLM cannot keep documents in one row apart; .* --packing pad"):
        models.check_documents(opt.to(dtype))
    positionless = tiny("Llama").eval()
    positionless.model.forward = lambda input_ids, use_cache: None
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot keep documents"):
        models.check_documents(positionless)
