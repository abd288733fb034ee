"""Every loss against the NumPy oracle and against float64 autograd of the dense formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from qat_lora.kd import (
    SparseTarget,
    hard_top1,
    kd_soft_ce,
    next_token_ce,
    soft_ce,
    sparse_kl,
)
from tests.reference import kd as reference

S, V, K = 7, 23, 5


def logits(seed, *, rows=S, vocab=V, spread=2.0, dtype=torch.float64):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=source, dtype=torch.float64).mul(spread).to(dtype)


def sparse(teacher_SV, k=K, temperature=1.0, *, shuffled=False):
    logp = torch.log_softmax(teacher_SV.double() / temperature, -1)
    top, ids = logp.topk(k, -1)
    if shuffled:
        order = torch.randperm(k, generator=torch.Generator().manual_seed(3))
        top, ids = top[:, order], ids[:, order]
    return SparseTarget(ids, top.to(teacher_SV.dtype))


def some_rows(rows=S):
    return torch.arange(rows) % 3 != 1


def gradient(function, x):
    x = x.detach().clone().requires_grad_()
    function(x).backward()
    return x.grad


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_soft_ce_is_the_formula(temperature):
    student, teacher, mask = logits(0), logits(1), some_rows()
    total, count = soft_ce(student, teacher, temperature, mask)
    expected = reference.soft_ce(student.numpy(), teacher.numpy(), temperature, mask.numpy())
    assert total.item() == pytest.approx(expected[0], rel=1e-12)
    assert count.item() == expected[1]
    mean = kd_soft_ce(student.view(1, S, V), teacher.view(1, S, V), temperature)
    whole, rows = reference.soft_ce(student.numpy(), teacher.numpy(), temperature, np.ones(S, bool))
    assert mean.item() == pytest.approx(whole / rows, rel=1e-12)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("support", "oracle"), [("full", "tail_bucket_kl"), ("candidates", "candidates_kl")])
def test_sparse_kl_is_the_formula_whatever_the_order_of_candidates(temperature, shuffled, support, oracle):
    student, mask = logits(0), some_rows()
    target = sparse(logits(1), temperature=temperature, shuffled=shuffled)
    total, count = sparse_kl(student, target, mask, temperature=temperature, support=support)
    arrays = (x.numpy() for x in (student, *target, mask))
    expected = getattr(reference, oracle)(*arrays, temperature)
    assert total.item() == pytest.approx(expected[0], rel=1e-11)
    assert count.item() == expected[1]


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("k", [1, K, V - 1])
def test_the_gradient_of_the_tail_bucket_is_its_finite_difference(temperature, k):
    student, mask = logits(0, rows=3), torch.tensor([True, False, True])
    target = sparse(logits(1, rows=3), k, temperature)

    def oracle(x):
        arrays = (y.numpy() for y in (*target, mask))
        return reference.tail_bucket_kl(x, *arrays, temperature)[0]

    grad = gradient(lambda x: sparse_kl(x, target, mask, temperature=temperature).total, student)
    np.testing.assert_allclose(grad.numpy(), reference.finite_difference(oracle, student.numpy()), atol=2e-8)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_gradient_of_the_tail_bucket_is_that_of_the_dense_formula(temperature):
    student, mask, target = logits(0), some_rows(), sparse(logits(1), temperature=temperature)

    def dense(x):
        q = torch.softmax(x / temperature, -1)
        is_candidate = torch.zeros(S, V, dtype=torch.bool).scatter(-1, target.ids_SK, True)
        p = target.logprobs_SK.exp()
        tail, q_tail = 1 - p.sum(-1), torch.where(is_candidate, 0.0, q).sum(-1)
        loss = (p * (p / q.gather(-1, target.ids_SK)).log()).sum(-1) + tail * (tail / q_tail).log()
        return loss[mask].sum() * temperature**2

    ours = gradient(lambda x: sparse_kl(x, target, mask, temperature=temperature).total, student)
    torch.testing.assert_close(ours, gradient(dense, student), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_with_all_tokens_as_candidates_it_is_the_soft_ce_less_the_teachers_entropy(temperature):
    student, teacher, mask = logits(0), logits(1), some_rows()
    target = sparse(teacher, V, temperature, shuffled=True)
    sparse_loss = sparse_kl(student, target, mask, temperature=temperature)
    full = soft_ce(student, teacher, temperature, mask)
    entropy = reference.entropy(teacher.numpy(), temperature, mask.numpy())
    assert sparse_loss.total.item() == pytest.approx(full.total.item() - entropy, rel=1e-11)
    torch.testing.assert_close(
        gradient(lambda x: sparse_kl(x, target, mask, temperature=temperature).total, student),
        gradient(lambda x: soft_ce(x, teacher, temperature, mask).total, student),
        rtol=1e-11,
        atol=1e-13,
    )


def test_it_is_zero_with_zero_gradient_where_student_and_teacher_agree():
    teacher = logits(1)
    grad = gradient(lambda x: sparse_kl(x, sparse(teacher), some_rows(), temperature=1.0).total, teacher)
    assert grad.abs().max() < 1e-15
    assert abs(sparse_kl(teacher, sparse(teacher), some_rows(), temperature=1.0).total) < 1e-14


def test_it_never_exceeds_the_kl_over_the_vocabulary_and_grows_with_k():
    student, teacher, mask = logits(0), logits(1), torch.ones(S, dtype=torch.bool)
    values = [sparse_kl(student, sparse(teacher, k), mask, temperature=1.0).total.item() for k in range(1, V + 1)]
    assert values == sorted(values)


def test_renormalised_candidates_are_biased_and_the_tail_bucket_is_not():
    """A student that has moved its mass off the candidates: only the tail bucket sees it, and repairs it."""
    teacher, mask = logits(1), torch.ones(S, dtype=torch.bool)
    target = sparse(teacher)
    is_candidate = torch.zeros(S, V, dtype=torch.bool).scatter(-1, target.ids_SK, True)
    student = torch.where(is_candidate, teacher, teacher + 6.0)
    assert sparse_kl(student, target, mask, temperature=1.0, support="candidates").total.abs() < 1e-12
    assert sparse_kl(student, target, mask, temperature=1.0, support="full").total > S * 0.5
    biased = gradient(lambda x: sparse_kl(x, target, mask, temperature=1.0, support="candidates").total, student)
    honest = gradient(lambda x: sparse_kl(x, target, mask, temperature=1.0).total, student)
    assert biased.abs().max() < 1e-12
    assert (honest[~is_candidate] > 0).all(), "descent must take mass from the non-candidates"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, -80.0, 80.0])
def test_extreme_logits_give_finite_values_and_gradients(dtype, offset):
    student = logits(0, spread=30.0, dtype=dtype) + offset
    target = sparse(logits(1, spread=30.0, dtype=torch.float32))
    for support in ("full", "candidates"):
        total = sparse_kl(student, target, some_rows(), temperature=1.0, support=support).total
        grad = gradient(
            lambda x, s=support: sparse_kl(x, target, some_rows(), temperature=1.0, support=s).total, student
        )
        assert total.dtype == torch.float32
        assert torch.isfinite(total) and torch.isfinite(grad).all()


def test_a_tiny_student_tail_keeps_its_precision():
    """1 - sum_k q_k would be 0 here in float32; the log-sum-exp over the others is exact."""
    student = torch.tensor([[40.0, 0.0, 0.0, 0.0]])
    target = SparseTarget(torch.tensor([[0]]), torch.tensor([[math.log(0.5)]]))
    total = sparse_kl(student, target, torch.tensor([True]), temperature=1.0).total
    expected = reference.tail_bucket_kl(student.numpy(), [[0]], [[math.log(0.5)]], [True], 1.0)[0]
    assert total.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("k", [K, V])
@pytest.mark.parametrize("excess", [0.0, 1e-3])
def test_rounding_that_makes_the_candidates_sum_to_more_than_one_adds_no_tail(k, excess):
    student = logits(0, dtype=torch.float32)
    ids = torch.arange(k).expand(S, k)
    target = SparseTarget(ids, torch.full((S, k), math.log((1 + excess) / k)))
    mask = torch.ones(S, dtype=torch.bool)
    total = sparse_kl(student, target, mask, temperature=1.0).total
    logq = torch.log_softmax(student.double(), -1)
    p = (1 + excess) / k
    expected = (p * (math.log(p) - logq[:, :k])).sum()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    grad = gradient(lambda x: sparse_kl(x, target, mask, temperature=1.0).total, student)
    assert torch.isfinite(grad).all()


def test_forbidden_candidates_and_certain_teachers_give_no_nan():
    target = SparseTarget(torch.tensor([[2, 0, 1]] * S), torch.tensor([[0.0, -math.inf, -1e4]] * S))
    student, mask = logits(0, dtype=torch.float32), torch.ones(S, dtype=torch.bool)
    expected = -torch.log_softmax(student, -1)[:, 2].sum()
    assert sparse_kl(student, target, mask, temperature=1.0).total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.isfinite(gradient(lambda x: sparse_kl(x, target, mask, temperature=1.0).total, student)).all()


def test_hard_top1_takes_the_most_probable_candidate_wherever_it_stands():
    student, mask = logits(0), some_rows()
    target = sparse(logits(1), shuffled=True)
    assert (target.logprobs_SK.argmax(-1) != 0).any()
    best = logits(1).argmax(-1)
    total, count = hard_top1(student, *target, mask)
    expected = reference.label_ce(student.numpy(), best.numpy(), mask.numpy())
    assert (total.item(), count.item()) == (pytest.approx(expected[0], rel=1e-12), expected[1])


def test_next_token_ce_is_the_formula_and_ignores_what_masked_labels_hold():
    student, mask = logits(0), some_rows()
    labels = torch.arange(S) % V
    expected = reference.label_ce(student.numpy(), labels.numpy(), mask.numpy())
    total, count = next_token_ce(student, torch.where(mask, labels, -100), mask)
    assert (total.item(), count.item()) == (pytest.approx(expected[0], rel=1e-12), expected[1])
    expected_grad = gradient(
        lambda x: torch.nn.functional.cross_entropy(x[mask], labels[mask], reduction="sum"), student
    )
    ours = gradient(lambda x: next_token_ce(x, torch.where(mask, labels, 10**6), mask).total, student)
    torch.testing.assert_close(ours, expected_grad, rtol=1e-12, atol=1e-15)


def all_losses(student, teacher, target, mask):
    labels = torch.arange(len(mask)) % V
    return {
        "soft": soft_ce(student, teacher, 2.0, mask),
        "full": sparse_kl(student, target, mask, temperature=2.0),
        "candidates": sparse_kl(student, target, mask, temperature=2.0, support="candidates"),
        "hard": hard_top1(student, *target, mask),
        "next": next_token_ce(student, labels, mask),
    }


def test_padding_never_counts_even_where_it_holds_infinities():
    student, teacher, mask = logits(0), logits(1), some_rows()
    target = sparse(teacher, temperature=2.0)
    whole = all_losses(student, teacher, target, mask)
    spoilt = all_losses(
        torch.where(mask[:, None], student, torch.inf),
        torch.where(mask[:, None], teacher, torch.nan),
        SparseTarget(target.ids_SK, torch.where(mask[:, None], target.logprobs_SK, torch.nan)),
        mask,
    )
    for name, (total, count) in whole.items():
        assert spoilt[name].total.item() == total.item(), name
        assert spoilt[name].count.item() == count.item() == mask.sum(), name
    grads = gradient(lambda x: sparse_kl(x, target, mask, temperature=1.0).total, student)
    assert (grads[~mask] == 0).all() and (grads[mask] != 0).any()


def test_sums_and_counts_add_up_over_any_split_of_the_rows():
    student, teacher, mask = logits(0), logits(1), some_rows()
    target = sparse(teacher, temperature=2.0)
    whole = all_losses(student, teacher, target, mask)
    labels = torch.arange(S) % V

    def picked(rows):
        return SparseTarget(target.ids_SK[rows], target.logprobs_SK[rows])

    for name in whole:
        totals, counts = [], []
        for rows in (slice(0, 2), slice(2, 3), slice(3, S)):
            part = {
                "soft": lambda r=rows: soft_ce(student[r], teacher[r], 2.0, mask[r]),
                "full": lambda r=rows: sparse_kl(student[r], picked(r), mask[r], temperature=2.0),
                "candidates": lambda r=rows: sparse_kl(
                    student[r], picked(r), mask[r], temperature=2.0, support="candidates"
                ),
                "hard": lambda r=rows: hard_top1(student[r], *picked(r), mask[r]),
                "next": lambda r=rows: next_token_ce(student[r], labels[r], mask[r]),
            }[name]()
            totals.append(part.total.item())
            counts.append(part.count.item())
        assert sum(totals) == pytest.approx(whole[name].total.item(), rel=1e-13), name
        assert sum(counts) == whole[name].count.item(), name


def test_no_counted_row_gives_zero_and_not_nan():
    nothing = torch.zeros(S, dtype=torch.bool)
    for name, (total, count) in all_losses(logits(0), logits(1), sparse(logits(1)), nothing).items():
        assert total.item() == 0.0 and count.item() == 0.0, name


def test_counts_and_sums_are_float32_scalars():
    student = logits(0, dtype=torch.bfloat16)
    for total, count in all_losses(student, student, sparse(logits(1).float()), some_rows()).values():
        assert total.dtype == count.dtype == torch.float32
        assert total.shape == count.shape == ()


def test_shapes_that_disagree_are_refused():
    student, mask = logits(0), some_rows()
    with pytest.raises(ValueError, match="equally many rows"):
        sparse_kl(student, sparse(logits(1, rows=S + 1)), mask, temperature=1.0)
    with pytest.raises(ValueError, match="agree in shape"):
        soft_ce(student, logits(1, vocab=V + 1), 1.0)
