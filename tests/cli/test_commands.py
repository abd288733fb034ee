"""The five steps as a user types them, through the scripts too."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qat_lora import models
from qat_lora.cli.evaluation import measure_rows
from qat_lora.cli.main import main
from qat_lora.config import EvalRun, presets
from qat_lora.data import corpus
from qat_lora.runtime import LocalRuntime
from qat_lora.train.student import round_to_nearest

ROOT = Path(__file__).parents[2]


CPU = "--device cpu --quiet"


def run(command: str) -> None:
    """Run a command as typed; it must succeed."""
    assert main(command.split()) == 0


def read(path: Path) -> dict:
    """The row of the model itself: those of its teacher and of its start come before it."""
    return json.loads(path.read_text())[-1]


def test_the_five_steps(tmp_path, teacher_dir, text_file, capsys) -> None:
    at, text = tmp_path, f"--data {text_file} --seq-len 24"
    run(f"cache --teacher {teacher_dir} {text} --top-k 16 --output {at}/cache {CPU}")
    run(f"qat --cache-dir {at}/cache --output {at}/qat --max-steps 4 --batch-size 4 {CPU}")
    start = f"--checkpoint {at}/qat/best.pt"
    run(f"recover --cache-dir {at}/cache {start} --output {at}/rec --max-steps 4 --batch-size 4 {CPU}")
    run(f"export --checkpoint {at}/rec/best.pt --output {at}/export --quiet")
    run(f"eval --checkpoint {at}/rec/best.pt {text} --output {at}/ours.json {CPU}")
    plain = f"--model {at}/export --teacher {teacher_dir}"  # base and adapter
    run(f"eval {plain} {text} --output {at}/theirs.json {CPU}")
    assert "equal to the student bit for bit" in capsys.readouterr().out
    checkpoint, exported = read(at / "ours.json"), read(at / "theirs.json")
    for key in ("perplexity", "kl", "top1", "tokens"):
        assert checkpoint[key] == exported[key], key
    assert checkpoint["bits_per_weight"] < exported["bits_per_weight"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache_dir) -> Path:
    """A student of one step."""
    from qat_lora.train.run import run_qat
    from tests.conftest import qat_run

    folder = tmp_path_factory.mktemp("trained") / "qat"
    return run_qat(qat_run(cache_dir, folder, loop={"max_steps": 1}), LocalRuntime("cpu")).best


def test_an_evaluation_says_what_it_read_and_its_file_grows(
    tmp_path, trained, teacher_dir, text_file, capsys, caplog
) -> None:
    shutil.copytree(trained.parent, tmp_path / "qat")
    command = f"eval --checkpoint {tmp_path}/qat/best.pt --data {text_file} --max-rows 3 --device cpu"
    with caplog.at_level("INFO"):
        run(command)
    assert f"on {text_file}, 3 windows of 24 tokens" in caplog.text, "seq_len is the cache's"
    assert f"written to {tmp_path}/qat/fidelity.json\n" in capsys.readouterr().out, "beside the checkpoint"
    path = tmp_path / "qat" / "fidelity.json"
    teacher, rtn, qat = json.loads(path.read_text())
    assert [row["stage"] for row in (teacher, rtn, qat)] == ["teacher", "rtn", "qat"]
    assert (teacher["kl"], teacher["top1"], teacher["bits_per_weight"]) == (0.0, 1.0, 32.0)
    assert rtn["kl"] > 0 and rtn["bits_per_weight"] == qat["bits_per_weight"]
    for row in (teacher, rtn, qat):
        assert (row["data"], row["seq_len"], row["stride"], row["max_rows"]) == (str(text_file), 24, 0, 3)
        assert row["teacher"] == str(teacher_dir) and row["date"] and "torch" in row["versions"]
    assert (qat["checkpoint"], qat["step"]) == (f"{tmp_path}/qat/best.pt", 1)
    run(f"{command} --quiet")
    assert "in the place of earlier rows: teacher, qat\n" in capsys.readouterr().out, "the start is not made twice"
    run(f"{command} --seq-len 16 --no-rtn --quiet")
    rows = json.loads(path.read_text())
    assert [(row["stage"], row["seq_len"]) for row in rows] == [
        ("rtn", 24), ("teacher", 24), ("qat", 24), ("teacher", 16), ("qat", 16),
    ]  # fmt: skip


def test_a_full_disk_loses_no_evaluation(tmp_path, teacher_dir, text_file, capsys, monkeypatch) -> None:
    from qat_lora.evaluate import table

    def full(path, tree) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(table, "write_json", full)
    argv = f"eval --model {teacher_dir} --teacher {teacher_dir} --data {text_file} --seq-len 24 --max-rows 2 {CPU}"
    assert main([*argv.split(), "--output", f"{tmp_path}/f.json"]) == 2
    said = capsys.readouterr()
    assert "100.0%" in said.out and "No space left" in said.err


def test_the_rows_are_the_models_they_say_they_are(tmp_path, trained, teacher_dir, text_file) -> None:
    """The teacher's row beside a student is what the teacher measures alone; the start's is its rounding."""
    text = f"--data {text_file} --seq-len 24 --max-rows 3 {CPU}"
    run(f"eval --checkpoint {trained} {text} --output {tmp_path}/all.json")
    run(f"eval --model {teacher_dir} {text} --output {tmp_path}/alone.json")
    teacher, rtn, qat = json.loads((tmp_path / "all.json").read_text())
    assert teacher["perplexity"] == read(tmp_path / "alone.json")["perplexity"]
    loaded, teacher_again = (models.load(str(teacher_dir)) for _ in range(2))
    round_to_nearest(loaded.model, presets.scheme("q2_g32"))
    settings = EvalRun(model=str(teacher_dir), data=str(text_file), seq_len=24, max_rows=3, stage="rtn")
    expected = measure_rows(settings, LocalRuntime("cpu"), loaded.model, teacher_again, loaded)[-1]
    assert (rtn["kl"], rtn["perplexity"]) == (expected.kl, expected.perplexity)
    assert rtn["kl"] != qat["kl"]


def test_a_run_says_what_it_trains_how_far_it_is_and_what_comes_next(tmp_path, cache_dir, capsys, caplog) -> None:
    command = f"qat --cache-dir {cache_dir} --output {tmp_path}/qat --max-steps 2 --log-every 1 --device cpu"
    with caplog.at_level("INFO"):
        run(f"{command} --batch-size 8 --accumulation-steps 16")
    said = caplog.text
    rows = re.search(r": (\d+) rows of 24 tokens to train on, (\d+) held out", said)
    assert f"preset q2_g32: 2.73 bits per weight; cache {cache_dir}: " in said
    assert rows and 0 < int(rows[2]) < int(rows[1])
    assert f"a step takes 128 rows, but the cache has only {rows[1]} to train on" in said
    assert re.search(r"step 1/2 loss .* s, [\d,]+ tokens/s, 0:00:0\d left", said)
    assert f"next: qat-lora recover --checkpoint {tmp_path}/qat/best.pt --cache-dir {cache_dir}" in (
        capsys.readouterr().out
    )


def test_the_commands_that_are_named_as_next_are_commands(tmp_path, trained, text_file, capsys) -> None:
    shutil.copytree(trained.parent, tmp_path / "qat")
    command = f"eval --checkpoint {tmp_path}/qat/best.pt --data {text_file} --max-rows 1 --no-rtn {CPU}"
    run(command)
    line = re.search(r"^next: qat-lora (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
    run(line.replace("NEW_FOLDER", f"{tmp_path}/export") + " --quiet")
    assert (tmp_path / "export" / "README.md").is_file()


def test_a_stride_counts_every_token(tmp_path, teacher_dir, text_file) -> None:
    for stride in (0, 8):
        text = f"--data {text_file} --seq-len 24 --stride {stride}"
        run(f"eval --model {teacher_dir} {text} --output {tmp_path}/{stride}.json {CPU}")
    whole, strided = read(tmp_path / "0.json"), read(tmp_path / "8.json")
    assert strided["tokens"] > whole["tokens"]
    assert whole["kl"] is None and whole["top1"] is None, "no teacher was named"


def test_windows_are_bounded_in_either_protocol(tmp_path, teacher_dir, text_file) -> None:
    for stride, tokens in ((0, 3 * 23), (8, 23 + 2 * 8)):
        text = f"--data {text_file} --seq-len 24 --stride {stride} --max-rows 3"
        run(f"eval --model {teacher_dir} {text} --output {tmp_path}/f.json {CPU}")
        assert read(tmp_path / "f.json")["tokens"] == tokens


def test_a_cache_is_not_built_twice_and_another_is_not_laid_over_it(tmp_path, teacher_dir, text_file) -> None:
    def contents() -> dict[str, tuple[int, bytes]]:
        return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "c").iterdir()}

    command = f"cache --teacher {teacher_dir} --data {text_file} --seq-len 24 --output {tmp_path}/c {CPU}"
    run(f"{command} --top-k 4 --rows-per-shard 16")
    before = contents()
    run(f"{command} --top-k 4 --rows-per-shard 16")
    assert contents() == before
    assert main(f"{command} --top-k 5 --rows-per-shard 16".split()) == 2
    assert contents() == before


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_step_runs_in_either_precision(dtype, tmp_path, teacher_dir, text_file) -> None:
    at, text, place = tmp_path, f"--data {text_file} --seq-len 24", f"{CPU} --dtype {dtype}"
    run(f"cache --teacher {teacher_dir} {text} --top-k 16 --output {at}/c {place}")
    run(f"qat --cache-dir {at}/c --output {at}/q --max-steps 2 --batch-size 4 {place}")
    start = f"--checkpoint {at}/q/best.pt"
    run(f"recover --cache-dir {at}/c {start} --output {at}/r --max-steps 2 --batch-size 4 {place}")
    run(f"eval --checkpoint {at}/r/best.pt {text} --output {at}/f.json {place}")
    assert 0 < read(at / "f.json")["kl"] < 5


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("build_kd_cache", "cache"),
        ("train_qat", "qat"),
        ("train_recovery_lora", "recover"),
        ("evaluate", "eval"),
        ("export", "export"),
    ],
)
def test_the_scripts_are_the_commands(script, command) -> None:
    """Run as written in the README, from any folder."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{script}.py"), "--help"], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0
    assert f"usage: qat-lora {command}" in done.stdout


