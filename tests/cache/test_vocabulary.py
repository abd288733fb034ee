"""Candidates that a narrower student lacks: taken out on the host, their probability given to the tail."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from qat_lora.cache import KDCacheDataset
from qat_lora.errors import CacheError, CacheMismatch
from qat_lora.kd import targets
from qat_lora.kd.draws import draw
from qat_lora.kd.reduce import topk_rows
from qat_lora.kd.vocabulary import differ_in_padding, without_ids_from
from tests.cache.conftest import VOCAB, blocks_of, build, manifest_of

TEMPERATURES = (1.0, 2.0)
ROWS = (2, 5)


def batch_of(top_k: int, *, padding_logit: float = 0.0, seed: int = 0) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    """What a cache hands out of random logits [2, 5, V], and these; ids from 20 on get another offset."""
    logits_BTV = torch.randn(*ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    logits_BTV[..., 20:] += padding_logit
    stored = topk_rows(logits_BTV.flatten(0, 1), top_k, TEMPERATURES)
    return {name: x.unflatten(0, ROWS).numpy() for name, x in stored.items()}, logits_BTV


@pytest.mark.parametrize(
    ("sizes", "same"),
    [((151936, 151669), True), ((151669, 151936), True), ((151936, 152064), True), ((151936, 151668), False)],
)
def test_what_is_padding_only(sizes, same) -> None:
    assert differ_in_padding(*sizes, 151669) == same


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("top_k", [1, 6, 19, 20, 25, VOCAB])
def test_candidates_that_stay_keep_their_probability_and_the_rest_is_tail(top_k, temperature) -> None:
    given, logits_BTV = batch_of(top_k)
    before = {name: x.copy() for name, x in given.items()}
    found = without_ids_from(20, given, TEMPERATURES)
    assert all(np.array_equal(given[name], before[name]) for name in given), "what was given is left alone"
    manifest = manifest_of(blocks_of(2), top_k=top_k, temperatures=TEMPERATURES)
    target = targets({name: torch.from_numpy(x) for name, x in found.items()}, temperature, manifest.target_spec)
    p_SV = (logits_BTV / temperature).softmax(-1).flatten(0, 1)
    kept = min(top_k, 20)
    for p_V, ids_K, logprobs_K in zip(p_SV, target.ids_SK, target.logprobs_SK, strict=True):
        assert len(set(ids_K.tolist())) == kept and int(ids_K.max()) < 20
        stored = [i for i in p_V.topk(top_k).indices.tolist() if i < 20]
        assert ids_K[: len(stored)].tolist() == stored, "in their order"
        # where all that the student has are candidates, they share the rest in proportion
        wanted = p_V[stored] / (p_V[stored].sum() if kept == 20 else 1.0)
        assert torch.allclose(logprobs_K.exp()[: len(stored)], wanted, atol=1e-6)
        assert logprobs_K.exp()[len(stored) :].sum() == 0
    kept_S = target.logprobs_SK.exp().sum(-1)
    tail_S = torch.from_numpy(found["tail"][..., TEMPERATURES.index(temperature)]).flatten()
    assert torch.allclose(tail_S, 1 - kept_S, atol=1e-6)
    assert (tail_S > 1e-4).all() if top_k < 20 else (tail_S == 0).all()


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_whole_of_the_smaller_vocabulary_sums_to_one_though_nothing_of_it_is_padding(temperature) -> None:
    """K = V' and every candidate below it: there is nothing to take out, and still no tail to hand out."""
    given, _ = batch_of(20, padding_logit=-12.0)
    assert (given["topk_ids"] < 20).all() and (given["tail"] > 0).any()
    found = without_ids_from(20, given, TEMPERATURES)
    spec = manifest_of(blocks_of(2), top_k=20, temperatures=TEMPERATURES).target_spec
    target = targets({name: torch.from_numpy(x) for name, x in found.items()}, temperature, spec)
    assert (target.logprobs_SK.exp().sum(-1) - 1).abs().max() < 1e-6 and (found["tail"] == 0).all()


def test_beside_draws_of_the_tail_both_candidates_and_draws_of_padding_are_taken_out() -> None:
    given, _ = batch_of(6)
    draws = np.sort(np.random.RandomState(0).randint(0, VOCAB, (*ROWS, 4)), axis=-1)
    found = without_ids_from(20, given | {"draw_ids": draws}, TEMPERATURES)
    assert found["topk_ids"].max() < 20 and found["draw_ids"].max() < 20 and (found["tail"] > given["tail"]).any()


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("top_k", [6, 25])
def test_beside_draws_of_the_tail_the_entropy_stays_the_teachers(top_k, temperature) -> None:
    """Over its own vocabulary; or, where all that the student has are candidates, given that it is one of these."""
    given, logits_BTV = batch_of(top_k)
    p_SVn = torch.stack([(logits_BTV / t).softmax(-1).flatten(0, 1) for t in TEMPERATURES], dim=-1)
    ids_SKn = torch.from_numpy(given["topk_ids"]).flatten(0, 1)[..., None].expand(-1, -1, len(TEMPERATURES))
    rest_SVn = p_SVn.scatter(1, ids_SKn, 0.0)
    given["tail_entropy"] = torch.special.entr(rest_SVn).sum(1).unflatten(0, ROWS).numpy()
    given["draw_ids"] = np.zeros((*ROWS, 4), np.int64)
    found = without_ids_from(20, given, TEMPERATURES)
    spec = manifest_of(blocks_of(2), top_k=top_k, temperatures=TEMPERATURES, tail_draws=4).target_spec
    spec = dataclasses.replace(spec, weighed=())
    target = targets({name: torch.from_numpy(x) for name, x in found.items()}, temperature, spec)
    wanted_SV = p_SVn[..., TEMPERATURES.index(temperature)]
    if top_k > 20:
        of_student = torch.from_numpy(given["topk_ids"] < 20).flatten(0, 1)
        p_SK = wanted_SV.gather(1, ids_SKn[..., 0]) * of_student
        wanted_SV = p_SK / p_SK.sum(-1, keepdim=True)
    torch.testing.assert_close(target.entropy_S, torch.special.entr(wanted_SV).sum(-1), rtol=0, atol=2e-6)


