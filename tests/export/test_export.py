"""What is exported is what was trained: reloaded by plain transformers and plain peft, logits equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat_lora import models
from qat_lora.cli.main import main
from qat_lora.errors import ExportMismatch
from qat_lora.export import export_dequantized, probe_ids, probe_logits, verify_export
from qat_lora.runtime import LocalRuntime
from qat_lora.train.run import run_qat, run_recovery
from qat_lora.train.student import load_student
from tests.conftest import VOCAB, qat_run, recovery_run
from tests.tolerances import MERGED_LOGITS_SHARE, assert_close_to_largest


@pytest.fixture(scope="module", params=["q2_g32", "q2a4"])
def runs(request, tmp_path_factory, cache_dir) -> tuple[Path, Path]:
    folder, runtime = tmp_path_factory.mktemp(request.param), LocalRuntime("cpu")
    best = run_qat(qat_run(cache_dir, folder / "qat", preset=request.param, loop={"max_steps": 3}), runtime).best
    recovered = run_recovery(recovery_run(cache_dir, folder / "recovery", best, loop={"max_steps": 4}), runtime).best
    return best, recovered


def student_of(teacher_dir: Path, checkpoint: Path) -> torch.nn.Module:
    return load_student(models.load(str(teacher_dir)), checkpoint)[0].eval()


def plain(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_the_dequantised_folder_has_the_students_logits_bit_for_bit(runs, tmp_path, teacher_dir) -> None:
    best, _ = runs
    assert main(["export", "--checkpoint", str(best), "--output", str(tmp_path / "dense"), "--quiet"]) == 0
    ids = probe_ids(VOCAB)
    assert torch.equal(probe_logits(plain(tmp_path / "dense"), ids), probe_logits(student_of(teacher_dir, best), ids))
    assert AutoTokenizer.from_pretrained(tmp_path / "dense")("the fox")["input_ids"]
    assert not (tmp_path / "dense" / "adapter").exists()


def test_plain_peft_on_the_dequantised_base_has_the_students_logits_bit_for_bit(runs, tmp_path, teacher_dir) -> None:
    _, recovered = runs
    for name, extra in (("both", ()), ("alone", ("--format", "adapter"))):
        argv = ["export", "--checkpoint", str(recovered), "--output", str(tmp_path / name), "--quiet", *extra]
        assert main(argv) == 0
    assert {p.name for p in (tmp_path / "alone").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    ids = probe_ids(VOCAB)
    expected = probe_logits(student_of(teacher_dir, recovered), ids)
    for adapter in (tmp_path / "both" / "adapter", tmp_path / "alone"):
        reloaded = PeftModel.from_pretrained(plain(tmp_path / "both"), str(adapter)).eval()
        assert torch.equal(probe_logits(reloaded, ids), expected)
    assert not torch.equal(probe_logits(plain(tmp_path / "both"), ids), expected), "the adapters do nothing"


def test_the_merged_folder_has_the_students_logits_up_to_rounding(runs, tmp_path, teacher_dir) -> None:
    _, recovered = runs
    argv = ["export", "--checkpoint", str(recovered), "--format", "merged", "--output", str(tmp_path / "m"), "--quiet"]
    assert main(argv) == 0
    student = student_of(teacher_dir, recovered)
    ids = probe_ids(VOCAB)
    ours, theirs = probe_logits(student, ids), probe_logits(plain(tmp_path / "m"), ids)
    assert_close_to_largest(theirs, ours, share=MERGED_LOGITS_SHARE)


def test_an_export_that_differs_is_refused(runs, tmp_path, teacher_dir) -> None:
    best, _ = runs
    student = student_of(teacher_dir, best)
    export_dequantized(student, models.load_tokenizer(teacher_dir), tmp_path / "dense")
    assert verify_export(student, tmp_path / "dense", exact=True) == 0.0
    with torch.no_grad():
        next(student.parameters())[3, 3] += 1e-3
    with pytest.raises(ExportMismatch, match="differs from the student"):
        verify_export(student, tmp_path / "dense", exact=True)


def test_exporting_leaves_the_student_as_it_was(runs, tmp_path, teacher_dir) -> None:
    _, recovered = runs
    student = student_of(teacher_dir, recovered)
    before = probe_logits(student, probe_ids(VOCAB))
    export_dequantized(student, models.load_tokenizer(teacher_dir), tmp_path / "dense")
    assert torch.equal(probe_logits(student, probe_ids(VOCAB)), before)
