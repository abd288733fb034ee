"""Perplexity, KL and agreement against NumPy in float64, window by window."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from qat_lora import models
from qat_lora.cache import KDCacheDataset
from qat_lora.errors import DataError
from qat_lora.evaluate import (
    Fidelity,
    cached_kl,
    fidelity_table,
    measure,
    read_fidelity,
    stream_windows,
    whole_windows,
    write_fidelity,
)
from qat_lora.runtime import LocalRuntime
from tests.conftest import VOCAB
from tests.tolerances import ORACLE_FLOAT32


def oracle(student, teacher, windows) -> tuple[float, float, float, int]:
    """The three numbers by their definitions, one position after the other."""
    nll, kl, same, count = 0.0, 0.0, 0, 0
    for ids, counted in zip(windows.input_ids_RT, windows.counted_RT, strict=True):
        with torch.no_grad():
            ours, theirs = (m(input_ids=ids[None]).logits[0].double().numpy() for m in (student, teacher))
        for t in range(len(ids)):
            if not counted[t]:
                continue
            q, p = (np.exp(z[t] - z[t].max()) / np.exp(z[t] - z[t].max()).sum() for z in (ours, theirs))
            nll -= math.log(q[ids[t + 1]])
            kl += float((p * np.log(p / q)).sum())
            same += int(p.argmax() == q.argmax())
            count += 1
    return math.exp(nll / count), kl / count, same / count, count


@pytest.mark.parametrize("batch_size", [1, 3])
def test_measure_equals_the_definitions(teacher_dir, other_teacher_dir, runtime, batch_size) -> None:
    student, teacher = (models.load(str(folder)).model for folder in (other_teacher_dir, teacher_dir))
    ids_RT = torch.randint(0, VOCAB, (5, 17))
    windows = whole_windows(ids_RT, torch.tensor([17, 17, 9, 17, 1]))
    scores, _ = measure(student, teacher, windows, batch_size=batch_size, runtime=runtime)
    ppl, kl, top1, tokens = oracle(student, teacher, windows)
    assert tokens == scores.tokens == 16 * 3 + 8
    np.testing.assert_allclose([scores.perplexity, scores.kl], [ppl, kl], **ORACLE_FLOAT32._asdict())
    assert scores.top1 == top1


def test_the_head_is_float32_where_the_body_computes_in_bf16(
    teacher_dir, other_teacher_dir, cache_dir, runtime
) -> None:
    """Logits rounded to bf16 would make the first KL larger by 3e-4 of it, the second, of a near student, by 0.16."""
    bf16 = LocalRuntime("cpu", dtype="bf16")
    student, teacher = (models.load(str(folder)).model for folder in (other_teacher_dir, teacher_dir))

    def log_probabilities(model, ids_BT):
        with torch.no_grad(), bf16.autocast():
            hidden_BTH = models.trunk_hidden(model, ids_BT)
        return (hidden_BTH.double() @ model.get_output_embeddings().weight.double().T).log_softmax(-1)

    ids_BT = torch.randint(0, VOCAB, (4, 17))
    logq_BTV, logp_BTV = (log_probabilities(model, ids_BT)[:, :-1] for model in (student, teacher))
    kl = (logp_BTV.exp() * (logp_BTV - logq_BTV)).sum(-1).mean().item()
    scores, _ = measure(student, teacher, whole_windows(ids_BT, torch.full((4,), 17)), batch_size=4, runtime=bf16)
    assert scores.kl == pytest.approx(kl, rel=ORACLE_FLOAT32.rtol)

    dataset = KDCacheDataset(cache_dir, preload=True)
    batch = next(dataset.batches(4))
    logq_BTK = log_probabilities(teacher, batch["input_ids"]).gather(-1, batch["topk_ids"])
    logp_BTK = batch["topk_logprobs"].double()
    kl_BT = (logp_BTK.exp() * (logp_BTK - logq_BTK)).sum(-1)
    kl = kl_BT[torch.arange(kl_BT.shape[1]) < batch["length"][:, None]].mean().item()
    found = cached_kl(teacher, [batch], dataset.manifest.target_spec, runtime=bf16, chunk_tokens=7)
    assert found == pytest.approx(kl, rel=0.01)  # 8e-6, which float32 tells to 1e-3


def test_a_teacher_is_at_distance_zero_of_itself(teacher_dir, runtime) -> None:
    teacher, same = (models.load(str(teacher_dir)).model for _ in range(2))
    windows = whole_windows(torch.randint(0, VOCAB, (2, 9)), torch.tensor([9, 9]))
    for other in (teacher, same):
        scores, _ = measure(teacher, other, windows, batch_size=2, runtime=runtime)
        assert (scores.kl, scores.top1) == (0.0, 1.0)


def test_whole_windows_give_the_loss_of_transformers(teacher_dir, runtime) -> None:
    model = models.load(str(teacher_dir)).model
    ids_RT = torch.randint(0, VOCAB, (3, 20))
    scores, _ = measure(model, model, whole_windows(ids_RT, torch.full((3,), 20)), batch_size=3, runtime=runtime)
    with torch.no_grad():
        expected = model(input_ids=ids_RT, labels=ids_RT).loss.exp().item()
    assert scores.perplexity == pytest.approx(expected, rel=1e-5)


def test_measuring_leaves_the_model_in_the_mode_it_was_in(teacher_dir, runtime) -> None:
    model = models.load(str(teacher_dir)).model.train()
    measure(model, models.load(str(teacher_dir)).model, whole_windows(torch.zeros(1, 5).long(), torch.tensor([5])),
            batch_size=1, runtime=runtime)  # fmt: skip
    assert model.training


@pytest.mark.parametrize("length", [2, 5, 8, 9, 21, 40])
@pytest.mark.parametrize("stride", [1, 3, 7])
def test_strided_windows_predict_every_token_once_with_the_most_context(length: int, stride: int) -> None:
    row_length, stream = 8, torch.arange(100, 100 + length)
    windows = stream_windows([stream.tolist()], (), row_length, stride)
    predicted = []
    for number, (ids, counted) in enumerate(zip(windows.input_ids_RT, windows.counted_RT, strict=True)):
        for t in counted.nonzero()[:, 0].tolist():
            predicted.append(int(ids[t + 1]))
            assert number == 0 or t + 1 >= row_length - stride, "a later window counts only what is at its end"
    assert predicted == stream[1:].tolist()


def test_stride_of_a_whole_window_loses_only_what_whole_windows_cannot_see() -> None:
    stream = torch.arange(32)
    strided = stream_windows([stream.tolist()], (), 8, 4)
    whole = whole_windows(stream.view(4, 8), torch.full((4,), 8))
    assert int(strided.counted_RT.sum()) == 31
    assert int(whole.counted_RT.sum()) == 28


def test_fidelity_json_and_table_hold_every_field(tmp_path) -> None:
    row = Fidelity("qat", 3.0, 12.5, 0.25, 0.75, 1_500_000, 99, data="a.txt", seq_len=128, versions={"torch": "2"})
    assert write_fidelity(tmp_path / "fidelity.json", [row]) == []
    assert Fidelity(**json.loads((tmp_path / "fidelity.json").read_text())[0]) == row
    assert [c.header for c in fidelity_table([row]).columns] == ["stage", "bits", "ppl", "KL", "top-1", "MB"]


def test_a_row_of_the_same_context_is_replaced_and_any_other_is_added(tmp_path) -> None:
    path, row = tmp_path / "fidelity.json", Fidelity("qat", perplexity=9.0, data="a", seq_len=128, checkpoint="c")
    others = [{"stage": "rtn"}, {"seq_len": 256}, {"data": "b"}, {"stride": 8}, {"teacher": "t"}, {"max_rows": 3},
              {"checkpoint": "d"}, {"model": "m"}, {"adapter": "e"}]  # fmt: skip
    write_fidelity(path, [row])
    for other in others:
        assert write_fidelity(path, [replace(row, **other)]) == []
    assert write_fidelity(path, [replace(row, perplexity=8.0, date="later")]) == ["qat"]
    rows = read_fidelity(path)
    assert len(rows) == 1 + len(others) and rows[-1]["perplexity"] == 8.0
    assert [r["perplexity"] for r in rows[:-1]] == [9.0] * len(others)


def test_the_table_fits_80_columns_and_keeps_the_adapters_bits_apart() -> None:
    rows = [
        Fidelity("exported (reloaded)", 34.04, 12345.67, 12.3456, 1.0, 12_345_670_000, 99, adapter_bits=2.04),
        Fidelity("qat", 2.51, 8.0),
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(fidelity_table(rows))
    text = console.file.getvalue()
    assert "32.00 + 2.04" in text and "bits + adapters" in text and "12345.67" in text and " 2.51 " in text
    assert len(text.splitlines()) == 3 + len(rows) + 1, "no line of it wraps"


def test_held_out_rows_without_an_answer_have_no_kl() -> None:
    """It would be 0.0, which nothing is below: best.pt would stay what the run began with."""
    with pytest.raises(DataError, match="hold no predictions of an answer, so there is no held-out KL; raise"):
        cached_kl(nn.Identity(), [], None, runtime=LocalRuntime("cpu"), chunk_tokens=8, answers_only=True)