def test_a_batch_without_padding_is_handed_on() -> None:
    given, _ = batch_of(4, padding_logit=-1e4)
    assert without_ids_from(20, given, TEMPERATURES) is given


def test_slots_are_filled_from_the_top_of_the_smaller_vocabulary() -> None:
    given, _ = batch_of(6, padding_logit=50.0)  # nothing but padding
    found = without_ids_from(20, given, TEMPERATURES)
    assert (found["topk_ids"] == [19, 18, 17, 16, 15, 14]).all()
    assert (found["tail"][..., 0] > 1 - 1e-5).all()
    target = targets(
        {name: torch.from_numpy(x) for name, x in found.items()}, 1.0, manifest_of(blocks_of(2), top_k=6).target_spec
    )
    assert not target.logprobs_SK.isnan().any() and (target.logprobs_SK < -5).all()


@pytest.mark.parametrize("preload", [False, True])
def test_a_reader_hands_out_no_id_that_the_student_lacks(tmp_path, preload) -> None:
    build(tmp_path / "c", top_k=VOCAB, blocks=blocks_of(7, vocab_size=20))
    cache = KDCacheDataset(tmp_path / "c", preload=preload)
    within = cache.for_vocabulary(20)
    assert cache[0]["topk_ids"].shape[-1] == VOCAB, "the cache itself is as it was"
    for some in (within, within.part("train", 0.3), within.part("eval", 0.3)):
        batch = next(some.batches(3))
        assert batch["topk_ids"].shape[-1] == 20 and int(batch["topk_ids"].max()) == 19
    assert cache.for_vocabulary(VOCAB + 5)[0]["topk_ids"].shape[-1] == VOCAB


def test_a_text_with_ids_that_the_student_lacks_is_refused(cache) -> None:
    within = KDCacheDataset(cache).for_vocabulary(5)
    with pytest.raises(CacheError, match="holds the input_ids value .* but the vocabulary has 5 tokens"):
        for row in range(len(within)):
            within[row]


def test_what_is_required_of_another_size(cache) -> None:
    opened = KDCacheDataset(cache)
    same = {"tokenizer_digest": "k" * 64, "teacher_digest": "u" * 64}
    for vocab_size in (25, 40):
        opened.require(vocab_size=vocab_size, tokenizer_size=25, **same)
    with pytest.raises(CacheMismatch, match="teacher_digest"):
        opened.require(vocab_size=VOCAB, tokenizer_size=25, **same)
    with pytest.raises(CacheMismatch, match="vocab_size=29, but the run needs vocab_size=24; 24 cannot hold .* 25 ids"):
        opened.require(vocab_size=24, tokenizer_size=25, **same)
    with pytest.raises(CacheMismatch, match="needs vocab_size=40; 29 cannot hold the tokenizer's 30 ids"):
        opened.require(vocab_size=40, tokenizer_size=30, **same)
    with pytest.raises(CacheMismatch, match="vocab_size=25; their tokenizers differ"):
        opened.require(vocab_size=25, tokenizer_size=25, tokenizer_digest="l" * 64)


def test_draws_of_padding_become_others_of_their_position() -> None:
    ids_BTN = np.array([[[1, 5, 5, 20], [19, 20, 22, 22], [20, 21, 22, 23], [0, 1, 2, 3]]])
    given = {"draw_ids": ids_BTN, "draw_ratios": (ids_BTN * 2)[..., None]}
    found = without_ids_from(20, given, TEMPERATURES)
    assert found["draw_ids"].tolist() == [[[1, 5, 5, 5], [19, 19, 19, 19], [19, 19, 19, 19], [0, 1, 2, 3]]]
    assert found["draw_ratios"][0, 0, :, 0].tolist() == [2, 10, 10, 10], "each with its own weight"
    assert without_ids_from(3, {"logits": np.arange(5.0)[None]}, TEMPERATURES)["logits"].tolist() == [[0, 1, 2]]


def test_the_share_of_padding_is_divided_in_proportion() -> None:
    """Even draws of 12 ids, of which the student has 9: each is drawn as often as the others."""
    u_S = torch.rand(4000, generator=torch.Generator().manual_seed(0))
    # another order of the ids at each position, so that no id is at the same place everywhere
    order = torch.stack([torch.randperm(300, generator=torch.Generator().manual_seed(n))[:12] for n in range(4000)])
    places_SN = draw(torch.full((4000, 12), 1 / 12), u_S, 7)
    ids_SN = order.sort(-1).values.gather(-1, places_SN).numpy()
    found = without_ids_from(225, {"draw_ids": ids_SN[None]}, TEMPERATURES)["draw_ids"]
    counts = np.bincount(found.ravel(), minlength=300)
    assert counts[225:].sum() == 0
    low, high = counts[:112].sum(), counts[112:224].sum()
    assert abs(low / high - 1) < 0.03, "low ids and high ones alike"
