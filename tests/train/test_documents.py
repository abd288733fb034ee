"""Caches of packed and of padded documents, from a text to gradients: each document as if it were alone.

The reference knows nothing of rows: it runs teacher and student, as transformers computes them, on one document at a
time, and adds up.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat_lora import models
from qat_lora.cache import KDCacheDataset, summarise
from qat_lora.cli import commands
from qat_lora.config import ExecutionConfig, KDConfig
from qat_lora.config.presets import scheme
from qat_lora.errors import ModelError
from qat_lora.evaluate import cached_kl
from qat_lora.runtime import LocalRuntime
from qat_lora.train.anchor import build_anchor
from qat_lora.train.objective import KDObjective
from qat_lora.train.run import run_qat, run_recovery
from qat_lora.train.student import round_to_nearest
from tests.conftest import SEQ_LEN, VOCAB, cache_run, qat_run, recovery_run
from tests.tolerances import (
    REORDERED_GRADIENT_SHARE,
    REWRITTEN_FLOAT32,
    REWRITTEN_GRADIENT_SHARE,
    assert_close_to_largest,
)

PACKINGS = ["documents", "pad"]


@pytest.fixture(scope="session")
def texts_file(tmp_path_factory, text_file) -> Path:
    """Texts of 1 to 6 lines, hence of a few tokens up to several rows."""
    lines, texts, at = text_file.read_text().splitlines(), [], 0
    for count in [1, 3, 1, 6, 2] * 8:
        words = " ".join(lines[at : at + count]).split()
        texts.append(" ".join(words[: 3 + len(words) * (at % 4) // 3]))
        at += count
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("\n".join(f'{{"text": "{text}"}}' for text in texts if text))
    return path


@pytest.fixture(scope="session")
def packed_caches(tmp_path_factory, teacher_dir, texts_file) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packed")
    for packing in PACKINGS:
        run = cache_run(teacher_dir, texts_file, folder / packing, top_k=VOCAB, logprob_bits=32, packing=packing)
        commands.cache(run)
    return {packing: folder / packing for packing in PACKINGS}


def documents_of(batch: dict[str, Tensor]) -> list[Tensor]:
    """The token ids [n] of each document, or piece of one, in the rows of a batch."""
    found = []
    for row, (ids_T, length) in enumerate(zip(batch["input_ids"], batch["length"].tolist(), strict=True)):
        places = batch["position_ids"][row].tolist() if "position_ids" in batch else range(len(ids_T))
        begins = [t for t in range(length) if places[t] == 0]
        found += [ids_T[a:b] for a, b in zip(begins, [*begins, length][1:], strict=True)]
    return found


def batch_of(dataset: KDCacheDataset, rows: int = 6) -> dict[str, Tensor]:
    batch = next(dataset.batches(rows))
    assert len(documents_of(batch)) > rows or (batch["length"] < SEQ_LEN).any()
    return batch


def student_of(teacher_dir: Path) -> nn.Module:
    model = models.load(str(teacher_dir)).model
    round_to_nearest(model, scheme("q2_g32"))
    return model.requires_grad_(True)


def log_softmax_of(model: nn.Module, ids_T: Tensor, temperature: float = 1.0) -> Tensor:
    return (model(input_ids=ids_T[None]).logits[0] / temperature).log_softmax(-1)


def kl_alone(student: nn.Module, teacher: nn.Module, documents: list[Tensor], temperature: float = 1.0) -> Tensor:
    """Mean KL over all tokens of all documents, each alone in a row, times T^2."""
    total = torch.zeros(())
    for ids_T in documents:
        with torch.no_grad():
            p = log_softmax_of(teacher, ids_T, temperature)
        total = total + F.kl_div(log_softmax_of(student, ids_T, temperature), p, log_target=True, reduction="sum")
    return total * temperature**2 / sum(map(len, documents))


def objective_value(kd: KDConfig, dataset: KDCacheDataset, student, batch, runtime, anchor=None) -> Tensor:
    objective = KDObjective(kd, dataset.manifest.target_spec, runtime, total_steps=10, anchor=anchor)
    counts = objective.counts([batch], position=0)
    return sum(term.loss for term in objective.losses(student, batch, counts, step=0, position=0))


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("packing", PACKINGS)
def test_the_cache_is_the_live_teacher_on_each_document_alone(
    packing, temperature, recomputed, packed_caches, teacher_dir, runtime
) -> None:
    dataset = KDCacheDataset(packed_caches[packing], preload=True)
    teacher, student, alone = models.load(str(teacher_dir)).model, student_of(teacher_dir), student_of(teacher_dir)
    if recomputed:
        models.checkpoint_layers(student.train(), runtime.checkpoint)
    batch = batch_of(dataset)
    loss = objective_value(KDConfig(temperature=temperature), dataset, student, batch, runtime)
    loss.backward()
    expected = kl_alone(alone, teacher, documents_of(batch), temperature)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), **REWRITTEN_FLOAT32._asdict())
    found = dict(student.named_parameters())
    for name, p in alone.named_parameters():
        assert_close_to_largest(found[name].grad, p.grad, share=2 * REWRITTEN_GRADIENT_SHARE, name=name)


@pytest.mark.parametrize("packing", PACKINGS)
def test_no_label_is_another_documents_token(packing, packed_caches, teacher_dir, runtime) -> None:
    """Next-token cross entropy alone (alpha = 1), whose positions are one fewer per document."""
    dataset = KDCacheDataset(packed_caches[packing], preload=True)
    student, batch = student_of(teacher_dir), batch_of(dataset)
    documents = documents_of(batch)
    with torch.no_grad():
        found = objective_value(KDConfig(ce_alpha=1.0), dataset, student, batch, runtime)
        nats = [-log_softmax_of(student, ids)[:-1].gather(1, ids[1:, None]).sum() for ids in documents if len(ids) > 1]
    expected = torch.stack(nats).sum() / sum(len(ids) - 1 for ids in documents)
    torch.testing.assert_close(found, expected, **REWRITTEN_FLOAT32._asdict())


@pytest.mark.parametrize("packing", PACKINGS)
def test_evaluation_and_anchor_rows_see_each_document_alone(
    packing, packed_caches, teacher_dir, other_teacher_dir, runtime
) -> None:
    dataset = KDCacheDataset(packed_caches[packing], preload=True)
    teacher, start = (models.load(str(folder)).model for folder in (teacher_dir, other_teacher_dir))
    student = student_of(teacher_dir)
    batches = list(dataset.eval_batches(4, rows=7))
    documents = [ids for batch in batches for ids in documents_of(batch)]
    kl = cached_kl(student, batches, dataset.manifest.target_spec, runtime=runtime, chunk_tokens=16)
    with torch.no_grad():
        assert kl == pytest.approx(kl_alone(student, teacher, documents).item(), rel=REWRITTEN_FLOAT32.rtol)

    anchor = build_anchor(start, dataset, samples=5, batch_size=3, chunk_tokens=7, runtime=runtime)
    rows = [dataset[row] for row in range(5)]
    held = documents_of({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
    batch = batch_of(dataset, 5)
    kd = KDConfig(anchor_kl_weight=0.5, anchor_samples=5)
    with torch.no_grad():
        found = objective_value(kd, dataset, student, batch, runtime, anchor)
        expected = kl_alone(student, teacher, documents_of(batch)) + 0.5 * kl_alone(student, start, held)
    torch.testing.assert_close(found, expected, **REWRITTEN_FLOAT32._asdict())


def test_padding_changes_no_gradient_and_no_evaluation(packed_caches, teacher_dir, runtime) -> None:
    """Other tokens, other candidates, other everything behind a row's length."""
    dataset = KDCacheDataset(packed_caches["pad"], preload=True)
    batch = batch_of(dataset)
    padding = torch.arange(SEQ_LEN) >= batch["length"][:, None]
    assert padding.any()
    other = {name: x.clone() for name, x in batch.items()}
    other["input_ids"][padding] = 7
    other["topk_ids"][padding] = other["topk_ids"][padding].flip(-1)
    other["topk_logprobs"][padding] = -3.0
    other["tail"][padding] = 0.3
    kd = KDConfig(ce_alpha=0.3, hard_weight=0.2)
    found = []
    for given in (batch, other):
        student = student_of(teacher_dir)
        loss = objective_value(kd, dataset, student, given, runtime)
        loss.backward()
        kl = cached_kl(student, [given], dataset.manifest.target_spec, runtime=runtime, chunk_tokens=16)
        found.append((loss.item(), kl, [p.grad for p in student.parameters()]))
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-7)
    for grad, expected in zip(found[1][2], found[0][2], strict=True):
        assert_close_to_largest(grad, expected, share=REORDERED_GRADIENT_SHARE)


