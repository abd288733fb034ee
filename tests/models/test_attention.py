"""Chunked attention: the formula in NumPy, torch's own, and the models that use it in place of torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

from qat_lora import models
from qat_lora.errors import ModelError
from qat_lora.models import attention as replaced
from qat_lora.models.lean import attention
from qat_lora.models.lean.attention import causal_attention
from tests.reference import attention as reference
from tests.tolerances import REWRITTEN_GRADIENT_SHARE, assert_close_to_largest

B, T, D = 2, 11, 4
SCALING = 0.37  # not D ** -0.5, which torch would take by itself

# Probabilities, gradients of scores and results are rounded to bfloat16, by 2^-9 of themselves each; sums are float32.
BFLOAT16_SHARE = 2**-6  # seen: 8.6e-3, of keys, whose gradient is a difference of larger numbers

# (query heads, key-value heads)
HEADS = [(2, 2), (4, 2), (3, 1)]
CHUNKS = [1, 3, 5, T, 512]
WINDOWS = [None, 1, 2, 4, T - 1, T, 100]


def parts(heads=(4, 2), dtype=torch.float64, length=T):
    source = torch.Generator().manual_seed(0)
    shapes = [(B, heads[0], length, D), (B, heads[1], length, D), (B, heads[1], length, D), (B, heads[0], length, D)]
    q, k, v, grad = (torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in (2 * q.detach(), k, v)], grad


def value_and_gradients(function, leaves, grad):
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def ours(window=None):
    return lambda q, k, v: causal_attention(q, k, v, scaling=SCALING, window=window)


def torchs(window=None):
    def function(q, k, v):
        position = torch.arange(q.shape[2])
        back = position[:, None] - position
        mask = (back >= 0) & (back < (window or q.shape[2]))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALING, enable_gqa=True)

    return function


@pytest.fixture(params=CHUNKS, ids=lambda c: f"chunks of {c}")
def chunk(request, monkeypatch) -> int:
    monkeypatch.setattr(attention, "CHUNK_QUERIES", request.param)
    return request.param


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_value_and_all_gradients_are_those_of_the_formula(heads, window, chunk) -> None:
    leaves, grad = parts(heads)
    arrays = [x.detach().numpy() for x in leaves]
    expected = [
        reference.attention(*arrays, SCALING, window),
        *reference.gradients(*arrays, grad.numpy(), SCALING, window),
    ]
    for found, wanted in zip(value_and_gradients(ours(window), leaves, grad), expected, strict=True):
        torch.testing.assert_close(found, torch.from_numpy(wanted), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
def test_value_and_all_gradients_are_those_of_torchs_attention(heads, window, chunk) -> None:
    leaves, grad = parts(heads)
    expected = value_and_gradients(torchs(window), leaves, grad)
    for found, wanted in zip(value_and_gradients(ours(window), leaves, grad), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("window", [None, 3])
def test_the_gradients_are_those_of_finite_differences(window, monkeypatch) -> None:
    monkeypatch.setattr(attention, "CHUNK_QUERIES", 4)
    leaves, _ = parts(length=7)
    torch.autograd.gradcheck(ours(window), leaves)


# Documents of each row, by length; the last of them may be padding.
DOCUMENTS = [[[4, 1, 6], [11]], [[1] * T, [10, 1]], [[5, 3, 3], [2, 9]]]


def positions(documents) -> torch.Tensor:
    return torch.tensor([[t for length in row for t in range(length)] for row in documents])


@pytest.mark.parametrize("window", [None, 1, 3, T])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_a_document_in_a_row_of_several_is_what_it_is_alone(documents, window, chunk) -> None:
    """Value and all gradients, from the formula, document by document."""
    leaves, grad = parts()
    found = value_and_gradients(
        lambda q, k, v: causal_attention(q, k, v, scaling=SCALING, window=window, position_BT=positions(documents)),
        leaves,
        grad,
    )
    for b, row in enumerate(documents):
        for stop, length in zip(np.cumsum(row), row, strict=True):
            alone = [x.detach().numpy()[b : b + 1, :, stop - length : stop] for x in (*leaves, grad)]
            expected = [
                reference.attention(*alone[:3], SCALING, window),
                *reference.gradients(*alone, SCALING, window),
            ]
            for x, wanted in zip(found, expected, strict=True):
                ours = x[b : b + 1, :, stop - length : stop]
                torch.testing.assert_close(ours, torch.from_numpy(wanted), rtol=1e-12, atol=1e-13)


def test_a_row_of_one_document_is_bit_for_bit_what_it_is_without_positions(chunk) -> None:
    leaves, grad = parts(dtype=torch.float32)
    one = torch.arange(T).expand(B, -1)
    with_positions = lambda q, k, v: causal_attention(q, k, v, scaling=SCALING, position_BT=one)  # noqa: E731
    for x, wanted in zip(
        value_and_gradients(with_positions, leaves, grad), value_and_gradients(ours(), leaves, grad), strict=True
    ):
        assert torch.equal(x, wanted)


def test_a_row_of_one_token_sees_itself_alone() -> None:
    (q, k, v), grad = parts(length=1)
    out, d_q, d_k, d_v = value_and_gradients(ours(), (q, k, v), grad)
    assert torch.equal(out, v.repeat_interleave(2, dim=1))
    assert not d_q.any() and not d_k.any()
    torch.testing.assert_close(d_v, grad.unflatten(1, (2, 2)).sum(2), rtol=1e-15, atol=0)


def test_scores_of_any_size_give_numbers() -> None:
    """The largest score of a row is taken off before exp."""
    leaves, grad = parts(dtype=torch.float32)
    found = value_and_gradients(lambda q, k, v: causal_attention(q, k, v, scaling=1e4), leaves, grad)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("window", [None, 3])
def test_float32_and_bfloat16_are_as_near_as_their_digits_allow(window, chunk) -> None:
    exact_leaves, grad = parts()
    low = [x.detach().bfloat16() for x in (*exact_leaves, grad)]
    for dtype, share in ((torch.float32, REWRITTEN_GRADIENT_SHARE), (torch.bfloat16, BFLOAT16_SHARE)):
        *exact, exact_grad = (x.double() for x in low)  # what bfloat16 can hold, so that only the computation differs
        expected = value_and_gradients(torchs(window), [x.requires_grad_() for x in exact], exact_grad)
        *leaves, grad = (x.to(dtype) for x in low)
        found = value_and_gradients(ours(window), [x.detach().requires_grad_() for x in leaves], grad)
        for name, x, wanted in zip("oqkv", found, expected, strict=True):
            assert x.dtype is dtype
            assert_close_to_largest(x.double(), wanted, share=share, name=f"{name} {dtype}")


def test_large_scores_of_bfloat16_queries_are_not_rounded_to_bfloat16() -> None:
    """A score of 30 would be off by 0.06, and its probability by 6%."""
    leaves, _ = parts()
    low = [(12 * x if x is leaves[0] else x).detach().bfloat16() for x in leaves]
    found, expected = ours()(*low), torchs()(*(x.double() for x in low))
    assert_close_to_largest(found.double(), expected, share=2**-7, name="o")  # probabilities and the result rounded


@pytest.mark.parametrize("window", [None, 3])
def test_a_later_token_changes_no_earlier_output(window, chunk) -> None:
    (q, k, v), _ = parts()
    before = ours(window)(q, k, v)
    for position in range(T):
        changed = [x.detach().clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, position] += 1e3
        after = ours(window)(*changed)
        assert torch.equal(after[:, :, :position], before[:, :, :position])
        assert not torch.equal(after[:, :, position], before[:, :, position])
        if window is not None:
            torch.testing.assert_close(after[:, :, position + window :], before[:, :, position + window :])


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    leaves, grad = parts()
    out = ours()(*leaves)
    first = torch.autograd.grad(out, leaves[0], grad.requires_grad_(), create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_no_scores_of_all_queries_by_all_keys_are_kept_or_made(monkeypatch) -> None:
    monkeypatch.setattr(attention, "CHUNK_QUERIES", 8)
    length, sizes = 64, []
    leaves, grad = parts(length=length)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if hasattr(x, "numel"))
            return out

    with Watch():
        value_and_gradients(ours(), leaves, grad)
    assert max(sizes) <= B * 4 * 8 * length < B * 4 * length * length


TINY = {
    "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "Llama": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 3, "head_dim": 4},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},  # windows in some layers
}


def tiny(family: str, *, attention: str = "sdpa", **settings) -> torch.nn.Module:
    config = getattr(transformers, f"{family}Config")(**TINY, **settings)
    config._attn_implementation = attention
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_gives_the_logits_and_gradients_of_torchs_attention(family, monkeypatch) -> None:
    monkeypatch.setattr(attention, "CHUNK_QUERIES", 5)
    model = tiny(family, **FAMILIES[family]).double()
    ids = torch.randint(0, 61, (2, 13))

    def run():
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    expected, expected_grads = run()
    calls = []
    plain = replaced.causal_attention
    monkeypatch.setattr(replaced, "causal_attention", lambda *a, **k: calls.append(k["window"]) or plain(*a, **k))
    models.use_chunked_attention(model)
    logits, grads = run()
    assert calls == {"Mistral": [3, 3], "Qwen2": [None, 3]}.get(family, [None, None])
    # rotary embeddings are float32 in a model of doubles, too; the same ones in both runs
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-8, atol=1e-12, msg=name)


def test_a_window_is_seen_in_the_logits() -> None:
    """Else the comparison of windows with torch's proves nothing."""
    torch.manual_seed(1)
    near = tiny("Mistral", sliding_window=3, head_dim=4)
    far = tiny("Mistral", sliding_window=None, head_dim=4)
    far.load_state_dict(near.state_dict())
    ids = torch.randint(0, 61, (1, 13))
    for model in (near, far):
        models.use_chunked_attention(model)
    with torch.no_grad():
        assert not torch.allclose(near(input_ids=ids).logits, far(input_ids=ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["Qwen3", "Mistral"])
def test_a_later_token_changes_no_earlier_logits(family) -> None:
    model = tiny(family, **FAMILIES[family]).eval()
    models.use_chunked_attention(model)
    ids = torch.randint(1, 61, (1, 13))
    other = ids.clone()
    other[0, 8] = (other[0, 8] + 7) % 61
    with torch.no_grad():
        before, after = (model(input_ids=x, use_cache=False).logits for x in (ids, other))
    assert torch.equal(after[:, :8], before[:, :8])
    assert not torch.equal(after[:, 8:], before[:, 8:])


def test_a_model_whose_attention_caps_its_scores_is_refused() -> None:
    model = tiny("Gemma2", attention="eager", head_dim=4)
    models.use_chunked_attention(model)
    with pytest.raises(ModelError, match=r"Gemma2Attention computes attention with softcap, which is not known on XLA"):
        model(input_ids=torch.arange(9)[None], use_cache=False)


def test_a_mask_and_dropout_are_refused_rather_than_left_out() -> None:
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    module = torch.nn.Linear(1, 1)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    for wrong in ({"attention_mask": mask}, {"attention_mask": None, "dropout": 0.1}):
        with pytest.raises(ModelError, match="Linear computes attention with dropout, a mask or no causality"):
            replaced._chunked_attention(module, q, k, v, **wrong)
    module.is_causal = False
    with pytest.raises(ModelError, match="no causality"):
        replaced._chunked_attention(module, q, k, v, None)
    module.is_causal = True
    assert replaced._chunked_attention(module, q, k, v, None)[0].shape == (1, 5, 2, 4)
