"""The chunked head: the same numbers as the whole computation, and none of its memory or host reads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
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
ALL_ROWS = (torch.arange(S),)  # what a loss is told of its rows here: which they are


def parts(dtype=torch.float64, *, bias=True):
    source = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, H, generator=source, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, H, generator=source, dtype=torch.float64).to(dtype)
    offset = torch.randn(V, generator=source, dtype=torch.float64).to(dtype) if bias else None
    return hidden, weight, offset


def target_and_mask():
    source = torch.Generator().manual_seed(1)
    logp = torch.log_softmax(torch.randn(S, V, generator=source), -1)
    top, ids = logp.topk(K, -1)
    return SparseTarget(ids, top), torch.arange(S) % 4 != 2


def mixed_loss(logits, rows):
    target, mask = target_and_mask()
    labels = torch.arange(S)
    part = SparseTarget(*(x[rows] for x in target))
    kl = sparse_kl(logits, part, mask[rows], temperature=2.0).total
    hard = hard_top1(logits, *part, mask[rows]).total
    return kl + 0.3 * hard + 0.1 * next_token_ce(logits, labels[rows], mask[rows]).total


def soft_cap(logits):
    return 5.0 * torch.tanh(logits / 5.0)


def grads_of(make_loss, tensors):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in tensors]
    loss = make_loss(*leaves)
    (3.0 * loss).backward()
    return loss.detach(), [None if x is None else x.grad for x in leaves]


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, S, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transform", [None, soft_cap])
def test_value_and_all_gradients_are_those_of_the_unchunked_computation(chunk_tokens, bias, transform):
    def whole(hidden, weight, offset):
        return mixed_loss(Head(weight, offset, transform)(hidden), slice(0, S))

    def chunked(hidden, weight, offset):
        return chunked_head_loss(
            hidden, Head(weight, offset, transform), mixed_loss, ALL_ROWS, chunk_tokens=chunk_tokens
        )

    expected, expected_grads = grads_of(whole, parts(bias=bias))
    loss, grads = grads_of(chunked, parts(bias=bias))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("trained", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_requires_a_gradient_gets_one(trained):
    tensors = [x.clone().requires_grad_(r) for x, r in zip(parts(), trained, strict=True)]
    chunked_head_loss(tensors[0], Head(tensors[1], tensors[2]), mixed_loss, ALL_ROWS, chunk_tokens=5).backward()
    assert tuple(x.grad is not None for x in tensors) == trained


def test_it_differentiates_into_what_the_hidden_states_came_from():
    hidden, weight, _ = parts()
    x = hidden.clone().requires_grad_()
    chunked_head_loss(torch.tanh(x), Head(weight), mixed_loss, ALL_ROWS, chunk_tokens=4).backward()
    y = hidden.clone().requires_grad_()
    mixed_loss(F.linear(torch.tanh(y), weight), slice(0, S)).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-11, atol=1e-13)


def test_without_gradients_it_gives_the_same_value():
    hidden, weight, offset = (x.requires_grad_() for x in parts())
    with torch.no_grad():
        value = chunked_head_loss(hidden, Head(weight, offset), mixed_loss, ALL_ROWS, chunk_tokens=4)
    assert not value.requires_grad
    torch.testing.assert_close(value, mixed_loss(Head(weight, offset)(hidden), slice(0, S)).detach())


def test_the_backward_may_run_twice_over_a_retained_graph():
    hidden, weight, _ = parts()
    hidden.requires_grad_()
    loss = chunked_head_loss(hidden, Head(weight), mixed_loss, ALL_ROWS, chunk_tokens=4)
    (once,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (twice,) = torch.autograd.grad(2.0 * loss, hidden)
    torch.testing.assert_close(twice, 2.0 * once, rtol=0, atol=0)


def test_the_loss_function_may_keep_sums_for_the_log():
    hidden, weight, _ = parts()
    seen = []

    def loss_fn(logits, rows):
        value = mixed_loss(logits, rows)
        seen.append((rows, value.detach()))
        return value

    total = chunked_head_loss(hidden.requires_grad_(), Head(weight), loss_fn, ALL_ROWS, chunk_tokens=5)
    assert [rows.tolist() for rows, _ in seen] == [[*range(5)], [*range(5, 10)], [*range(10, 13)]]
    torch.testing.assert_close(sum(value for _, value in seen), total.detach())


def test_bfloat16_hidden_states_get_float32_logits_and_float32_sums():
    hidden, weight, offset = (x.requires_grad_() for x in parts(torch.bfloat16))
    dtypes = set()

    def loss_fn(logits, rows):
        dtypes.add(logits.dtype)
        return mixed_loss(logits, rows)

    loss = chunked_head_loss(hidden, Head(weight, offset), loss_fn, ALL_ROWS, chunk_tokens=1)
    loss.backward()
    assert dtypes == {torch.float32} and loss.dtype == torch.float32
    assert {x.grad.dtype for x in (hidden, weight, offset)} == {torch.bfloat16}
    # The sum over 13 chunks of one row: bfloat16 sums would drift by more than the one rounding at the end.
    rows = [F.linear(hidden[i : i + 1], weight, offset).detach().requires_grad_() for i in range(S)]
    grads = [torch.autograd.grad(mixed_loss(r.float(), slice(i, i + 1)), r)[0] for i, r in enumerate(rows)]
    exact = sum(g[0].double() for g in grads)
    torch.testing.assert_close(offset.grad.double(), exact, rtol=2**-8, atol=1e-6)


def test_under_autocast_it_matches_plain_autograd_under_autocast():
    hidden, weight, offset = parts(torch.float32)

    def whole(*tensors):
        return mixed_loss(Head(tensors[1], tensors[2])(tensors[0]).float(), slice(0, S))

    def chunked(*tensors):
        return chunked_head_loss(tensors[0], Head(tensors[1], tensors[2]), mixed_loss, ALL_ROWS, chunk_tokens=5)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, expected_grads = grads_of(whole, (hidden, weight, offset))
        loss, grads = grads_of(chunked, (hidden, weight, offset))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


class Watch(TorchDispatchMode):
    """Records the sizes that operations return and refuses those that read a tensor on the host."""

    HOST_READS = ("aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.is_nonzero", "aten.equal")

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not str(func).startswith(self.HOST_READS), f"{func} reads a tensor on the host"
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out


def test_the_watch_sees_a_host_read():
    with pytest.raises(AssertionError, match="host"), Watch():
        torch.ones(()).item()


@pytest.mark.parametrize("head_is_trained", [False, True])
def test_it_holds_no_logits_of_all_rows_and_reads_nothing_on_the_host(head_is_trained):
    rows, vocab, chunk = 60, 37, 7
    hidden = torch.randn(rows, H, requires_grad=True)
    weight = torch.randn(vocab, H, requires_grad=head_is_trained)
    teacher = torch.log_softmax(torch.randn(rows, vocab), -1).topk(K, -1)
    target, mask = SparseTarget(teacher.indices, teacher.values), torch.arange(rows) % 5 != 0

    def loss_fn(logits, r):
        part = SparseTarget(*(x[r] for x in target))
        kl = sparse_kl(logits, part, mask[r], temperature=2.0).total
        biased = sparse_kl(logits, part, mask[r], temperature=2.0, support="candidates").total
        ce = next_token_ce(logits, target.ids_SK[r, 0], mask[r]).total
        return kl + biased + hard_top1(logits, *part, mask[r]).total + ce

    with Watch() as watch:
        chunked_head_loss(hidden, Head(weight), loss_fn, (torch.arange(rows),), chunk_tokens=chunk).backward()
    assert watch.operations > 100
    assert watch.largest <= max(chunk * vocab, rows * H, vocab * H)
    assert watch.largest < rows * vocab / 5


def test_a_chunk_size_that_is_not_positive_is_refused():
    hidden, weight, _ = parts()
    with pytest.raises(ValueError, match="chunk_tokens"):
        chunked_head_loss(hidden, Head(weight), mixed_loss, ALL_ROWS, chunk_tokens=0)
