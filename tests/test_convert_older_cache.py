"""The older layout, converted: exact where it can be, an unbiased estimate where it cannot; the manifest says which."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch

from qat_lora.cache import KDCacheDataset, load_cache, load_manifest, merge, verify
from qat_lora.errors import CacheError, CacheMismatch, ConfigError
from qat_lora.kd.reduce import topk_rows
from scripts.convert_older_cache import OlderRows, convert_older
from tests.cache.test_build import contents

V, L, K, M = 37, 6, 5, 12
TEACHER = {"teacher": "t", "teacher_digest": "t" * 64, "tokenizer_digest": "k" * 64, "vocab_size": V}


def made(folder, shards=(4, 3), *, k=K, m=M, seed=0, dtype=torch.float16, spread=1.5, dropped_last=True, meta=None):
    """Write a cache of the older layout, and return the logits [N, P, V] that it was made from."""
    source = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True)
    every = []
    for index, rows in enumerate(shards):
        ids = torch.randint(0, V, (rows, L), generator=source)
        logits = (torch.randn(rows, L - dropped_last, V, generator=source) * spread).to(dtype)
        top, top_ids = logits.float().topk(k, dim=-1)
        drawn = torch.randint(0, V, (*logits.shape[:2], m), generator=source)
        shard = {
            "input_ids": ids.to(torch.int32),
            "attention_mask": torch.ones(rows, L, dtype=torch.uint8),
            "topk_idx": top_ids.to(torch.int32),
            "topk_logits": top.to(dtype),
        }
        if m:
            shard |= {"rand_idx": drawn.to(torch.int32), "rand_logits": logits.gather(-1, drawn)}
        torch.save(shard, folder / f"shard_{index:05d}.pt")
        every.append(logits.float())
    known = {"teacher_model": "some/teacher", "dataset_name": "some/text", "dataset_split": "train", "vocab_size": V}
    (folder / "meta.json").write_text(json.dumps(known | {"topk": k, "rand_neg": m} | (meta or {})))
    return torch.cat(every)


def edit(path, **changes):
    shard = torch.load(path, weights_only=True)
    torch.save({k: v for k, v in (shard | changes).items() if v is not None}, path)


@pytest.fixture
def older(tmp_path):
    made(tmp_path / "older")
    return tmp_path / "older"


def rows_of(folder, **options):
    rows = OlderRows(folder, V, **options)
    return rows, rows.fields(range(rows.count))


# ---- what is recovered


@pytest.mark.parametrize("dropped_last", [True, False])
def test_with_all_of_the_vocabulary_it_is_what_a_build_stores(tmp_path, dropped_last):
    """No estimate is needed, and samples are not looked at."""
    logits_NPV = made(tmp_path / "o", k=V, m=0, dtype=torch.float32, dropped_last=dropped_last)
    rows, fields = rows_of(tmp_path / "o", temperatures=(1.0, 2.0))
    wanted = topk_rows(logits_NPV.flatten(0, 1), V, (1.0, 2.0))
    assert rows.normalizer == "exact" and rows.seq_len == L - dropped_last
    assert np.array_equal(fields["topk_ids"].reshape(-1, V), wanted["topk_ids"].numpy())
    for name in ("topk_logprobs", "tail"):
        np.testing.assert_allclose(fields[name].reshape(wanted[name].shape), wanted[name].numpy(), atol=2e-6)
    convert_older(tmp_path / "o", tmp_path / "c", logprob_bits=32, **TEACHER)
    assert load_manifest(tmp_path / "c").normalizer == "exact"


def test_the_estimate_is_its_formula_position_by_position(older):
    """In plain loops; some samples are candidates, some are drawn twice."""
    rows, fields = rows_of(older, temperatures=(1.0, 2.0))
    errors, repeated, hits = [], 0, 0
    first = 0
    for name in ("shard_00000.pt", "shard_00001.pt"):
        shard = {k: v.tolist() for k, v in torch.load(older / name, weights_only=True).items()}
        for n, ids in enumerate(shard["topk_idx"]):
            for t, candidates in enumerate(ids):
                drawn = shard["rand_idx"][n][t]
                repeated += len(set(drawn)) < len(drawn)
                hits += bool(set(drawn) & set(candidates))
                for i, temperature in enumerate((1.0, 2.0)):
                    kept = [math.exp(z / temperature) for z in shard["topk_logits"][n][t]]
                    others = [
                        math.exp(z / temperature)
                        for v, z in zip(drawn, shard["rand_logits"][n][t], strict=True)
                        if v not in candidates
                    ]
                    rest = (V - K) / len(others) * sum(others)
                    total = sum(kept) + rest
                    assert fields["tail"][first + n, t, i] == pytest.approx(rest / total, abs=1e-6)
                    if i == 0:
                        z_max = shard["topk_logits"][n][t][0]
                        assert fields["topk_logprobs"][first + n, t, 0] == pytest.approx(
                            z_max - math.log(total), abs=1e-5
                        )
                        deviation = np.std(others, ddof=1)
                        errors.append((V - K) * deviation / math.sqrt(len(others)) / total)
        first += len(shard["topk_idx"])
    assert repeated > 5 and hits > 5
    assert rows.standard_error == pytest.approx(np.mean(errors), rel=1e-5)
    assert rows.normalizer == "estimated"


def z_of(shard, fields):
    """The normaliser [N, P] at T = 1 that log-probabilities were made with."""
    return np.exp(shard["topk_logits"][..., 0].double().numpy() - fields["topk_logprobs"][..., 0].astype(np.float64))


def test_the_estimate_of_z_is_unbiased_and_candidates_alone_are_not(tmp_path):
    """Over many draws at the same positions; the stated standard error is that of the draws."""
    logits_NPV = made(tmp_path / "o", shards=(2,), m=4000, dtype=torch.float32)
    z_NP = logits_NPV.double().exp().sum(-1).numpy()
    path = tmp_path / "o" / "shard_00000.pt"
    shard = torch.load(path, weights_only=True)
    estimates, stated = [], []
    for start in range(0, 4000, 10):
        part = {name: shard[name][..., start : start + 10] for name in ("rand_idx", "rand_logits")}
        edit(path, **part)
        rows, fields = rows_of(tmp_path / "o")
        estimates.append(z_of(shard, fields))
        stated.append(rows.standard_error)
    spread_NP = np.std(estimates, axis=0, ddof=1)
    away_NP = (np.mean(estimates, axis=0) - z_NP) / (spread_NP / math.sqrt(len(estimates)))
    assert np.abs(away_NP).max() < 4, "ten positions, each within its standard error"
    assert np.mean(stated) == pytest.approx((spread_NP / z_NP).mean(), rel=0.15)
    _, alone = rows_of(tmp_path / "o", estimate_tail=False)
    assert (z_of(shard, alone) < z_NP * 0.95).all() and (alone["tail"] == 0).all()


def test_candidates_alone_are_a_softmax_over_them(older):
    rows, fields = rows_of(older, estimate_tail=False, temperatures=(1.0, 2.0))
    np.testing.assert_allclose(np.exp(fields["topk_logprobs"]).sum(-1), 1.0, atol=1e-5)
    assert rows.normalizer == "candidates" and "renormalised over 5 candidates" in rows.described()


def test_rows_lose_the_token_that_has_no_prediction_and_keep_their_padding(older):
    mask = torch.ones(4, L, dtype=torch.uint8)
    mask[1, 3:] = 0
    mask[2, L - 1 :] = 0
    edit(older / "shard_00000.pt", attention_mask=mask)
    _, fields = rows_of(older)
    ids = torch.load(older / "shard_00000.pt", weights_only=True)["input_ids"][:, : L - 1]
    assert np.array_equal(fields["input_ids"][:4], ids.numpy())
    assert fields["lengths"].tolist() == [5, 3, 5, 5, 5, 5, 5]
    edit(older / "shard_00001.pt", attention_mask=None)
    assert rows_of(older)[1]["lengths"].tolist() == [5, 3, 5, 5, 5, 5, 5]


def test_candidates_in_any_order_are_put_in_order(older, tmp_path):
    _, wanted = rows_of(older)
    shard = torch.load(older / "shard_00000.pt", weights_only=True)
    edit(older / "shard_00000.pt", topk_idx=shard["topk_idx"].flip(-1), topk_logits=shard["topk_logits"].flip(-1))
    _, found = rows_of(older)
    np.testing.assert_array_equal(np.sort(found["topk_ids"], -1), np.sort(wanted["topk_ids"], -1))
    assert (np.diff(found["topk_logprobs"], axis=-1) <= 0).all()
    np.testing.assert_allclose(found["topk_logprobs"], wanted["topk_logprobs"], atol=1e-6)


# ---- the cache that is made


def test_a_converted_cache_is_a_cache_and_says_what_it_is(older, tmp_path):
    made_of = convert_older(
        older, tmp_path / "c", temperatures=(2.0,), rows_per_shard=3, logprob_bits=16, **TEACHER
    ).manifest
    assert (made_of.rows, made_of.seq_len, made_of.top_k, made_of.shard_count) == (7, L - 1, K, 3)
    assert made_of.normalizer == "estimated" and made_of.logprob_bits == 16
    error = OlderRows(older, V).standard_error
    assert made_of.source == (
        "some/text:train (converted from the older layout: log-sum-exp estimated from 12 uniform ids per position, "
        f"standard error {error:.4f} on average)"
    )
    verify(tmp_path / "c")
    cache = KDCacheDataset(tmp_path / "c", preload=True)
    cache.require(seq_len=L - 1, vocab_size=V, temperature=2.0)
    batch = next(iter(cache.eval_batches(7)))
    _, fields = rows_of(older, temperatures=(1.0, 2.0))
    assert np.array_equal(batch["topk_ids"].numpy(), fields["topk_ids"])
    assert np.array_equal(batch["tail"].numpy(), fields["tail"])
    assert np.array_equal(batch["topk_logprobs"].numpy(), fields["topk_logprobs"].astype(np.float16).astype(np.float32))


def test_fewer_candidates_leave_the_normaliser_and_fill_the_tail(older, tmp_path):
    convert_older(older, tmp_path / "all", logprob_bits=32, **TEACHER)
    convert_older(older, tmp_path / "two", top_k=2, logprob_bits=32, **TEACHER)
    every, two = (next(iter(KDCacheDataset(tmp_path / name).eval_batches(7))) for name in ("all", "two"))
    assert torch.equal(two["topk_logprobs"], every["topk_logprobs"][..., :2])
    torch.testing.assert_close(
        two["tail"][..., 0], every["tail"][..., 0] + every["topk_logprobs"][..., 2:].exp().sum(-1), rtol=0, atol=1e-6
    )


def test_a_conversion_is_taken_for_another_cache_than_a_build_or_another_conversion(older, tmp_path):
    convert_older(older, tmp_path / "c", **TEACHER)
    before = contents(tmp_path / "c")
    with pytest.raises(CacheMismatch, match="normalizer: there 'estimated', asked for 'candidates'"):
        convert_older(older, tmp_path / "c", estimate_tail=False, **TEACHER)
    convert_older(older, tmp_path / "c", **TEACHER)
    assert contents(tmp_path / "c") == before
    convert_older(older, tmp_path / "d", estimate_tail=False, **TEACHER)
    with pytest.raises(CacheMismatch, match="normalizer"):
        merge([tmp_path / "c", tmp_path / "d"], tmp_path / "m")


def test_a_conversion_that_stops_is_gone_on_with(older, tmp_path):
    class Stopped(Exception):
        pass

    def progress(done, total):
        if done == 2:
            raise Stopped

    convert_older(older, tmp_path / "once", rows_per_shard=2, **TEACHER)
    with pytest.raises(Stopped):
        convert_older(older, tmp_path / "twice", rows_per_shard=2, progress=progress, **TEACHER)
    assert len(load_cache(tmp_path / "twice").shards) == 2
    convert_older(older, tmp_path / "twice", rows_per_shard=2, **TEACHER)
    assert contents(tmp_path / "once") == contents(tmp_path / "twice")


# ---- what can be wrong


def refused(folder, tmp_path, error=CacheError, **options):
    with pytest.raises(error) as caught:
        convert_older(folder, tmp_path / "c", **(TEACHER | options))
    text = str(caught.value)
    assert str(folder) in text and "\n" not in text and text.endswith(".")
    assert not (tmp_path / "c").exists()
    return text


def test_without_samples_there_is_no_honest_estimate(tmp_path):
    made(tmp_path / "o", m=0)
    text = refused(tmp_path / "o", tmp_path, ConfigError)
    assert "no rand_idx and rand_logits" in text and "--tail none" in text and "biased" in text
    assert (
        convert_older(tmp_path / "o", tmp_path / "c", estimate_tail=False, **TEACHER).manifest.normalizer
        == "candidates"
    )


def test_another_vocabulary_is_refused(older, tmp_path):
    text = refused(older, tmp_path, CacheMismatch, vocab_size=V + 1)
    assert f"vocab_size={V}, but the teacher's is {V + 1}" in text and "'some/teacher'" in text
    (older / "meta.json").write_text("{}")
    assert "vocabulary has 30 tokens" in refused(older, tmp_path, vocab_size=30)


@pytest.mark.parametrize("keep", [0, 100, 0.6])
def test_a_truncated_shard(older, tmp_path, keep):
    path = older / "shard_00001.pt"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    assert "shard_00001.pt' cannot be read" in refused(older, tmp_path)


def test_a_flipped_byte_of_a_logit(older, tmp_path):
    path = older / "shard_00001.pt"
    data = bytearray(path.read_bytes())
    logits = torch.load(path, weights_only=True)["topk_logits"].numpy().tobytes()
    data[data.index(logits) + 7] ^= 16
    path.write_bytes(data)
    assert "shard_00001.pt' is damaged (checksum of " in refused(older, tmp_path)


def test_the_first_format_of_torch_is_read_too(older, tmp_path):
    """It is no zip file, so it can neither be mapped nor checked."""
    convert_older(older, tmp_path / "zip", **TEACHER)
    for path in older.glob("*.pt"):
        torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    convert_older(older, tmp_path / "first", **TEACHER)
    assert contents(tmp_path / "zip") == contents(tmp_path / "first")


def test_logits_in_bfloat16(tmp_path):
    logits_NPV = made(tmp_path / "o", k=V, m=0, dtype=torch.bfloat16)
    _, fields = rows_of(tmp_path / "o")
    best_NP = logits_NPV.log_softmax(-1).amax(-1)
    np.testing.assert_allclose(fields["topk_logprobs"][..., 0], best_NP.numpy(), atol=1e-5)


def test_a_missing_shard_or_meta(older, tmp_path):
    shutil.copy(older / "shard_00001.pt", older / "shard_00003.pt")
    assert "lacks shard_00002.pt" in refused(older, tmp_path)
    (older / "shard_00003.pt").unlink()
    (older / "meta.json").write_text("[")
    assert "meta.json" in refused(older, tmp_path)
    (older / "meta.json").unlink()
    assert "meta.json" in refused(older, tmp_path)


def test_more_candidates_than_there_are_or_the_same_folder(older, tmp_path):
    assert "stores 5 candidates, but top_k=6; set --top-k to at most 5" in refused(
        older, tmp_path, ConfigError, top_k=6
    )
    with pytest.raises(ConfigError, match="is one of the folders that are read"):
        convert_older(older, older, **TEACHER)


@pytest.mark.parametrize("opened", [load_cache, KDCacheDataset, verify])
def test_what_reads_caches_of_today_names_the_script(older, opened):
    with pytest.raises(CacheError, match=r"of the older layout: .* with scripts/convert_older_cache\.py\.$"):
        opened(older)


def test_tensors_that_do_not_fit(older, tmp_path):
    path = older / "shard_00001.pt"
    whole = torch.load(path, weights_only=True)
    mask = torch.ones(3, L, dtype=torch.uint8)
    mask[0, 0] = 0
    twice = whole["topk_idx"].clone()
    twice[0, 0, 1] = twice[0, 0, 0]
    for changes, words in (
        ({"topk_logits": whole["topk_logits"][..., :-1]}, "do not fit each other"),
        ({"rand_idx": whole["rand_idx"][:, :-1]}, "do not fit each other"),
        ({"topk_idx": None}, "is no shard of the older layout"),
        ({"rand_logits": whole["rand_logits"] + 20}, "samples above the least of the candidates"),
        ({"attention_mask": mask}, "padding before tokens"),
        ({"topk_idx": twice}, "names a candidate twice"),
        ({"topk_idx": whole["topk_idx"] + V}, "vocabulary has 37 tokens"),
        ({"topk_logits": whole["topk_logits"] * math.nan}, "without a finite logit"),
    ):
        torch.save(whole, path)
        edit(path, **changes)
        assert words in refused(older, tmp_path), words
    made(tmp_path / "wide", k=K + 1)
    shutil.copy(tmp_path / "wide" / "shard_00001.pt", path)
    assert "keep the shards of one cache in a folder" in refused(older, tmp_path)
