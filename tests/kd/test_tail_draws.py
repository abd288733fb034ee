"""Candidates with draws from the tail: the formula, its gradient, the mean over draws, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qat_lora.cache import KDCacheDataset
from qat_lora.config import KDConfig
from qat_lora.config.cache import CacheRun
from qat_lora.errors import CacheMismatch, ConfigError
from qat_lora.kd import SparseTarget, TargetSpec, chunked_head_loss, distillation, soft_ce, sparse_kl, targets
from qat_lora.kd.draws import ratio_of, uniforms
from qat_lora.kd.reduce import topk_rows, with_tail_draws
from qat_lora.models import Head
from qat_lora.train.objective import check_serves
from tests.cache.conftest import TinyTeacher, blocks_of, build, manifest_of
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


def fields_of(z_SV: torch.Tensor, chance_S: torch.Tensor, proposal: float, temperatures) -> dict[str, torch.Tensor]:
    found = with_tail_draws(topk_rows(z_SV, K, temperatures), z_SV, chance_S, N, proposal, temperatures)
    return {name: x[None] for name, x in found.items()}


@pytest.mark.parametrize(("proposal", "temperature"), [(1.0, 1.0), (0.8, 1.0), (1.0, 2.0)])
def test_the_mean_gradient_and_loss_are_those_of_full_distillation_and_a_buckets_are_not(proposal, temperature) -> None:
    """Over 4,000 seeds, each entry of the gradient lies within its standard error; so does the loss."""
    rows, vocab_size, seeds, temperatures = 3, 24, 4000, tuple(dict.fromkeys((1.0, temperature)))
    source = torch.Generator().manual_seed(2)
    z_SV, u_SV = (torch.randn(rows, vocab_size, generator=source) for _ in range(2))
    weighed = tuple(i for i, t in enumerate(temperatures) if t != proposal)
    chance = torch.from_numpy(uniforms(5, range(seeds), rows, 1 + N * len(weighed))).flatten(0, 1)
    batch = fields_of(z_SV.repeat(seeds, 1), chance, proposal, temperatures)
    spec = spec_of(vocab_size=vocab_size, temperatures=temperatures, weighed=weighed)
    leaf = u_SV.repeat(seeds, 1).requires_grad_()
    target = targets(batch, temperature, spec)
    assert not (batch["topk_ids"][0, :, :, None] == batch["draw_ids"][0, :, None, :]).any(), "no draw is a candidate"
    each_S = [distillation(leaf[i::rows], type(target)(*(x[i::rows] for x in target)), torch.ones(seeds).bool(),
                           temperature=temperature).total for i in range(rows)]  # fmt: skip
    grads = torch.autograd.grad(sum(each_S), leaf)[0].unflatten(0, (seeds, rows)).double()

    full = u_SV.clone().requires_grad_()
    mask_S = torch.ones(rows, dtype=torch.bool)
    wanted = soft_ce(full, z_SV, temperature).total
    (wanted_SV,) = torch.autograd.grad(wanted, full)
    error_SV = grads.std(0) / seeds**0.5
    off_SV = (grads.mean(0) - wanted_SV).abs() / (error_SV + 1e-6)
    assert off_SV.max() < 4.3 and (off_SV**2).mean() < 1.6  # 72 entries
    entropy = soft_ce(z_SV, z_SV, temperature).total
    assert (sum(each_S).item() / seeds) == pytest.approx((wanted - entropy).item(), rel=0.01)

    bucket = u_SV.clone().requires_grad_()
    logp = torch.log_softmax(z_SV / temperature, dim=-1).topk(K, dim=-1)
    loss = sparse_kl(bucket, SparseTarget(logp.indices, logp.values), mask_S, temperature=temperature).total
    (biased_SV,) = torch.autograd.grad(loss, bucket)
    assert ((biased_SV - wanted_SV).abs() / (error_SV + 1e-6)).max() > 20


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_tail_that_the_teacher_forbids_gives_finite_fields_that_weigh_nothing(temperature) -> None:
    z_SV = torch.randn(2, V, generator=torch.Generator().manual_seed(0))
    z_SV[0, K:] = -torch.inf
    batch = fields_of(z_SV, torch.rand(2, 1 + N), 1.0, (1.0, 2.0))
    target = targets(batch, temperature, spec_of())
    assert all(x.isfinite().all() for x in target) and target.weights_SN[0, K:].abs().max() < 1e-6
    assert (batch["draw_ids"][0, 0] >= K).all() and (target.weights_SN[1, K:] > 0).all()


def test_the_tails_entropy_is_its_share_of_the_whole() -> None:
    z_SV = torch.randn(5, V, generator=torch.Generator().manual_seed(0)) * 2
    batch = fields_of(z_SV, torch.rand(5, 1 + N), 1.0, (1.0, 2.0))
    for i, temperature in enumerate((1.0, 2.0)):
        p_SV = (z_SV.double() / temperature).softmax(-1)
        terms_SV = -(p_SV * p_SV.log()).scatter(-1, batch["topk_ids"][0], 0.0)
        torch.testing.assert_close(batch["tail_entropy"][0, :, i].double(), terms_SV.sum(-1), rtol=1e-4, atol=1e-6)


def test_a_cache_gives_back_candidates_and_draws(tmp_path) -> None:
    build(tmp_path, store="topk", top_k=K, tail_draws=N, proposal_temperature=0.9, temperatures=(1.0, 2.0))
    dataset = KDCacheDataset(tmp_path)
    assert dataset.manifest.target_spec == spec_of(vocab_size=29, weighed=(0, 1))
    rows = np.arange(7)
    batch, teacher = dataset._read(rows), TinyTeacher()
    z_SV = teacher.head(teacher(batch["input_ids"])).flatten(0, 1)
    chance = torch.from_numpy(uniforms(0, range(7), 5, 1 + 2 * N)).flatten(0, 1)
    wanted = fields_of(z_SV, chance, 0.9, (1.0, 2.0))
    is_token_S = (torch.arange(5) < batch["length"][:, None]).flatten()
    for name in ("topk_ids", "draw_ids"):
        assert torch.equal(batch[name].flatten(0, 1)[is_token_S], wanted[name][0][is_token_S])
    assert torch.equal(batch["tail_entropy"].flatten(0, 1), wanted["tail_entropy"][0].half().float())
    assert batch["draw_ratios"].shape == (7, 5, N, 2)


def test_draws_need_tokens_that_are_no_candidates() -> None:
    with pytest.raises(ConfigError, match="tail_draws=4 needs tokens that are no candidates, but top_k=29"):
        manifest_of(blocks_of(3), top_k=29, tail_draws=4)
    with pytest.raises(ConfigError, match="tail_draws=4 is of --store topk"):
        CacheRun(store="sampled", tail_draws=4).check_store()
    with pytest.raises(ConfigError, match="sampling_seed=3 is of draws, but there are none"):
        CacheRun(sampling_seed=3).check_store()
    CacheRun(sampling_seed=3, tail_draws=2).check_store()