def test_both_packings_hold_the_same_documents_and_count_the_same_tokens(tmp_path, texts_file, teacher_dir) -> None:
    """With nothing held out, for which documents are cut and put last."""
    tokenizer = models.load(str(teacher_dir)).tokenizer
    found = {}
    for packing in PACKINGS:
        path = tmp_path / packing
        commands.cache(cache_run(teacher_dir, texts_file, path, packing=packing, eval_fraction=0.0))
        dataset = KDCacheDataset(path, preload=True)
        batch = next(dataset.eval_batches(len(dataset)))
        found[packing] = torch.cat(documents_of(batch)).tolist()
        assert summarise(path).tokens == len(found[packing])
        assert summarise(path).index.manifest.packing == packing
    lines = [line.removeprefix('{"text": "').removesuffix('"}') for line in texts_file.read_text().splitlines()]
    expected = [x for text in lines for x in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert found["documents"] == found["pad"] == expected


class Stop(Exception):
    pass


class StopAt3:
    every = 3

    def start(self, state) -> None: ...

    def after_step(self, state, info) -> None:
        raise Stop

    def end(self, state) -> None: ...


@pytest.mark.parametrize("packing", PACKINGS)
def test_whole_runs_train_on_these_caches_and_resume_with_their_anchor(packing, packed_caches, tmp_path) -> None:
    runtime, kd = LocalRuntime("cpu"), KDConfig(ce_alpha=0.1, anchor_kl_weight=0.2, anchor_samples=6)
    cache = packed_caches[packing]
    qat = run_qat(qat_run(cache, tmp_path / "qat", kd=kd), runtime)
    assert qat.state.last_kl < qat.state.first_kl
    execution = ExecutionConfig(gradient_checkpointing="on")
    loop = {"max_steps": 12, "save_every": 3}
    run = recovery_run(cache, tmp_path / "rec", qat.best, kd=kd, execution=execution, loop=loop)
    whole = run_recovery(replace(run, output=tmp_path / "whole"), runtime)
    with pytest.raises(Stop):
        run_recovery(run, runtime, hooks=[StopAt3()])
    resumed = run_recovery(run, runtime, launch="resume")
    assert whole.state.last_kl < whole.state.first_kl
    assert resumed.state.last_kl == whole.state.last_kl
    for name, p in whole.state.trained.items():
        assert torch.equal(resumed.state.trained[name], p), name


def test_a_model_that_cannot_keep_documents_apart_is_refused_by_build_and_run(
    packed_caches, teacher_dir, texts_file, tmp_path, monkeypatch
) -> None:
    plain = models.trunk_hidden
    monkeypatch.setattr(models.forward, "trunk_hidden", lambda model, ids, positions=None: plain(model, ids))
    with pytest.raises(ModelError, match="Qwen3ForCausalLM cannot keep documents in one row apart"):
        commands.cache(cache_run(teacher_dir, texts_file, tmp_path / "c", packing="documents"))
    assert not (tmp_path / "c" / "manifest.json").exists()
    commands.cache(cache_run(teacher_dir, texts_file, tmp_path / "pad", packing="pad"))
    with pytest.raises(ModelError, match="Qwen3ForCausalLM cannot keep documents in one row apart"):
        run_qat(qat_run(packed_caches["documents"], tmp_path / "qat"), LocalRuntime("cpu"))
