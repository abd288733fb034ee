"""The five steps as a user types them, through the scripts too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qat_lora.cli.main import main
from qat_lora.kd import KDCacheDataset

ROOT = Path(__file__).parents[2]


def run(*argv: object) -> None:
    assert main([str(a) for a in argv]) == 0


def test_the_five_steps(tmp_path, teacher_dir, text_file, capsys) -> None:
    cpu = ("--device", "cpu", "--quiet")
    run(
        "cache",
        "--teacher",
        teacher_dir,
        "--data",
        text_file,
        "--seq-len",
        24,
        "--top-k",
        16,
        "--output",
        tmp_path / "c",
        *cpu,
    )
    run("qat", "--cache-dir", tmp_path / "c", "--output", tmp_path / "qat", "--max-steps", 4, "--batch-size", 4, *cpu)
    run(
        "recover",
        "--cache-dir",
        tmp_path / "c",
        "--checkpoint",
        tmp_path / "qat" / "best.pt",
        "--output",
        tmp_path / "rec",
        "--max-steps",
        4,
        "--batch-size",
        4,
        *cpu,
    )
    run("export", "--checkpoint", tmp_path / "rec" / "best.pt", "--output", tmp_path / "export", "--quiet")
    for source in (
        ("--checkpoint", tmp_path / "rec" / "best.pt"),
        ("--model", tmp_path / "export", "--adapter", tmp_path / "export" / "adapter", "--teacher", teacher_dir),
    ):
        run("eval", *source, "--data", text_file, "--seq-len", 24, "--output", tmp_path / f"{source[0][2:]}.json", *cpu)
    assert "equal to the student bit for bit" in capsys.readouterr().out
    checkpoint, exported = (json.loads((tmp_path / f"{name}.json").read_text())[0] for name in ("checkpoint", "model"))
    for key in ("perplexity", "kl", "top1", "tokens"):
        assert checkpoint[key] == exported[key], key
    assert checkpoint["bits_per_weight"] < exported["bits_per_weight"]


def test_a_stride_lowers_perplexity_and_counts_every_token(tmp_path, teacher_dir, text_file) -> None:
    found = {}
    for stride in (0, 8):
        output = tmp_path / f"{stride}.json"
        run(
            "eval",
            "--model",
            teacher_dir,
            "--data",
            text_file,
            "--seq-len",
            24,
            "--stride",
            stride,
            "--output",
            output,
            "--device",
            "cpu",
            "--quiet",
        )
        found[stride] = json.loads(output.read_text())[0]
    assert found[8]["tokens"] > found[0]["tokens"]
    assert found[0]["kl"] is None and found[0]["top1"] is None, "no teacher was named"


def test_a_cache_is_not_built_twice_and_an_interrupted_one_goes_on(tmp_path, teacher_dir, text_file) -> None:
    argv = (
        "cache",
        "--teacher",
        teacher_dir,
        "--data",
        text_file,
        "--seq-len",
        24,
        "--top-k",
        4,
        "--rows-per-shard",
        16,
        "--output",
        tmp_path / "c",
        "--device",
        "cpu",
        "--quiet",
    )
    run(*argv)
    files = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "c").iterdir()}
    run(*argv)
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "c").iterdir()} == files
    assert main([str(a) for a in (*argv, "--top-k", 5)]) == 2


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_step_runs_in_either_precision(dtype, tmp_path, teacher_dir, text_file) -> None:
    place = ("--device", "cpu", "--dtype", dtype, "--quiet")
    run(
        "cache",
        "--teacher",
        teacher_dir,
        "--data",
        text_file,
        "--seq-len",
        24,
        "--top-k",
        16,
        "--output",
        tmp_path / "c",
        *place,
    )
    run("qat", "--cache-dir", tmp_path / "c", "--output", tmp_path / "q", "--max-steps", 2, "--batch-size", 4, *place)
    run(
        "recover",
        "--cache-dir",
        tmp_path / "c",
        "--checkpoint",
        tmp_path / "q" / "best.pt",
        "--output",
        tmp_path / "r",
        "--max-steps",
        2,
        "--batch-size",
        4,
        *place,
    )
    run(
        "eval",
        "--checkpoint",
        tmp_path / "r" / "best.pt",
        "--data",
        text_file,
        "--seq-len",
        24,
        "--output",
        tmp_path / "f.json",
        *place,
    )
    assert KDCacheDataset(tmp_path / "c").manifest.complete


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


def test_the_demo_in_short(tmp_path, capsys) -> None:
    """Every stage, file and column of the demo; its numbers are judged by tests/test_bars.py."""
    run(
        "demo",
        "--output",
        tmp_path / "demo",
        "--steps-factor",
        0.02,
        "--rows-factor",
        0.02,
        "--device",
        "cpu",
        "--quiet",
    )
    rows = json.loads((tmp_path / "demo" / "fidelity.json").read_text())
    assert [row["stage"] for row in rows] == ["teacher", "rtn", "qat", "qat+lora", "exported (reloaded)"]
    teacher, rtn, qat, recovered, exported = rows
    assert (teacher["kl"], teacher["top1"], teacher["bits_per_weight"]) == (0.0, 1.0, 16.0)
    assert rtn["bits_per_weight"] == qat["bits_per_weight"] == 2.5
    for key in ("perplexity", "kl", "top1"):
        assert recovered[key] == exported[key], "the export is not the student"
    assert (tmp_path / "demo" / "report.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "fidelity.json" in printed and "exported" in printed
