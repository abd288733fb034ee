"""What a step minimises, against the formulas in NumPy; annealing; the turns that anchor rows take."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from qat_lora import models
from qat_lora.cache import KDCacheDataset
from qat_lora.config import KDConfig
from qat_lora.config.presets import scheme
from qat_lora.errors import ConfigError
from qat_lora.evaluate import cached_kl
from qat_lora.runtime import LocalRuntime
from qat_lora.train.anchor import build_anchor
from qat_lora.train.objective import Anchor, KDObjective, check_serves
from qat_lora.train.student import round_to_nearest
from tests.conftest import SEQ_LEN
from tests.reference import kd as reference
from tests.tolerances import ORACLE_FLOAT32, REORDERED_GRADIENT_SHARE, assert_close_to_largest


def objective_of(kd: KDConfig, total_steps: int) -> KDObjective:
    return KDObjective(kd, None, None, total_steps=total_steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("anneal", "start", "quarter", "half", "end"),
    [
        ("none", 0.4, 0.4, 0.4, 0.4),
        ("linear", 0.4, 0.3, 0.2, 0.0),
        ("cosine", 0.4, 0.2 * (1 + math.sqrt(0.5)), 0.2, 0.0),
    ],
)
def test_the_hard_weight_is_annealed_over_the_run_and_stays_at_its_end(anneal, start, quarter, half, end) -> None:
    objective = objective_of(KDConfig(hard_weight=0.4, hard_anneal=anneal), total_steps=8)
    found = [objective.hard_weight_at(step) for step in (0, 2, 4, 8, 9)]
    assert found == pytest.approx([start, quarter, half, end, end], rel=1e-15, abs=1e-16)


@pytest.mark.parametrize(
    "kd",
    [
        KDConfig(),
        KDConfig(temperature=2.0, top_k=5),
        KDConfig(temperature=2.0, top_k=5, support="candidates"),
        KDConfig(top_k=5, hard_weight=0.6, hard_anneal="linear"),
        KDConfig(ce_alpha=0.3),
        KDConfig(ce_alpha=0.3, loss_on="answers"),
        KDConfig(anchor_kl_weight=0.5, anchor_samples=4),
        KDConfig(
            temperature=2.0, top_k=5, hard_weight=0.6, hard_anneal="linear", ce_alpha=0.3, anchor_kl_weight=0.5,
            anchor_samples=4,
        ),
    ],
    ids=["kd", "tail", "candidates", "hard", "ce", "answers", "anchor", "all"],
)  # fmt: skip
def test_the_objective_is_its_formula(kd, teacher_dir, other_teacher_dir, cache_dir, runtime) -> None:
    """(1 - alpha) * (KD + w_hard * hard) + alpha * CE + w_anchor * KL to the anchor, each a mean of its own."""
    dataset = KDCacheDataset(cache_dir, preload=True)
    student, teacher = models.load(str(teacher_dir)).model, models.load(str(teacher_dir)).model
    round_to_nearest(student, scheme("q2_g32"))
    batch = next(dataset.batches(2))
    batch["length"][0] = 5
    batch["answer"] = torch.zeros_like(batch["input_ids"])
    batch["answer"][0, [0, 3, 4, 5]] = batch["answer"][1, [7, SEQ_LEN - 1]] = 1  # nothing predicts the first, padding
    anchor = None
    if kd.anchor_kl_weight:
        start = models.load(str(other_teacher_dir)).model
        anchor = build_anchor(start, dataset, samples=4, batch_size=3, chunk_tokens=7, runtime=runtime)
        anchor.batch["length"][3] = 2
    objective = KDObjective(kd, dataset.manifest.target_spec, runtime, total_steps=12, anchor=anchor)
    counts = objective.counts([batch], position=1)
    with torch.no_grad():
        found = sum(term.loss.item() for term in objective.losses(student, batch, counts, step=3, position=1))

    def logits(model: torch.nn.Module, ids: torch.Tensor) -> np.ndarray:
        with torch.no_grad():
            return model(input_ids=ids).logits.flatten(0, 1).double().numpy()

    ours, theirs = logits(student, batch["input_ids"]), logits(teacher, batch["input_ids"])
    mask = (np.arange(SEQ_LEN) < batch["length"].numpy()[:, None]).ravel()
    label_mask = (np.arange(SEQ_LEN) + 1 < batch["length"].numpy()[:, None]).ravel()
    labels = np.roll(batch["input_ids"].numpy(), -1, axis=1).ravel()
    if kd.loss_on == "answers":
        mask = np.zeros(2 * SEQ_LEN, dtype=bool)
        mask[[2, 3, SEQ_LEN + 6, 2 * SEQ_LEN - 2]] = True
        label_mask = mask
    k = kd.top_k or theirs.shape[1]
    ids = [reference.top_k(row, k)[0] for row in theirs]
    logprobs = [
        [math.log(reference.softmax(row, kd.temperature)[v]) for v in top] for row, top in zip(theirs, ids, strict=True)
    ]
    kl = {"full": reference.tail_bucket_kl, "candidates": reference.candidates_kl}[kd.support]
    distilled, positions = kl(ours, ids, logprobs, mask, kd.temperature)
    hard, _ = reference.label_ce(ours, [top[0] for top in ids], mask)
    weight = kd.hard_weight * (1 - 3 / 12 if kd.hard_anneal == "linear" else 1)
    ce, label_count = reference.label_ce(ours, labels, label_mask)
    wanted = (5 + SEQ_LEN, 4 + SEQ_LEN - 1) if kd.loss_on == "all" else (4, 4)
    assert (positions, label_count) == wanted
    expected = (1 - kd.ce_alpha) * (distilled + weight * hard) / positions + kd.ce_alpha * ce / label_count
    if kd.anchor_kl_weight:  # micro-batch 1 of two rows: the third and the fourth anchor row, which has two tokens
        rows = torch.stack([dataset[row]["input_ids"] for row in (2, 3)])
        mask = (np.arange(SEQ_LEN) < np.array([[SEQ_LEN], [2]])).ravel()
        held = [reference.soft_ce(logits(model, rows), logits(start, rows), 1.0, mask)[0] for model in (student, start)]
        expected += kd.anchor_kl_weight * (held[0] - held[1]) / (SEQ_LEN + 2)
    assert found == pytest.approx(expected, rel=ORACLE_FLOAT32.rtol)


def gradients(kd, batches, model, spec, runtime) -> list[torch.Tensor]:
    """Of one optimizer step over these micro-batches."""
    objective = KDObjective(kd, spec, runtime, total_steps=2)
    model.zero_grad()
    counts = objective.counts(batches, position=0)
    for position, batch in enumerate(batches):
        for term in objective.losses(model, batch, counts, step=0, position=position):
            term.loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_only_answers_have_a_gradient_however_micro_batches_are_cut(teacher_dir, cache_dir, runtime) -> None:
    """What stands at other positions changes no bit; rows one by one, one without an answer, give the same mean."""
    dataset = KDCacheDataset(cache_dir, preload=True)
    spec, model = dataset.manifest.target_spec, models.load(str(teacher_dir)).model
    round_to_nearest(model, scheme("q2_g32"))
    kd = KDConfig(loss_on="answers", ce_alpha=0.5)
    batch = next(dataset.batches(4))
    batch["answer"] = torch.zeros_like(batch["input_ids"])
    for row, (first, stop) in enumerate([(3, 9), (20, 24), (0, 0), (11, 12)]):
        batch["answer"][row, first:stop] = 1
    whole = gradients(kd, [batch], model, spec, runtime)
    rows = [{name: x[i : i + 1] for name, x in batch.items()} for i in range(4)]
    for one, cut in zip(whole, gradients(kd, rows, model, spec, runtime), strict=True):
        assert_close_to_largest(cut, one, share=REORDERED_GRADIENT_SHARE)
    counted = torch.cat([batch["answer"][:, 1:], torch.zeros(4, 1, dtype=torch.long)], dim=1) != 0
    assert counted.sum() == 11
    other = dict(batch)
    shuffled = batch["topk_logprobs"].flip(-1)
    other["topk_logprobs"] = torch.where(counted[..., None], batch["topk_logprobs"], shuffled)
    assert all(map(torch.equal, whole, gradients(kd, [other], model, spec, runtime)))
    other["topk_logprobs"] = shuffled
    assert not all(map(torch.equal, whole, gradients(kd, [other], model, spec, runtime)))
    none = batch | {"answer": torch.zeros_like(batch["answer"])}
    assert not any(g.any() for g in gradients(kd, [none], model, spec, runtime))
    kls = [cached_kl(model, [b], spec, runtime=runtime, chunk_tokens=7, answers_only=True) for b in (batch, other)]
    assert kls[0] != kls[1]
    assert kls[0] != cached_kl(model, [batch], spec, runtime=runtime, chunk_tokens=7)


def test_answers_are_asked_of_a_cache_that_knows_them(cache_dir) -> None:
    spec, kd = KDCacheDataset(cache_dir).manifest.target_spec, KDConfig(loss_on="answers")
    check_serves(spec, kd, has_answers=True)
    with pytest.raises(ConfigError, match=r"loss_on='answers' .* this cache does not tell; .* or use --loss-on all"):
        check_serves(spec, kd, has_answers=False)


class Rank(LocalRuntime):
    """One of two ranks."""

    world_size = 2

    def __init__(self, rank: int) -> None:
        super().__init__("cpu")
        self.rank = rank


@pytest.mark.parametrize(("total", "size"), [(5, 3), (6, 2), (2, 3)])
def test_anchor_rows_are_taken_in_turn_over_positions_and_ranks(total, size, cache_dir) -> None:
    spec = KDCacheDataset(cache_dir).manifest.target_spec
    anchor = Anchor({"input_ids": torch.arange(total)[:, None], "length": torch.arange(total) + 100}, spec)
    taken = []
    for position in range(2 * total):
        for rank in range(Rank.world_size):
            rows = anchor.rows(position, size, Rank(rank))  # type: ignore[arg-type]
            assert torch.equal(rows["length"], rows["input_ids"][:, 0] + 100), "the fields of a row go together"
            taken += rows["input_ids"][:, 0].tolist()
    assert taken == [i % total for i in range(len(taken))]
    assert set(Counter(taken).values()) == {len(taken) // total}, "every row has its share"
