"""A user's mistake is one sentence with the value, the place and the fix; exit code 2, nothing half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from qat_lora.cli.main import main
from qat_lora.train.run import run_qat
from tests.conftest import qat_run


@pytest.fixture(scope="module")
def student(tmp_path_factory, cache_dir) -> Path:
    from qat_lora.runtime import LocalRuntime

    return run_qat(
        qat_run(cache_dir, tmp_path_factory.mktemp("run") / "qat", loop={"max_steps": 1}), LocalRuntime("cpu")
    ).best


@pytest.fixture
def refused(capsys, tmp_path):
    """Run a command that must be refused, and return the sentence that it prints."""

    def contents() -> dict[Path, bytes | None]:
        return {path: path.read_bytes() if path.is_file() else None for path in sorted(tmp_path.rglob("*"))}

    def run(*argv: object, names: tuple[str, ...]) -> str:
        before = contents()
        assert main([str(a) for a in (*argv, *(() if argv[0] in ("demo", "export") else ("--device", "cpu")))]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qat-lora: error:")]
        assert len(lines) == 1
        for name in names:
            assert name in lines[0], lines[0]
        assert contents() == before, "something was written, changed or removed"
        return lines[0]

    return run


def test_missing_checkpoint(refused, tmp_path, cache_dir) -> None:
    refused(
        "recover", "--checkpoint", tmp_path / "no.pt", "--cache-dir", cache_dir, "--output", tmp_path / "out",
        names=("no.pt", "does not exist", "best.pt"),
    )  # fmt: skip


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_truncated_checkpoint(refused, tmp_path, cache_dir, student, keep) -> None:
    data = student.read_bytes()
    path = tmp_path / "cut.pt"
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    refused(
        "recover", "--checkpoint", path, "--cache-dir", cache_dir, "--output", tmp_path / "out",
        names=("cut.pt", "truncated"),
    )  # fmt: skip


def test_a_pickle_is_not_unpickled(refused, tmp_path, cache_dir) -> None:
    torch.save({"format": "qat_lora.checkpoint", "evil": Path("x")}, tmp_path / "evil.pt")
    refused("recover", "--checkpoint", tmp_path / "evil.pt", "--cache-dir", cache_dir, "--output", tmp_path / "out",
            names=("evil.pt",))  # fmt: skip


def test_another_tools_checkpoint(refused, tmp_path, cache_dir) -> None:
    torch.save({"weights": torch.zeros(2)}, tmp_path / "other.pt")
    refused(
        "eval",
        "--checkpoint",
        tmp_path / "other.pt",
        "--output",
        tmp_path / "f.json",
        names=("not written by qat_lora",),
    )


def test_checkpoint_of_another_model(refused, tmp_path, student, other_teacher_dir, text_file) -> None:
    refused(
        "eval", "--checkpoint", student, "--model", other_teacher_dir, "--data", text_file, "--seq-len", 24,
        "--output", tmp_path / "f.json", names=("was made from", "weights", str(other_teacher_dir)),
    )  # fmt: skip


def test_cache_of_another_model(refused, tmp_path, cache_dir, other_teacher_dir) -> None:
    refused(
        "qat", "--cache-dir", cache_dir, "--model", other_teacher_dir, "--output", tmp_path / "out",
        names=("teacher_digest", str(cache_dir)),
    )  # fmt: skip


def test_cache_of_another_tokenizer(refused, tmp_path, cache_dir, teacher_dir) -> None:
    model = tmp_path / "model"
    shutil.copytree(teacher_dir, model)
    tree = json.loads((model / "tokenizer.json").read_text())
    tree["model"]["merges"] = tree["model"]["merges"][:-1]
    (model / "tokenizer.json").write_text(json.dumps(tree))
    refused(
        "qat", "--cache-dir", cache_dir, "--model", model, "--output", tmp_path / "out", names=("tokenizer_digest",)
    )


@pytest.mark.parametrize("command", ["qat", "recover"])
def test_one_model_over_ranks_that_were_not_started(refused, tmp_path, cache_dir, student, command) -> None:
    refused(
        command, "--checkpoint", student, "--cache-dir", cache_dir, "--output", tmp_path / "out", "--shard", "fsdp",
        names=("shard=fsdp", "WORLD_SIZE=1 on cpu", "start with torchrun"),
    )  # fmt: skip


@pytest.mark.parametrize("shard", ["spmd", "spmd_data"])
def test_one_program_for_chips_that_are_not_there(refused, tmp_path, cache_dir, shard) -> None:
    refused(
        "qat", "--cache-dir", cache_dir, "--output", tmp_path / "out", "--shard", shard,
        names=(f"shard={shard}", "WORLD_SIZE=1 on cpu", "--device tpu without --num-chips"),
    )  # fmt: skip


@pytest.mark.parametrize("command", ["cache", "qat", "recover"])
def test_chips_on_a_device_that_has_none(refused, tmp_path, command) -> None:
    refused(
        command, "--output", tmp_path / "out", "--num-chips", "2",
        names=("--num-chips=2 with --device cpu", "on GPUs and CPUs use torchrun"),
    )  # fmt: skip


def test_no_cache(refused, tmp_path) -> None:
    refused("qat", "--cache-dir", tmp_path / "none", "--output", tmp_path / "out", names=("manifest.json", "none"))


def test_a_temperature_that_the_cache_lacks(refused, tmp_path, cache_dir) -> None:
    refused(
        "qat", "--cache-dir", cache_dir, "--temperature", 3.5, "--output", tmp_path / "out", names=("3.5", "[1.0, 2.0]")
    )


def test_a_sequence_length_and_a_k_that_the_cache_lacks(refused, tmp_path, cache_dir) -> None:
    refused("qat", "--cache-dir", cache_dir, "--seq-len", 48, "--output", tmp_path / "out", names=("48", "24"))
    refused("qat", "--cache-dir", cache_dir, "--top-k", 999, "--output", tmp_path / "out", names=("999", "211"))


def test_a_cache_longer_than_the_context(refused, tmp_path, teacher_dir, text_file) -> None:
    refused(
        "cache", "--teacher", teacher_dir, "--data", text_file, "--seq-len", 65, "--output", tmp_path / "c",
        names=("65", "64"),
    )  # fmt: skip


def test_more_candidates_than_the_vocabulary_has(refused, tmp_path, teacher_dir, text_file) -> None:
    refused(
        "cache", "--teacher", teacher_dir, "--data", text_file, "--seq-len", 24, "--top-k", 212,
        "--output", tmp_path / "c", names=("212", "211"),
    )  # fmt: skip


@pytest.mark.parametrize("part", ["5/4", "0/4", "a/b", "2", "-1/4", "1/0", "2/4/8"])
def test_a_part_that_is_none(refused, tmp_path, teacher_dir, text_file, part) -> None:
    refused(
        "cache", "--teacher", teacher_dir, "--data", text_file, "--output", tmp_path / "c", f"--part={part}",
        names=("part must be i/n with i from 1 to n", f"part={part!r}", "--part 2/4"),
    )  # fmt: skip


def built_part(folder: Path, teacher: Path, text: Path, part: str, top_k: int = 8) -> tuple[object, ...]:
    """Build one part into a folder and return the command line."""
    argv = (
        "cache", "--teacher", teacher, "--data", text, "--seq-len", 24, "--top-k", top_k, "--max-rows", 40,
        "--rows-per-shard", 16, "--output", folder, "--quiet",
    )  # fmt: skip
    assert main([str(a) for a in (*argv, "--device", "cpu", "--part", part)]) == 0
    return argv


def test_more_parts_than_shards(refused, tmp_path, teacher_dir, text_file) -> None:
    argv = built_part(tmp_path / "a", teacher_dir, text_file, "1/3")
    refused(*argv[:-2], tmp_path / "b", "--part", "2/4", names=("part='2/4'", "3 shards", "--rows-per-shard"))


def test_a_part_that_is_missing(refused, tmp_path, teacher_dir, text_file) -> None:
    argv = built_part(tmp_path / "c", teacher_dir, text_file, "1/3")
    built_part(tmp_path / "c", teacher_dir, text_file, "3/3")
    refused("qat", "--cache-dir", tmp_path / "c", "--output", tmp_path / "out",
            names=(str(tmp_path / "c"), "2 of 3 shards and lacks 1", "copy the files of all parts"))  # fmt: skip
    assert main([str(a) for a in (*argv, "--device", "cpu")]) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").iterdir()}
    assert main([str(a) for a in (*argv, "--device", "cpu", "--part", "2/3")]) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "c").iterdir()} == before, "there is nothing to do"


def test_parts_of_two_caches(refused, tmp_path, teacher_dir, text_file) -> None:
    argv = built_part(tmp_path / "c", teacher_dir, text_file, "1/2")
    built_part(tmp_path / "other", teacher_dir, text_file, "2/2", top_k=5)
    shutil.copytree(tmp_path / "other", tmp_path / "c", dirs_exist_ok=True)
    refused("qat", "--cache-dir", tmp_path / "c", "--output", tmp_path / "out",
            names=(".safetensors", "of another KD cache", "delete it to have it built"))  # fmt: skip
    refused(*argv, names=("manifest.json", "top_k: there 5, asked for 8", "--output"))


@pytest.mark.parametrize("size", [0, -32, "x"])
def test_a_group_size_that_is_no_positive_number(refused, tmp_path, cache_dir, size) -> None:
    refused(
        "qat", "--cache-dir", cache_dir, "--set", f"scheme.mlp.group_size={size}", "--output", tmp_path / "out",
        names=("group_size", str(size)),
    )  # fmt: skip


def test_unknown_preset(refused, tmp_path, cache_dir) -> None:
    refused(
        "qat", "--cache-dir", cache_dir, "--preset", "q2_g23", "--output", tmp_path / "out", names=("q2_g23", "q2_g32")
    )


def test_unknown_override_key(refused, tmp_path, cache_dir) -> None:
    refused(
        "qat", "--cache-dir", cache_dir, "--set", "optim.learning=1", "--output", tmp_path / "out",
        names=("optim.learning", "lr"),
    )  # fmt: skip


def test_unknown_flag_and_bad_numbers(refused, tmp_path, cache_dir) -> None:
    out = ("--output", tmp_path / "out")
    refused("qat", "--bach-size", 4, *out, names=("--bach-size", "--batch-size"))
    refused("qat", "--batch-size", "four", *out, names=("batch_size", "'four'"))
    refused("qat", "--batch-size", 0, *out, names=("batch_size", "0"))
    refused("qat", "--lr", "nan", *out, names=("lr", "nan"))
    refused("qat", "--train", "weigths", *out, names=("weigths", "weights"))
    refused("eval", "--model", "embedded", "--stride", 128, *out, names=("stride", "128"))


def test_unreadable_settings(refused, tmp_path) -> None:
    (tmp_path / "s.json").write_text("{")
    (tmp_path / "s.yaml").write_text("loop: [")
    (tmp_path / "t.yaml").write_text("loop: {max_stepz: 3}")
    out = ("--output", tmp_path / "out")
    refused("qat", "--settings", tmp_path / "none.json", *out, names=("none.json",))
    refused("qat", "--settings", tmp_path / "s.json", *out, names=("s.json",))
    refused("qat", "--settings", tmp_path / "s.yaml", *out, names=("s.yaml",))
    refused("qat", "--settings", tmp_path / "t.yaml", *out, names=("max_stepz", "max_steps"))


@pytest.mark.parametrize("name", ["empty.txt", "blank.jsonl"])
def test_empty_text(refused, tmp_path, teacher_dir, name) -> None:
    (tmp_path / name).write_text('{"text": ""}\n' if name.endswith("jsonl") else " \n")
    refused("cache", "--teacher", teacher_dir, "--data", tmp_path / name, "--seq-len", 24, "--top-k", 8,
            "--output", tmp_path / "c", names=(name,))  # fmt: skip


def test_missing_text(refused, tmp_path, teacher_dir) -> None:
    refused("cache", "--teacher", teacher_dir, "--data", tmp_path / "no.txt", "--output", tmp_path / "c",
            "--seq-len", 24, "--top-k", 8, names=("no.txt",))  # fmt: skip


def test_ids_beyond_the_vocabulary(refused, tmp_path, teacher_dir, text_file) -> None:
    """A tokenizer that is larger than the model's embedding."""
    model = tmp_path / "model"
    shutil.copytree(teacher_dir, model)
    tree = json.loads((model / "tokenizer.json").read_text())
    tree["model"]["vocab"] = {word: i + (200 if i else 0) for word, i in tree["model"]["vocab"].items()}
    (model / "tokenizer.json").write_text(json.dumps(tree))
    refused("cache", "--teacher", model, "--data", text_file, "--seq-len", 24, "--top-k", 8, "--output", tmp_path / "c",
            names=("211",))  # fmt: skip