def test_the_demo_in_short(tmp_path, capsys, monkeypatch) -> None:
    """Every stage, file and column of the demo, on a tenth of its corpus; tests/test_bars.py judges its numbers."""
    paths = corpus._source_paths(corpus.stdlib_folder())
    monkeypatch.setattr(corpus, "_source_paths", lambda folder: paths[::10])
    monkeypatch.setattr(corpus, "_documents", corpus._documents.__wrapped__)  # nothing stays for other tests
    (tmp_path / "demo" / "qat").mkdir(parents=True)
    for left in ("demo.json", "qat/last.pt"):  # of an earlier demo, which is made anew
        (tmp_path / "demo" / left).write_text("{}")
    run(f"demo --output {tmp_path}/demo --steps-factor 0.006 --rows-factor 0.02 {CPU}")
    rows = json.loads((tmp_path / "demo" / "fidelity.json").read_text())
    assert [row["stage"] for row in rows] == ["teacher", "rtn", "qat", "qat+lora", "exported (reloaded)"]
    teacher, rtn, qat, recovered, exported = rows
    assert (teacher["kl"], teacher["top1"], teacher["bits_per_weight"]) == (0.0, 1.0, 16.0)
    assert rtn["bits_per_weight"] == qat["bits_per_weight"] == 2.5
    for key in ("perplexity", "kl", "top1"):
        assert recovered[key] == exported[key], "the export is not the student"
    assert (tmp_path / "demo" / "report.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert f"{tmp_path}/demo/fidelity.json, {tmp_path}/demo/report.png, {tmp_path}/demo/export" in printed


def test_a_cache_is_described_and_verified(tmp_path, teacher_dir, text_file, capsys) -> None:
    run(f"cache --teacher {teacher_dir} --data {text_file} --seq-len 24 --top-k 16 --output {tmp_path}/cache {CPU}")
    run(f"cache info {tmp_path}/cache --verify")
    said = capsys.readouterr().out
    for words in ("top 16", "complete", "kept mass", "bytes per token", "topk_ids", "every byte as recorded"):
        assert words in said, words
    (tmp_path / "cache" / "shard-00000.safetensors").write_bytes(b"other")
    assert main(["cache", "info", f"{tmp_path}/cache", "--verify"]) == 2
    assert main(["cache", "info", f"{tmp_path}/nowhere"]) == 2
    assert capsys.readouterr().err.count("qat-lora: error: ") == 2
