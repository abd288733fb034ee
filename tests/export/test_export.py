"""What is exported is what was trained: reloaded by plain transformers and plain peft, logits equal."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat_lora import models
from qat_lora.cli.main import main
from qat_lora.errors import ExportMismatch
from qat_lora.evaluate import Size
from qat_lora.export import Facts, export_dequantized, probe_ids, probe_logits, verify_export
from qat_lora.export.card import write_card
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


def python_of(card: str) -> str:
    """The lines of Python in a card."""
    return card.split("```python\n")[1].split("```")[0]


def model_of_the_card(folder: Path, monkeypatch) -> torch.nn.Module:
    """Run the lines of a folder's card in that folder, as its reader would, and return the model that they make."""
    lines = python_of((folder / "README.md").read_text())
    assert 4 <= len(lines.replace("\n\n", "\n").splitlines()) <= 6
    monkeypatch.chdir(folder)
    made: dict = {}
    exec(lines, made)
    return made["model"]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # of generate
def test_the_lines_of_every_card_give_the_students_logits_wherever_the_folder_lies(
    runs, tmp_path, teacher_dir, monkeypatch
) -> None:
    best, recovered = runs
    ids = probe_ids(VOCAB)
    for name, checkpoint, folders in (("dense", best, ["."]), ("pair", recovered, [".", "base", "adapter"])):
        exported = tmp_path / "first" / name
        assert main(["export", "--checkpoint", str(checkpoint), "--output", str(exported), "--quiet"]) == 0
        moved = (tmp_path / "moved").with_name(f"moved-{name}")
        shutil.move(exported, moved)
        expected = probe_logits(student_of(teacher_dir, checkpoint), ids)
        for folder in folders:
            assert torch.equal(probe_logits(model_of_the_card(moved / folder, monkeypatch), ids), expected), folder
        assert str(tmp_path) not in "".join(p.read_text() for p in moved.rglob("*.json")), "a path of this machine"
    assert not torch.equal(probe_logits(plain(moved / "base"), ids), expected), "the adapters do nothing"
    readme = Path(__file__).parents[2] / "README.md"
    assert python_of(readme.read_text()) == python_of((moved / "README.md").read_text())
    with pytest.raises((OSError, ValueError)):
        plain(moved)  # what would be the student without its adapters


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_an_adapter_alone_says_which_base_to_make(runs, tmp_path, teacher_dir, monkeypatch) -> None:
    _, recovered = runs
    alone = tmp_path / "alone"
    argv = ["export", "--checkpoint", str(recovered), "--output", str(alone), "--format", "adapter", "--quiet"]
    assert main(argv) == 0
    command = re.search(r"^    (qat-lora export .*)$", (alone / "README.md").read_text(), re.MULTILINE)[1]
    named = json.loads((alone / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert command in named, "what a loader is told is what a person is told"
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(alone)
    assert str(tmp_path) not in (alone / "README.md").read_text() + named, "a path of this machine"
    monkeypatch.chdir(recovered.parent.parent)
    assert main([*command.split()[1:], "--quiet"]) == 0
    shutil.move(recovered.parent.parent / "dequantized", alone / "dequantized")
    ids = probe_ids(VOCAB)
    expected = probe_logits(student_of(teacher_dir, recovered), ids)
    assert torch.equal(probe_logits(model_of_the_card(alone, monkeypatch), ids), expected)


def front_matter(folder: Path) -> dict:
    return yaml.safe_load((folder / "README.md").read_text().split("---")[1])


def test_a_card_names_the_base_the_bits_the_text_and_what_was_measured(runs, tmp_path, teacher_dir, text_file) -> None:
    _, recovered = runs
    run = tmp_path / "run"
    shutil.copytree(recovered.parent, run)
    text = ["--data", str(text_file), "--seq-len", "24", "--max-rows", "2", "--device", "cpu", "--quiet"]
    assert main(["eval", "--checkpoint", str(run / "best.pt"), "--no-rtn", *text]) == 0
    row = json.loads((run / "fidelity.json").read_text())[-1]
    folder = tmp_path / "export"
    assert main(["export", "--checkpoint", str(run / "best.pt"), "--output", str(folder), "--quiet"]) == 0
    assert front_matter(folder / "adapter") | {"tags": 0} == {
        "library_name": "peft", "pipeline_tag": "text-generation", "base_model": "../base",
        "base_model_relation": "adapter", "tags": 0,
    }  # fmt: skip
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "../base"
    assert "base_model" not in front_matter(folder), "a folder of this machine is no name for others"
    card = (folder / "README.md").read_text()
    bits = f"{row['bits_per_weight'] - row['adapter_bits']:.2f} + {row['adapter_bits']:.2f} adapters"
    for words in (
        bits,
        f"- trained on: {text_file}\n",
        teacher_dir.name,
        f"| {row['perplexity']:.2f} | {row['kl']:.4f} |",
    ):
        assert words in card, words
    (run / "fidelity.json").write_text(json.dumps([row | {"step": 99}]))  # of another step of that run
    shutil.rmtree(folder)
    assert main(["export", "--checkpoint", str(run / "best.pt"), "--output", str(folder), "--quiet"]) == 0
    assert "| perplexity |" not in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("teacher", "named"), [("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("./local/dir", None), ("embedded", None)]
)
def test_the_base_of_rounded_weights_is_the_hub_id_of_their_teacher(tmp_path, teacher, named) -> None:
    facts = Facts(teacher, "runs/q/best.pt", "2 bits", Size(2.5, 10), "a text", 0.5, [])
    write_card(tmp_path, facts, what="dequantized", base=".")
    assert front_matter(tmp_path).get("base_model") == named
    assert front_matter(tmp_path).get("base_model_relation") == ("quantized" if named else None)


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


def test_a_merge_that_is_wrong_is_refused(runs, tmp_path, teacher_dir) -> None:
    """The tolerance lets rounding pass, not a lost adapter."""
    _, recovered = runs
    student = student_of(teacher_dir, recovered)
    export_dequantized(student, models.load_tokenizer(teacher_dir), tmp_path / "no_adapters")
    with pytest.raises(ExportMismatch, match="differs from the student"):
        verify_export(student, tmp_path / "no_adapters", exact=False)


def test_a_probe_looks_at_tokens_of_the_whole_vocabulary() -> None:
    ids = probe_ids(151_936)
    assert ids.unique().numel() == 64 and ids.min() < 10_000 and ids.max() > 140_000


def test_exporting_leaves_the_student_as_it_was(runs, tmp_path, teacher_dir) -> None:
    _, recovered = runs
    student = student_of(teacher_dir, recovered)
    before = probe_logits(student, probe_ids(VOCAB))
    export_dequantized(student, models.load_tokenizer(teacher_dir), tmp_path / "dense")
    assert torch.equal(probe_logits(student, probe_ids(VOCAB)), before)