def test_unwritable_output(refused, tmp_path, cache_dir, teacher_dir, text_file, student) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "out"
    for argv in (
        ("cache", "--teacher", teacher_dir, "--data", text_file, "--seq-len", 24, "--top-k", 8, "--output", below),
        ("qat", "--cache-dir", cache_dir, "--output", below),
        ("recover", "--cache-dir", cache_dir, "--checkpoint", student, "--output", below),
        ("eval", "--model", teacher_dir, "--data", text_file, "--output", below / "f.json"),
        ("export", "--checkpoint", student, "--output", below),
        ("demo", "--output", below),
    ):
        refused(*argv, names=(str(tmp_path / "file"), "cannot be written"))


def test_no_network_for_a_hub_id(refused, tmp_path, text_file) -> None:
    refused("cache", "--teacher", "nobody/nothing", "--data", text_file, "--output", tmp_path / "c",
            names=("nobody/nothing", "local directory"))  # fmt: skip


def test_the_text_of_another_model_is_never_guessed(refused, tmp_path, teacher_dir, student) -> None:
    """A model of stories would be measured, or distilled, on Python's manual without a word."""
    out = ("--output", tmp_path / "out")
    refused("cache", "--teacher", teacher_dir, *out, names=(str(teacher_dir), "--data path/to/text"))
    refused("eval", "--model", teacher_dir, *out, names=(str(teacher_dir), "--data path/to/text"))
    refused("eval", "--checkpoint", student, *out, names=(str(teacher_dir), "--data path/to/text"))


