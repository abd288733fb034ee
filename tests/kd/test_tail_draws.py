"""Candidates with draws from the tail: the formula, its gradient, the mean over draws, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qat_lora.config import KDConfig
from qat_lora.errors import CacheMismatch, ConfigError
from qat_lora.kd import Head, TargetSpec, chunked_head_loss, distillation, targets
from qat_lora.kd.draws import ratio_of
from qat_lora.train.objective import check_serves
from tests.reference import kd as reference

B, T, V, K, N = 2, 3, 11, 3, 4
MASK = torch.tensor([True, True, False, True, True, True])


def spec_of(**changes) -> TargetSpec:
    values = {
        "store": "topk",
        "vocab_size": V,
        "top_k": K,
        "tail_draws": N,
        "temperatures": (1.0, 2.0),
        "weighed": (1,),
    }
    return TargetSpec(**(values | changes))


def teacher_of(temperature: float) -> np.ndarray:
    return np.stack([reference.softmax(z_V, temperature) for z_V in np.random.RandomState(0).randn(B * T, V) * 2])


def batch_of() -> dict[str, torch.Tensor]:
    """Exact fields of a made-up teacher, but for its draws, which are any tokens with any codes of ratios."""
    source = np.random.RandomState(1)
    p_SV, p2_SV = teacher_of(1.0), teacher_of(2.0)
    order_SV = np.argsort(-p_SV, axis=1)
    ids_SK, rest = order_SV[:, :K], order_SV[:, K:]
    draws_SN = np.stack([source.choice(rest_V, N) for rest_V in rest])
    of_tail = [np.take_along_axis(p, rest, axis=1) for p in (p_SV, p2_SV)]
    fields = {
        "topk_ids": ids_SK,
        "topk_logprobs": np.log(np.take_along_axis(p_SV, ids_SK, axis=1)),
        "lse": np.stack([np.zeros(B * T), np.log((p_SV**0.5).sum(1))], axis=1),
        "tail": np.stack([p.sum(1) for p in of_tail], axis=1),
        "tail_entropy": np.stack([-(p * np.log(p)).sum(1) for p in of_tail], axis=1),
        "draw_ids": draws_SN,
        "draw_ratios": source.randint(100, 140, (B * T, N, 1)),
    }
    return {name: torch.from_numpy(x).unflatten(0, (B, T)) for name, x in fields.items()}


def oracle(u_SV: np.ndarray, temperature: float) -> float:
    batch = {name: x.flatten(0, 1).numpy() for name, x in batch_of().items()}
    index = int(temperature != 1.0)
    ratios_SN = np.ones((B * T, N))
    if index:
        ratios_SN = 2.0 ** ((batch["draw_ratios"][..., 0] - 128) / 8)
    return reference.tail_draws_kl(
        u_SV, batch["topk_ids"], np.take_along_axis(teacher_of(temperature), batch["topk_ids"], axis=1),
        batch["draw_ids"], ratios_SN, batch["tail_entropy"][:, index], MASK.numpy(), temperature,
    )[0]  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_value_and_gradient_are_those_of_the_formula(temperature) -> None:
    u_SV = np.random.RandomState(2).randn(B * T, V)
    target = targets(batch_of(), temperature, spec_of())
    leaf = torch.tensor(u_SV, requires_grad=True)
    loss = distillation(leaf, target, MASK, temperature=temperature)
    assert loss.total.item() == pytest.approx(oracle(u_SV, temperature), rel=1e-6) and loss.count.item() == 5
    (grad_SV,) = torch.autograd.grad(loss.total, leaf)
    wanted_SV = reference.finite_difference(lambda x_SV: oracle(x_SV, temperature), u_SV)
    np.testing.assert_allclose(grad_SV.numpy(), wanted_SV, atol=2e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_chunked_head_with_picked_logits_gives_the_same(temperature) -> None:
    source = torch.Generator().manual_seed(3)
    hidden_SH, weight_VH = (torch.randn(n, 5, generator=source, dtype=torch.float64) for n in (B * T, V))
    target = targets(batch_of(), temperature, spec_of())

    def loss_fn(logits_cV, *rows, picked=None):
        return distillation(logits_cV, type(target)(*rows[:-1]), rows[-1], temperature=temperature, picked=picked).total

    found = []
    for picks in (None, target[0]):
        leaf = hidden_SH.clone().requires_grad_()
        total = chunked_head_loss(leaf, Head(weight_VH), loss_fn, (*target, MASK), chunk_tokens=4, picked_ids_SJ=picks)
        found.append((total.item(), torch.autograd.grad(total, leaf)[0]))
    assert found[0][0] == pytest.approx(oracle((hidden_SH @ weight_VH.T).numpy(), temperature), rel=1e-6)
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-12)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-11, atol=1e-13)


def test_a_position_without_a_tail_is_the_candidates_alone() -> None:
    batch = batch_of()
    batch["tail"], batch["tail_entropy"] = torch.zeros(B, T, 2), torch.zeros(B, T, 2)
    target = targets(batch, 1.0, spec_of())
    assert (target.weights_SN[:, K:] == 0).all()
    torch.testing.assert_close(target.weights_SN.sum(-1), torch.ones(B * T, dtype=torch.float64))
    assert (ratio_of(torch.tensor([0, 128])) == torch.tensor([0.0, 1.0])).all()


def test_fewer_candidates_than_stored_are_refused_since_no_draw_stands_for_them() -> None:
    with pytest.raises(CacheMismatch, match="4 draws from all but its 3 candidates, .* top_k=2 was asked for"):
        targets(batch_of(), 1.0, spec_of(), top_k=2)
    assert targets(batch_of(), 1.0, spec_of(), top_k=K).ids_SN.shape == (B * T, K + N)


def test_support_candidates_is_refused_and_the_hard_term_is_not() -> None:
    check_serves(spec_of(), KDConfig(hard_weight=0.5), has_answers=False)
    with pytest.raises(ConfigError, match="support='candidates' leaves out the tail, .* tail_draws=4"):
        check_serves(spec_of(), KDConfig(support="candidates"), has_answers=False)
