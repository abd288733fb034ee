"""Logits picked apart from the head: the same loss and gradient as gathered ones, and nothing scattered."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qat_lora.kd import (
    Head,
    SparseTarget,
    chunked_head_loss,
    hard_top1,
    next_token_ce,
    sparse_kl,
)

S, H, V, K = 13, 6, 31, 4
ORDER = torch.randperm(K, generator=torch.Generator().manual_seed(5))  # candidates stand in any order


def soft_cap(logits):
    return 5.0 * torch.tanh(logits / 5.0)


def parts(*, bias, k=K):
    source = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, H, generator=source, dtype=torch.float64)
    weight = torch.randn(V, H, generator=source, dtype=torch.float64)
    offset = torch.randn(V, generator=source, dtype=torch.float64) if bias else None
    logp = torch.log_softmax(torch.randn(S, V, generator=source, dtype=torch.float64), -1)
    values, ids = logp.topk(k, -1)
    if k == K:
        values, ids = values[:, ORDER], ids[:, ORDER]
    labels = torch.randint(V, (S,), generator=source)
    labels[3] = ids[3, 0]  # a label may be a candidate too: its logit is picked twice
    return hidden.requires_grad_(), weight, offset, SparseTarget(ids, values), labels


MASK = torch.arange(S) % 4 != 2

LOSSES = {
    "tail": lambda u, t, y, m, p: sparse_kl(u, t, m, temperature=2.0, picked_SK=p and p[0]).total,
    "candidates": lambda u, t, y, m, p: (
        sparse_kl(u, t, m, temperature=2.0, support="candidates", picked_SK=p and p[0]).total
    ),
    "hard": lambda u, t, y, m, p: hard_top1(u, *t, m, picked_SK=p and p[0]).total,
    "ce": lambda u, t, y, m, p: next_token_ce(u, y, m, picked_S=p and p[1]).total,
}
LOSSES["all"] = lambda *given: sum(
    weight * LOSSES[name](*given) for weight, name in ((1.0, "tail"), (0.3, "hard"), (0.2, "ce"))
)


def run(loss, *, picks, bias, transform, chunk_tokens=5, k=K):
    hidden, weight, offset, target, labels = parts(bias=bias, k=k)

    def chunk_loss(logits, ids, logprobs, labels, mask, scale, picked=None):
        apart = None if picked is None else (picked[:, :k], picked[:, -1])
        return loss(logits, SparseTarget(ids, logprobs), labels, mask, apart) / scale

    ids = torch.cat([target.ids_SK, labels[:, None]], 1)
    total = chunked_head_loss(
        hidden, Head(weight, offset, transform), chunk_loss, (*target, labels, MASK), chunk_tokens=chunk_tokens,
        constants=(torch.tensor(7.0, dtype=torch.float64),), picked_ids_SJ=ids if picks else None,
    )  # fmt: skip
    return total.detach(), torch.autograd.grad(3.0 * total, hidden)[0]


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
@pytest.mark.parametrize("transform", [None, soft_cap])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradient_are_those_of_gathered_logits(loss, bias, transform, chunk_tokens) -> None:
    settings = {"bias": bias, "transform": transform, "chunk_tokens": chunk_tokens}
    expected, expected_grad = run(LOSSES[loss], picks=False, **settings)
    value, grad = run(LOSSES[loss], picks=True, **settings)
    # The tail's mass is the whole less the candidates': here a tenth of it at least, so a digit of float64 is lost.
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-13)
    assert grad[MASK].any() and not grad[~MASK].any()


@pytest.mark.parametrize("support", ["full", "candidates"])
def test_where_all_tokens_are_candidates_there_is_no_tail(support) -> None:
    def loss(u, t, y, m, p):
        return sparse_kl(u, t, m, temperature=2.0, support=support, picked_SK=p and p[0]).total

    expected, expected_grad = run(loss, picks=False, bias=True, transform=None, k=V)
    value, grad = run(loss, picks=True, bias=True, transform=None, k=V)
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-14)


def test_without_gradients_the_value_is_the_same() -> None:
    expected, _ = run(LOSSES["all"], picks=True, bias=True, transform=soft_cap)
    with torch.no_grad():
        hidden, weight, offset, target, labels = parts(bias=True)

        def chunk_loss(logits, ids, logprobs, labels, mask, picked):
            part = SparseTarget(ids, logprobs)
            return LOSSES["all"](logits, part, labels, mask, (picked[:, :K], picked[:, -1])) / 7.0

        ids = torch.cat([target.ids_SK, labels[:, None]], 1)
        value = chunked_head_loss(
            hidden, Head(weight, offset, soft_cap), chunk_loss, (*target, labels, MASK), chunk_tokens=5,
            picked_ids_SJ=ids,
        )  # fmt: skip
    assert not value.requires_grad
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_a_trained_head_is_refused_since_its_picked_rows_would_get_no_gradient(trained) -> None:
    hidden, weight, offset, target, _ = parts(bias=True)
    {"weight": weight, "bias": offset}[trained].requires_grad_()
    with pytest.raises(ValueError, match="frozen head only"):
        chunked_head_loss(
            hidden, Head(weight, offset), lambda *_, picked: picked.sum(), target, chunk_tokens=5,
            picked_ids_SJ=target.ids_SK,
        )  # fmt: skip


def test_a_bfloat16_head_gives_float32_logits_and_a_gradient_in_its_own_dtype() -> None:
    hidden, weight, offset, target, _ = parts(bias=True)
    low = hidden.detach().bfloat16().requires_grad_()
    dtypes, seen = set(), []

    def loss(logits, ids, logprobs, picked):
        dtypes.update((logits.dtype, picked.dtype))
        seen.append(picked.detach().double())
        mask = torch.ones(len(ids), dtype=torch.bool)
        return sparse_kl(logits, SparseTarget(ids, logprobs), mask, temperature=1.0, picked_SK=picked).total

    rows = (target.ids_SK, target.logprobs_SK.float())
    value = chunked_head_loss(
        low, Head(weight.bfloat16(), offset.bfloat16()), loss, rows, chunk_tokens=5, picked_ids_SJ=target.ids_SK
    )
    value.backward()
    assert dtypes == {torch.float32} and value.dtype == torch.float32
    exact = [x.detach().bfloat16().double() for x in (hidden, weight, offset)]
    torch.testing.assert_close(
        torch.cat(seen), Head(*exact[1:])(exact[0]).gather(-1, target.ids_SK), rtol=1e-5, atol=1e-5
    )
    leaf = exact[0].requires_grad_()
    mask = torch.ones(S, dtype=torch.bool)
    whole = sparse_kl(Head(*exact[1:])(leaf), target, mask, temperature=1.0).total
    torch.testing.assert_close(value.double(), whole, rtol=1e-2, atol=0)
    (exact_grad,) = torch.autograd.grad(whole, leaf)
    # the logits of [c, V] and their gradient have eight binary digits
    assert (low.grad.double() - exact_grad).abs().max() <= 2e-2 * exact_grad.abs().max()


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.of_width = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.shape[-1:] == (V,) for x in (*args, out)):
            self.of_width.add(str(func).split(".")[1])
        return out


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_is_gathered_from_or_scattered_into_the_logits(loss) -> None:
    with Operations() as seen:
        run(LOSSES[loss], picks=True, bias=False, transform=None)
    assert not any(word in name for name in seen.of_width for word in ("gather", "scatter", "index")), seen.of_width
    with Operations() as seen:
        run(LOSSES[loss], picks=False, bias=False, transform=None)
    scattered = any(word in name for name in seen.of_width for word in ("gather", "scatter", "nll"))
    assert scattered, f"the watch sees nothing: {seen.of_width}"


@pytest.mark.parametrize("mass", [0.3, 1e-2, 1e-4, 1e-6])
def test_the_picked_tail_is_off_by_1e_7_of_the_whole_mass(mass) -> None:
    """What `sparse_kl` documents: so the loss is off by t/q_tail times that, and no more as the tail gets small."""
    rows = 64
    source = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, V, generator=source, dtype=torch.float64)
    ids = torch.stack([torch.randperm(V, generator=source)[:K] for _ in range(rows)])
    inside = torch.zeros(rows, V, dtype=torch.bool).scatter(-1, ids, True)
    shift = logits.masked_fill(inside, -math.inf).logsumexp(-1) - logits.masked_fill(~inside, -math.inf).logsumexp(-1)
    logits = logits + inside * (shift + math.log((1 - mass) / mass))[:, None]  # the tail has this share exactly
    low = logits.float()
    q_tail = torch.softmax(low.double(), -1).masked_fill(inside, 0).sum(-1)
    assert q_tail.mean().item() == pytest.approx(mass, rel=1e-3)
    teacher = torch.log_softmax(torch.randn(rows, K, generator=source), -1) + math.log(0.9)  # t = 0.1
    target, mask = SparseTarget(ids, teacher), torch.ones(rows, dtype=torch.bool)
    gathered = low.gather(-1, ids)
    for row in range(rows):
        part, one = SparseTarget(*(x[row : row + 1] for x in target)), mask[:1]
        exact = sparse_kl(low[row : row + 1].double(), part, one, temperature=1.0).total.item()
        picked = sparse_kl(
            low[row : row + 1], part, one, temperature=1.0, picked_SK=gathered[row : row + 1]
        ).total.item()
        # sums of 31 terms of float32: a few times 2^-24 of the whole, and the KL's own rounding
        assert abs(picked - exact) <= 0.1 * 4 * 2**-24 / mass + 4e-6, row


def test_a_tail_below_rounding_gives_a_finite_loss_and_gradient() -> None:
    logits = torch.full((1, V), -200.0)
    logits[0, :K] = 0.0
    target = SparseTarget(torch.arange(K)[None], torch.log(torch.full((1, K), 0.9 / K)))
    picked = logits[:, :K].clone().requires_grad_()
    logits.requires_grad_()
    loss = sparse_kl(logits, target, torch.ones(1, dtype=torch.bool), temperature=1.0, picked_SK=picked).total
    loss.backward()
    floor = 24 * math.log(2)  # the tail has 2^-24 of the whole at least
    expected = 0.9 * math.log(0.9) + 0.1 * (math.log(0.1) + floor)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert logits.grad.isfinite().all() and picked.grad.isfinite().all()
