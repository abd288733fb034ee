"""Logits picked apart must not be told from the others by rounding: the tail is their difference."""

from __future__ import annotations

import torch

from qat_lora.kd import (
    Head,
    SparseTarget,
    chunked_head_loss,
    sparse_kl,
)

S, H, V, K = 32, 64, 509, 16


def test_a_small_tail_beside_peaked_bf16_logits_is_that_of_exact_products() -> None:
    """Hidden states and head in bf16, top logits about 13 and a tail of some percent: where 8 bits would drown it."""
    source = torch.Generator().manual_seed(0)
    weight = torch.randn(V, H, generator=source).bfloat16()
    favourites = torch.randint(V, (S, 3), generator=source)
    hidden = (weight[favourites].float().sum(1) * 0.17).bfloat16()
    exact = hidden.double() @ weight.double().T
    assert 9 < exact.amax(1).mean() < 18
    top = (exact + 0.3 * torch.randn(S, V, generator=source)).log_softmax(-1).topk(K, -1)
    tail = 1 - exact.softmax(-1).gather(1, top.indices).sum(1)
    assert 1e-4 < tail.median() < 0.2
    target, mask = SparseTarget(top.indices, top.values.float()), torch.ones(S, dtype=torch.bool)

    def loss_fn(logits, ids, logprobs, mask, picked):
        return sparse_kl(logits, SparseTarget(ids, logprobs), mask, temperature=1.0, picked_SK=picked).total

    leaf = hidden.clone().requires_grad_()
    loss = chunked_head_loss(leaf, Head(weight), loss_fn, (*target, mask), chunk_tokens=7, picked_ids_SJ=target.ids_SK)
    loss.backward()
    reference = hidden.double().requires_grad_()
    double = SparseTarget(top.indices, top.values)
    expected = sparse_kl(reference @ weight.double().T, double, mask, temperature=1.0).total
    expected.backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-4, atol=1e-5)
    error = (leaf.grad.double() - reference.grad).norm() / reference.grad.norm()
    assert error < 2**-7, error  # the gradient itself is handed on in bf16
