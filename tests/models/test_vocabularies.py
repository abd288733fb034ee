"""Teachers and students of one tokenizer whose embeddings are padded to other sizes: caches, training, evaluation.

The tiny teacher has 211 ids, its tokenizer 101.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from qat_lora import models
from qat_lora.cache import KDCacheDataset
from qat_lora.cli import commands
from qat_lora.cli.main import main
from qat_lora.config import KDConfig
from qat_lora.errors import CacheMismatch
from qat_lora.evaluate import cached_kl, measure, whole_windows
from qat_lora.runtime import LocalRuntime
from qat_lora.train.run import run_qat, run_recovery
from tests.conftest import VOCAB, cache_run, qat_run, recovery_run

TOKENS = 101


@pytest.fixture(scope="module")
def resized(tmp_path_factory, teacher_dir):
    """(ids) -> the tiny teacher with so many rows of its embedding, those beyond its own drawn like them."""

    def make(ids: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ids{ids}")
        loaded = models.load(str(teacher_dir))
        model, weight_VH = loaded.model, loaded.model.get_input_embeddings().weight.detach()
        model.resize_token_embeddings(ids)
        rows = torch.randn(ids, weight_VH.shape[1], generator=torch.Generator().manual_seed(1)) * weight_VH.std()
        rows[:VOCAB] = weight_VH[:ids]
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(rows)
        models.save_pretrained(model, loaded.tokenizer, folder)
        identity = models.load(str(folder)).identity
        assert (identity.vocab_size, identity.tokenizer_size) == (ids, TOKENS)
        assert identity.tokenizer == loaded.identity.tokenizer
        return folder

    return make


def logits_of(folder: Path, ids_BT: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return models.load(str(folder)).model(input_ids=ids_BT).logits


@pytest.mark.parametrize("ids", [104, 230])
def test_the_cached_kl_is_that_of_the_distribution_over_the_ids_that_a_student_has(
    ids, resized, teacher_dir, cache_dir, runtime
) -> None:
    """Of a cache of the teacher's whole vocabulary. A student with fewer ids and the same weights is the teacher."""
    folder = resized(ids)
    cache = KDCacheDataset(cache_dir).for_vocabulary(ids)
    assert int(cache[0]["topk_ids"].max()) == min(ids, VOCAB) - 1
    rows = [cache[row] for row in range(4)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    teacher, student = (logits_of(at, batch["input_ids"]) for at in (teacher_dir, folder))
    logp = teacher[..., :ids].log_softmax(-1)
    wanted = (logp.exp() * (logp - student.log_softmax(-1)[..., : logp.shape[-1]])).sum(-1).mean()
    model = models.load(str(folder)).model
    found = cached_kl(model, [batch], cache.manifest.target_spec, runtime=runtime, chunk_tokens=32)
    assert found == pytest.approx(wanted.item(), rel=1e-4, abs=2e-6)
    assert (wanted.item() > 0.05) == (ids > VOCAB)


@pytest.mark.parametrize("top_k", [8, VOCAB])
@pytest.mark.parametrize("ids", [TOKENS, 104, 230])
def test_a_padded_student_trains(ids, top_k, resized, teacher_dir, text_file, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    commands.cache(cache_run(teacher_dir, text_file, tmp_path / "c", top_k=top_k))
    folder = str(resized(ids))
    kd = KDConfig(
        anchor_kl_weight=0.1, hard_weight=0.01, ce_alpha=0.01
    )  # labels pull away from the KL: a little of them
    run = qat_run(tmp_path / "c", tmp_path / "qat", model=folder, kd=kd, loop={"max_steps": 20, "eval_every": 10})
    caplog.clear()
    result = run_qat(run, LocalRuntime("cpu"))
    assert 0 < result.state.best_kl < result.state.first_kl
    said = f"has 211 ids, the model {folder} has {ids}; their tokenizer has 101, the others are padding"
    assert caplog.text.count(said) == 1
    recovery = recovery_run(tmp_path / "c", tmp_path / "rec", result.best, loop={"max_steps": 10})
    assert run_recovery(recovery, LocalRuntime("cpu")).state.best_kl < result.state.best_kl


def test_a_student_that_lacks_ids_of_the_tokenizer_is_refused(resized, cache_dir, tmp_path) -> None:
    loaded = models.load(str(resized(TOKENS)))
    model, folder = loaded.model, tmp_path / "small"
    model.resize_token_embeddings(TOKENS - 1)
    models.save_pretrained(model, loaded.tokenizer, folder)
    with pytest.raises(
        CacheMismatch, match="vocab_size=211, but the run needs vocab_size=100; 100 cannot hold the tokenizer's 101 ids"
    ):
        run_qat(qat_run(cache_dir, tmp_path / "run", model=str(folder)), LocalRuntime("cpu"))


def test_padding_of_another_tokenizer_is_refused(resized, cache_dir, tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resized(230), folder)
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["model"]["merges"] = tree["model"]["merges"][:-1]
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(CacheMismatch, match="vocab_size=230; their tokenizers differ, so this is more than padding"):
        run_qat(qat_run(cache_dir, tmp_path / "run", model=str(folder)), LocalRuntime("cpu"))


@pytest.mark.parametrize("ids", [104, 230])
@pytest.mark.parametrize("batch_size", [3, 8])
def test_an_evaluation_is_over_the_ids_of_both(ids, batch_size, resized, other_teacher_dir, runtime) -> None:
    folder = resized(ids)
    ids_BT = torch.randint(TOKENS, (8, 24))
    windows = whole_windows(ids_BT, torch.full((8,), 24))
    student, teacher = (models.load(str(at)).model for at in (other_teacher_dir, folder))
    scores, _ = measure(student, teacher, windows, batch_size=batch_size, runtime=runtime)
    ours, theirs = (logits_of(at, ids_BT)[:, :-1] for at in (other_teacher_dir, folder))
    common = min(ids, VOCAB)
    logp, logq = theirs[..., :common].log_softmax(-1), ours[..., :common].log_softmax(-1)
    assert scores.kl == pytest.approx((logp.exp() * (logp - logq)).sum(-1).mean().item(), rel=1e-4)
    assert scores.top1 == pytest.approx((logp.argmax(-1) == logq.argmax(-1)).float().mean().item())
    alone, _ = measure(student, None, windows, batch_size=batch_size, runtime=runtime)
    assert scores.perplexity == alone.perplexity, "the student's own, whoever it is compared with"


def test_eval_says_over_which_ids_and_refuses_what_is_more_than_padding(
    resized, teacher_dir, text_file, tmp_path, caplog, capsys
) -> None:
    caplog.set_level(logging.INFO)
    smaller = str(resized(104))
    command = (
        f"eval --model {smaller} --data {text_file} --seq-len 24 --max-rows 4 --device cpu --output {tmp_path}/f.json"
    )
    assert main(f"{command} --teacher {teacher_dir}".split()) == 0
    assert "has 211 ids, the model 104; KL and top-1 are over the 104 that both have" in caplog.text
    found = json.loads((tmp_path / "f.json").read_text())[0]
    assert abs(found["kl"]) < 1e-6 and found["top1"] == 1.0, "the same weights"
    loaded = models.load(smaller)
    loaded.model.resize_token_embeddings(TOKENS - 1)
    models.save_pretrained(loaded.model, loaded.tokenizer, tmp_path / "small")
    assert main(f"{command} --teacher {tmp_path}/small".split()) == 2
    said = capsys.readouterr().err
    assert "vocab_size 100, the model" in said and "has 104, and their tokenizer has 101 ids" in said


def test_info_says_what_is_padding(cache_dir, capsys) -> None:
    assert main(["cache", "info", str(cache_dir)]) == 0
    assert "101 ids of the tokenizer, 110 of padding" in " ".join(capsys.readouterr().out.split())