def test_a_file_that_is_no_table_of_fidelity_is_not_written_over(refused, tmp_path, teacher_dir, text_file) -> None:
    for text in ("{}", "[1]", "[{}]", "no json"):
        (tmp_path / "f.json").write_text(text)
        refused("eval", "--model", teacher_dir, "--data", text_file, "--output", tmp_path / "f.json",
                names=("f.json", "another --output"))  # fmt: skip


def test_a_model_that_is_no_model(refused, tmp_path, teacher_dir, text_file) -> None:
    refused(
        "eval",
        "--model",
        tmp_path / "a" / "b" / "c",
        "--data",
        text_file,
        "--output",
        tmp_path / "f",
        names=("a/b/c", "directory"),
    )
    broken = tmp_path / "broken"
    shutil.copytree(teacher_dir, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused("eval", "--model", broken, "--data", text_file, "--output", tmp_path / "f", names=("broken", "weights"))
    (broken / "model.safetensors").unlink()
    refused("eval", "--model", broken, "--data", text_file, "--output", tmp_path / "f", names=("broken",))


def test_weights_that_are_missing_are_not_made_up(refused, tmp_path, teacher_dir, text_file) -> None:
    from safetensors.torch import load_file, save_file

    part = tmp_path / "part"
    shutil.copytree(teacher_dir, part)
    tensors = load_file(part / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    refused("eval", "--model", part, "--data", text_file, "--output", tmp_path / "f", names=("up_proj", "part"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_absent_device(refused, capsys, tmp_path) -> None:
    assert main(["qat", "--device", "cuda", "--output", str(tmp_path / "out")]) == 2
    assert "--device cuda" in capsys.readouterr().err


def test_contradictions(refused, tmp_path, cache_dir, student) -> None:
    out = ("--cache-dir", cache_dir, "--output", tmp_path / "out")
    refused("qat", *out, "--resume", "--from-scratch", names=("--resume", "--from-scratch"))
    refused("qat", *out, "--from-scratch", "--checkpoint", student, names=("--from-scratch", "--checkpoint"))
    refused(
        "recover", *out, "--checkpoint", student, "--mlp-only", "--include-k-proj", names=("mlp_only", "include_k_proj")
    )
    refused("recover", *out, names=("--checkpoint",))


def test_a_run_is_not_overwritten_by_accident(refused, tmp_path, cache_dir, student) -> None:
    refused("qat", "--cache-dir", cache_dir, "--output", student.parent, names=("--resume", "--from-scratch"))
    refused("qat", "--cache-dir", cache_dir, "--output", student.parent, "--resume", "--warmup-steps", 2,
            "--lr", 5e-3, names=("optim.lr=0.002", "0.005"))  # fmt: skip


def test_export_does_not_overwrite(refused, tmp_path, student) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").write_text("")
    refused("export", "--checkpoint", student, "--output", tmp_path / "there", names=("there", "not empty"))
    refused("export", "--checkpoint", student, "--format", "merged", "--output", tmp_path / "e", names=("no adapters",))
    refused(
        "export", "--checkpoint", student, "--format", "adapter", "--output", tmp_path / "e", names=("no adapters",)
    )


def own_run(student: Path, tmp_path: Path) -> Path:
    """A copy of the student's run folder below tmp_path, where every byte is watched."""
    shutil.copytree(student.parent, tmp_path / "qat")
    return tmp_path / "qat"


def test_a_start_from_scratch_that_fails_leaves_the_old_run(refused, tmp_path, cache_dir, student) -> None:
    run = own_run(student, tmp_path)
    refused("qat", "--cache-dir", cache_dir, "--output", run, "--from-scratch", "--train", "luts", names=("luts",))


def test_a_student_is_not_replaced_by_its_own_recovery(refused, tmp_path, cache_dir, student) -> None:
    best = own_run(student, tmp_path) / "best.pt"
    refused("recover", "--cache-dir", cache_dir, "--checkpoint", best, "--output", best.parent, "--from-scratch",
            names=("--checkpoint", "--output"))  # fmt: skip


def test_the_demo_removes_nothing_but_a_demo(refused, tmp_path) -> None:
    (tmp_path / "mine" / "cache").mkdir(parents=True)
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    refused("demo", "--output", tmp_path / "mine", names=("mine", "no demo"))
    (tmp_path / "file").write_text("")
    refused("demo", "--output", tmp_path / "file", names=("file", "cannot be written"))
    for factor in ("0", "inf", "nan", "-1"):
        refused("demo", "--output", tmp_path / "d", "--steps-factor", factor, names=("steps_factor",))


def test_a_model_without_a_tokenizer(refused, tmp_path, teacher_dir, text_file) -> None:
    shutil.copytree(teacher_dir, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    refused(
        "cache",
        "--teacher",
        tmp_path / "bare",
        "--data",
        text_file,
        "--output",
        tmp_path / "c",
        names=("tokenizer.json",),
    )


def test_settings_of_the_wrong_kind(refused, tmp_path) -> None:
    for text, word in (
        ("{loop: {max_steps: 3.9}}", "whole number"),
        ("{loop: {batch_size: true}}", "whole number"),
        ("{loop: {seed: 99999999999999999999}}", "seed"),
        ("{train: 5}", "a list"),
        ("{model: null}", "text"),
        ("{output: null}", "text"),
        ("{optim: {lr: fast}}", "a number"),
    ):
        (tmp_path / "s.yaml").write_text(text)
        refused("qat", "--settings", tmp_path / "s.yaml", "--output", tmp_path / "out", names=(word,))


def test_two_presets(refused, tmp_path) -> None:
    (tmp_path / "s.json").write_text('{"preset": "q2a4"}')
    refused("qat", "--settings", tmp_path / "s.json", "--preset", "q4_g32", "--output", tmp_path / "out",
            names=("q4_g32", "q2a4"))  # fmt: skip


def test_adapters_that_cannot_be_read(refused, tmp_path, teacher_dir, text_file) -> None:
    source = ("eval", "--model", teacher_dir, "--data", text_file, "--output", tmp_path / "f.json")
    folder = tmp_path / "adapter"
    folder.mkdir()
    refused(*source, "--adapter", folder, names=("adapter_config.json",))
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}')
    refused(*source, "--adapter", folder, names=("adapter_model.safetensors",))
    (folder / "adapter_model.safetensors").write_bytes(b"cut")
    refused(*source, "--adapter", folder, names=("adapter", "export them again"))


def test_an_output_that_is_a_folder(refused, tmp_path, teacher_dir, text_file) -> None:
    for output in (tmp_path, "."):
        refused("eval", "--model", teacher_dir, "--data", text_file, "--output", output, names=("is a folder",))


def test_a_temperature_that_is_no_number(refused, tmp_path, teacher_dir) -> None:
    refused("cache", "--teacher", teacher_dir, "--temperatures", "inf", "--output", tmp_path / "c", names=("inf",))


def test_a_disk_that_fills_up_while_exporting(refused, tmp_path, student, monkeypatch) -> None:
    from qat_lora import models

    def full(model, tokenizer, folder) -> None:
        folder.mkdir(parents=True)
        (folder / "half").write_text("half")
        raise OSError(28, "No space left on device", str(folder / "model.safetensors"))

    monkeypatch.setattr(models, "save_pretrained", full)
    refused(
        "export",
        "--checkpoint",
        student,
        "--output",
        tmp_path / "e",
        names=("model.safetensors", "No space", "--output"),
    )


def test_a_run_without_last_pt_is_not_wiped(refused, tmp_path, cache_dir, student) -> None:
    run = own_run(student, tmp_path)
    (run / "last.pt").unlink()
    for extra in ((), ("--resume",)):
        refused("qat", "--cache-dir", cache_dir, "--output", run, *extra, names=("best.pt", "--from-scratch"))


def test_a_run_in_the_caches_own_folder(refused, tmp_path, cache_dir) -> None:
    shutil.copytree(cache_dir, tmp_path / "c")
    refused("qat", "--cache-dir", tmp_path / "c", "--output", tmp_path / "c", names=("cache's own folder",))


def test_adapters_that_lack_a_layer(refused, tmp_path, cache_dir, teacher_dir, text_file, student) -> None:
    from safetensors.torch import load_file, save_file

    from qat_lora.runtime import LocalRuntime
    from qat_lora.train.run import run_recovery
    from tests.conftest import recovery_run

    best = run_recovery(
        recovery_run(cache_dir, tmp_path / "rec", student, loop={"max_steps": 1}), LocalRuntime("cpu")
    ).best
    assert main(["export", "--checkpoint", str(best), "--output", str(tmp_path / "export"), "--quiet"]) == 0
    path = tmp_path / "export" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if "layers.1" not in k}, path)
    refused("eval", "--model", tmp_path / "export", "--adapter", path.parent, "--data", text_file, "--seq-len", 24,
            "--output", tmp_path / "f.json", names=("layers.1", "placement"))  # fmt: skip


@pytest.mark.parametrize("config", ['{"model_type": "qwen3", "hidden_size": "abc"}', "[]"])
def test_a_damaged_config(refused, tmp_path, teacher_dir, text_file, config) -> None:
    shutil.copytree(teacher_dir, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(config)
    refused("eval", "--model", tmp_path / "model", "--data", text_file, "--output", tmp_path / "f", names=("model",))


def test_an_export_over_the_current_folder(refused, tmp_path, student, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused("export", "--checkpoint", student, "--output", ".", names=("current folder",))
