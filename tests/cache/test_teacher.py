"""What is stored of the teacher, and that the stored targets are the live teacher."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qat_lora.cache import (
    CacheWriter,
    KDCacheDataset,
    build_cache,
)
from qat_lora.errors import CacheMismatch
from qat_lora.kd import (
    Head,
    kd_soft_ce,
    label_mask,
    next_tokens,
    position_mask,
    soft_ce,
    sparse_kl,
    targets,
)
from qat_lora.kd.reduce import LEAST_LOGPROB, topk_rows
from tests.cache.conftest import SEQ_LEN, VOCAB, TinyTeacher, blocks_of, build, manifest_of
from tests.reference import kd as reference


def test_topk_rows_are_the_oracle_in_descending_order():
    logits = torch.randn(6, 17, generator=torch.Generator().manual_seed(0)) * 3
    found = topk_rows(logits, 5, (1.0, 2.0))
    for row in range(6):
        ids, logp = reference.top_k(logits[row].numpy(), 5)
        assert found["topk_ids"][row].tolist() == ids
        np.testing.assert_allclose(found["topk_logprobs"][row].numpy(), logp, atol=1e-5)
        for i, temperature in enumerate((1.0, 2.0)):
            outside = 1 - sum(reference.softmax(logits[row].numpy(), temperature)[ids])
            assert found["tail"][row, i].item() == pytest.approx(outside, abs=1e-6)


def test_topk_rows_with_all_tokens_have_no_tail_and_forbidden_tokens_stay_finite():
    logits = torch.randn(4, 9)
    logits[:, 3] = -torch.inf
    found = topk_rows(logits, 9, (1.0,))
    assert (found["tail"] == 0).all()
    assert (found["topk_logprobs"][:, -1] == LEAST_LOGPROB).all()
    assert torch.isfinite(found["topk_logprobs"].half()).all()


def live_logits(teacher, batch):
    return teacher.head(teacher(batch["input_ids"]))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("bits", [6, 16, 32])
def test_cached_targets_are_the_live_teacher(tmp_path, temperature, bits):
    teacher = build(tmp_path / "cache", top_k=6, logprob_bits=bits)
    dataset = KDCacheDataset(tmp_path / "cache")
    batch = next(dataset.batches(7))
    target = targets(batch, temperature, dataset.manifest.target_spec)
    logp = torch.log_softmax(live_logits(teacher, batch).flatten(0, 1) / temperature, -1)
    expected = logp.topk(6, -1)
    assert torch.equal(target.ids_SK, expected.indices)
    # half a unit of float16 at log-probabilities of 4 to 8; half the step to the largest gap on a grid of 64
    tolerance = {32: 2e-6, 16: 4e-3, 6: 0.02 * float((expected.values[:, :1] - expected.values).max())}[bits]
    torch.testing.assert_close(target.logprobs_SK, expected.values, rtol=0, atol=tolerance)
    # The mass is exact even where the log-probabilities were rounded.
    torch.testing.assert_close(target.logprobs_SK.exp().sum(-1), expected.values.exp().sum(-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_with_k_equal_to_the_vocabulary_the_cache_trains_like_the_live_teacher(tmp_path, temperature):
    """In value (less the entropy) and gradient: nothing can tell the cache from the model that built it."""
    teacher = build(tmp_path / "cache", top_k=VOCAB, rows=4)
    dataset = KDCacheDataset(tmp_path / "cache")
    batch = next(dataset.eval_batches(4))
    mask = position_mask(batch["length"], SEQ_LEN).flatten()
    teacher_logits = live_logits(teacher, batch).flatten(0, 1)
    student = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(5))
    cached_student, live_student = student.clone().requires_grad_(), student.clone().requires_grad_()
    cached = sparse_kl(
        cached_student, targets(batch, temperature, dataset.manifest.target_spec), mask, temperature=temperature
    )
    live = soft_ce(live_student, teacher_logits, temperature, mask)
    cached.total.backward()
    live.total.backward()
    entropy = reference.entropy(teacher_logits.numpy(), temperature, mask.numpy())
    assert cached.total.item() == pytest.approx(live.total.item() - entropy, rel=1e-5)
    assert cached.count == live.count == 18
    torch.testing.assert_close(cached_student.grad, live_student.grad, rtol=1e-5, atol=2e-6)
    one = kd_soft_ce(student, teacher_logits, temperature)
    assert one.item() == pytest.approx(soft_ce(student, teacher_logits, temperature).total.item() / 20, rel=1e-6)


def test_fewer_candidates_than_stored_are_a_smaller_cache_with_the_same_total_mass(tmp_path):
    build(tmp_path / "six", top_k=6)
    build(tmp_path / "two", top_k=2)
    six, two = KDCacheDataset(tmp_path / "six"), KDCacheDataset(tmp_path / "two")
    cut = targets(next(six.eval_batches(7)), 2.0, six.manifest.target_spec, top_k=2)
    small = targets(next(two.eval_batches(7)), 2.0, two.manifest.target_spec)
    assert torch.equal(cut.ids_SK, small.ids_SK)
    torch.testing.assert_close(cut.logprobs_SK, small.logprobs_SK, rtol=0, atol=1e-6)
    with pytest.raises(CacheMismatch, match="top_k=6 candidates, but top_k=7"):
        targets(next(six.eval_batches(7)), 1.0, six.manifest.target_spec, top_k=7)


def test_a_temperature_that_is_not_stored_is_refused_with_both_values(cache):
    dataset = KDCacheDataset(cache)
    with pytest.raises(CacheMismatch, match=r"\[1.0, 2.0\], but temperature=3.0"):
        targets(next(dataset.batches(2)), 3.0, dataset.manifest.target_spec)


def test_float16_storage_costs_a_confident_teacher_nothing_because_the_tail_is_stored(tmp_path):
    """Without it, the sum of all rounding errors is read as tail mass: 5e-5 nats here, up to 2e-4."""
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 400, generator=source) * 8
    student = logits + 0.05 * torch.randn(500, 400, generator=source)
    rows = topk_rows(logits, 32, (1.0,))
    half = rows["topk_logprobs"].half().float()
    manifest, mask = manifest_of(blocks_of(1), top_k=32, vocab_size=400), torch.ones(500, dtype=torch.bool)
    batch = {name: x[None] for name, x in rows.items()}

    def nats(target):
        return sparse_kl(student, target, mask, temperature=1.0).total.item() / 500

    exact = targets(batch, 1.0, manifest.target_spec)
    rounded = targets({**batch, "topk_logprobs": half[None]}, 1.0, manifest.target_spec)
    assert abs(nats(rounded) - nats(exact)) < 1e-6
    assert abs(nats(exact._replace(logprobs_SK=half)) - nats(exact)) > 2e-5


def test_positions_and_labels_that_count():
    lengths = torch.tensor([4, 2, 0])
    assert position_mask(lengths, 4).int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert label_mask(lengths, 4).int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    ids = torch.tensor([[5, 6, 7, 8]])
    assert next_tokens(ids)[0, :3].tolist() == [6, 7, 8]


def test_the_teacher_sees_one_shape_and_the_head_one_chunk(tmp_path):
    teacher, chunks = TinyTeacher(), []

    def head(hidden_cH):
        chunks.append(len(hidden_cH))
        return teacher.head(hidden_cH)

    blocks = blocks_of(7)
    writer = CacheWriter(tmp_path, manifest_of(blocks))
    build_cache(teacher, head, blocks, writer, batch_size=2, chunk_tokens=5)
    assert set(teacher.shapes) == {(2, SEQ_LEN)}
    assert set(chunks) == {5}


def test_rows_do_not_depend_on_chunks_or_on_batches(tmp_path):
    teacher = TinyTeacher()
    found = []
    for name, batch_size, chunk_tokens in (("a", 1, 1), ("b", 3, 4), ("c", 7, 1000)):
        blocks = blocks_of(7)
        writer = CacheWriter(tmp_path / name, manifest_of(blocks))
        build_cache(teacher, teacher.head, blocks, writer, batch_size=batch_size, chunk_tokens=chunk_tokens)
        found.append(next(KDCacheDataset(tmp_path / name).eval_batches(7)))
    for other in found[1:]:
        for name, x in found[0].items():
            torch.testing.assert_close(other[name], x, rtol=1e-5, atol=1e-5)


def test_progress_counts_rows_to_the_end(tmp_path):
    seen = []
    build(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 7), (3, 7), (5, 7), (6, 7), (7, 7)]


def test_a_head_of_another_vocabulary_is_refused(tmp_path):
    blocks, teacher = blocks_of(3), TinyTeacher()
    writer = CacheWriter(tmp_path, manifest_of(blocks))
    with pytest.raises(ValueError, match="vocab_size=29"):
        build_cache(teacher, Head(torch.zeros(30, 6)), blocks, writer, batch_size=2)
