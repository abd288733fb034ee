"""The lean norm: transformers' values bit for bit, the formula's gradients."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from qat_lora.models.lean.norms import rms_norm, use_lean_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Qwen3RMSNorm, LlamaRMSNorm])
def test_value_is_transformers_bit_for_bit_and_gradients_are_autograds(kind, dtype) -> None:
    norm = kind(12, eps=1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.uniform_(-1, 2)
    x = torch.randn(3, 5, 12).to(dtype)
    upstream = torch.randn(3, 5, 12).to(dtype)
    found = []
    for function in (norm, lambda x: rms_norm(x, norm.weight, norm.variance_epsilon)):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        found.append((y.detach(), *torch.autograd.grad(y, (leaf, norm.weight), upstream)))
    (theirs, *their_grads), (ours, *our_grads) = found
    assert torch.equal(ours, theirs)
    for mine, reference in zip(our_grads, their_grads, strict=True):
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
        torch.testing.assert_close(mine, reference, **tolerance)


def test_it_keeps_its_input_and_one_number_per_row() -> None:
    kept = []
    x = torch.randn(6, 16, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, torch.ones(16, dtype=torch.bfloat16), 1e-6)
    assert sorted((str(t.dtype), t.numel()) for t in kept) == [
        ("torch.bfloat16", 16), ("torch.bfloat16", 96), ("torch.float32", 6),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [GemmaRMSNorm, Olmo2RMSNorm, Olmo3RMSNorm, GptOssRMSNorm, torch.nn.LayerNorm])
def test_norms_of_another_formula_are_left_alone(kind) -> None:
    """Some are the same function in float32 and round elsewhere in bf16."""
    model = torch.nn.ModuleList([kind(8)])
    use_lean_norms(model)
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("kind", [Qwen3RMSNorm, LlamaRMSNorm])
def test_a_replaced_norm_keeps_its_values_and_each_its_own_eps(kind, dtypes) -> None:
    x_dtype, weight_dtype = (getattr(torch, name) for name in dtypes)
    model = torch.nn.ModuleList([kind(8, eps=eps) for eps in (1e-6, 0.5)]).to(weight_dtype)
    x = torch.randn(4, 8).to(x_dtype)
    before = [norm(x) for norm in model]
    use_lean_norms(model)
    for norm, y in zip(model, before, strict=True):
        assert "forward" in vars(norm) and norm(x).dtype == y.dtype
        assert torch.equal(norm(x), y)
    assert not torch.equal(*before)
