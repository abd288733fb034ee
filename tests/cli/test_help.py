"""What `--help` shows, what a wrong flag is told, and what --config takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qat_lora.cli.flags import run_from
from qat_lora.cli.main import RUNS, _parser, main
from qat_lora.config import presets
from qat_lora.errors import ConfigError


def shown(capsys, *argv: str) -> str:
    """What a command prints that asks for help."""
    with pytest.raises(SystemExit) as left:
        main(list(argv))
    assert left.value.code == 0
    return capsys.readouterr().out


def flags_in(text: str) -> list[str]:
    return re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE)  # --rtn, --no-rtn: the first


def parsed(*argv: str):
    return run_from(_parser().parse_args(list(argv)), RUNS[argv[0]])


@pytest.mark.parametrize("command", RUNS)
def test_help_shows_some_fifteen_flags_and_help_all_every_one(command, capsys) -> None:
    short, full = (flags_in(shown(capsys, command, flag)) for flag in ("--help", "--help-all"))
    assert len(short) <= 18 and "--output" in short and "--help-all" in short
    parser = _parser()._subparsers._group_actions[0].choices[command]
    every = {next(s for s in action.option_strings if s.startswith("--"))
             for action in parser._actions if action.option_strings}  # fmt: skip
    assert {flag.replace("--[no-]", "--") for flag in full} == every
    assert set(short) < set(full)


def test_help_is_grouped_as_the_settings_are(capsys) -> None:
    text = shown(capsys, "qat", "--help-all")
    groups = re.findall(r"^(\w+)(?:: .*)?:$", text, re.MULTILINE)
    assert groups == ["options", "run", "kd", "optim", "loop", "execution", "place"]
    of_optim = text.split("\noptim: ")[1].split("\nloop: ")[0]
    assert "--lr X" in of_optim and "--beta2" in of_optim and "--batch-size" not in of_optim


def test_help_names_the_presets_and_shows_the_values_that_hold(capsys, tmp_path) -> None:
    text = shown(capsys, "qat", "--preset", "q4_g32", "--help")
    assert ", ".join(presets.SCHEMES) in " ".join(text.split())
    assert "[0.0001]" in text and "[0.001]" not in text and "[q4_g32]" in text
    assert "[0.001]" in shown(capsys, "qat", "--help")
    (tmp_path / "s.yaml").write_text("loop: {max_steps: 77}")
    assert "[77]" in shown(capsys, "recover", "--config", str(tmp_path / "s.yaml"), "--help")
    assert "[55]" in shown(capsys, "recover", "--help", "--max-steps", "55"), "in any order"
    assert main(["qat", "--preset", "q9", "--help"]) == 2


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        ("qat --steps 3", "--max-steps"), ("qat --epochs 3", "--max-steps"), ("recover --lora-r 8", "--recovery-r"),
        ("recover --lora-alpha 8", "--recovery-alpha"), ("qat --gradient-accumulation-steps 2", "--accumulation-steps"),
        ("eval --dataset x", "--data"), ("qat --bits 4", "--preset"), 
        ("qat --device gpu", "'cuda'"), ("qat --dtype bfloat16", "'bf16'"), ("qat --bach-size 3", "--batch-size"),
        ("recover --scale-lr-ratio 0.1", "unknown to `qat-lora recover`"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_told_the_right_one(argv, hint, capsys) -> None:
    assert main(argv.split()) == 2
    assert hint in capsys.readouterr().err.split("error: ")[1]


def test_an_unknown_preset_is_told_all_of_them(capsys) -> None:
    assert main(["qat", "--preset", "q8_g32"]) == 2
    assert ", ".join(presets.SCHEMES) in capsys.readouterr().err


def test_config_takes_a_file_or_a_presets_name_or_both(tmp_path) -> None:
    (tmp_path / "s.yaml").write_text("optim: {lr: 0.5}")
    (tmp_path / "bare").write_text("{}")
    assert parsed("qat", "--config", "q4_r32").scheme == presets.scheme("q4_r32")
    run = parsed("qat", "--config", "q4_r32", "--config", str(tmp_path / "s.yaml"))
    assert (run.scheme, run.optim.lr) == (presets.scheme("q4_r32"), 0.5)
    assert parsed("recover", "--config", str(tmp_path / "s.yaml")).optim.lr == 0.5
    assert parsed("qat", "--settings", str(tmp_path / "s.yaml")).optim.lr == 0.5
    assert parsed("qat", "--config", str(tmp_path / "bare")) == parsed("qat")
    (tmp_path / "p.yaml").write_text("preset: q2a4")
    assert parsed("qat", "--config", str(tmp_path / "p.yaml")).scheme == presets.scheme("q2a4")
    with pytest.raises(ConfigError, match=r"'q4_r32' contradicts preset 'q2a4' in .*p\.yaml"):
        parsed("qat", "--config", "q4_r32", "--config", str(tmp_path / "p.yaml"))
    with pytest.raises(ConfigError, match="q4_r23.* is unknown; choose one of .*q4_r32"):
        parsed("qat", "--config", "q4_r23")
    with pytest.raises(ConfigError, match=r"missing\.yaml does not exist; give --config"):
        parsed("qat", "--config", "missing.yaml")


def test_every_command_line_of_the_documents_parses() -> None:
    """README, the guides and the notebook's neighbours: each `qat-lora X` and each script, as written."""
    scripts = {"build_kd_cache": "cache", "train_qat": "qat", "train_v2_tpu_multi": "qat", "evaluate": "eval"}
    scripts |= {"train_recovery_lora": "recover", "train_recovery_lora_multi": "recover", "export": "export"}
    root, found = Path(__file__).parents[2], 0
    for page in (root / "README.md", root / "caches" / "README.md", *sorted((root / "docs").glob("*.md"))):
        if page.name == "log.md":
            continue
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ {4,}(?:\w+=\S+ )*(?:python scripts/(\w+)\.py|qat-lora (\w+)) (.*)$", text, re.M):
            command, rest = scripts.get(line[0]) or line[1], re.split(r" #| \|\s|`", line[2])[0].split()
            if command not in RUNS or {"...", "|"} & set(rest) or {"info", "merge", "split", "convert"} & set(rest[:1]):
                continue
            args, unknown = _parser().parse_known_args([command, *rest])
            assert not unknown, f"{page.name}: {line}"
            run_from(args, RUNS[command])
            found += 1
    assert found >= 15
