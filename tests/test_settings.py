"""Settings: JSON both ways, overrides by path, precedence of preset, file, flags and --set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qat_lora.cli.flags import run_from
from qat_lora.cli.main import RUNS, _parser
from qat_lora.config import LinearQuant, LoopConfig, QatRun, RecoveryRun, presets
from qat_lora.config.cache import CacheRun
from qat_lora.errors import ConfigError
from qat_lora.settings import from_json, leaves, override_text, to_json


def parsed(*argv: str) -> QatRun:
    run_class = RUNS[argv[0]]
    return run_from(_parser().parse_args(list(argv)), run_class)


@pytest.mark.parametrize("run_class", RUNS.values())
def test_json_both_ways(run_class) -> None:
    run = run_class()
    assert from_json(run_class, json.loads(json.dumps(to_json(run)))) == run


@pytest.mark.parametrize("run_class", RUNS.values())
def test_a_leafs_name_is_unique_so_that_a_flag_means_one_thing(run_class) -> None:
    names = [path.rsplit(".", 1)[-1] for path in leaves(run_class) if not path.startswith("scheme.")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("run_class", RUNS.values())
def test_every_setting_says_what_it_is(run_class) -> None:
    for path, leaf in leaves(run_class).items():
        assert path.startswith("scheme.") or leaf.field.metadata.get("help"), path


@pytest.mark.parametrize("name", presets.SCHEMES)
def test_preset_names_say_what_they_are(name) -> None:
    scheme = presets.scheme(name)
    if "_g" in name:
        bits, group = name[1:].split("_g")
        assert scheme.mlp == scheme.attention
        assert (scheme.mlp.bits, scheme.mlp.scales, scheme.mlp.group_size) == (int(bits), "group", int(group))
    else:
        assert (scheme.mlp.levels, scheme.mlp.scales) == ("lut", "lowrank")


def test_the_presets_of_the_original_have_its_bits_and_ranks() -> None:
    table = {"q4_r32": (4, 32, 4, 32), "q4a4": (4, 4, 4, 4), "q2a4": (2, 32, 4, 8), "q2a2": (2, 32, 2, 32)}
    for name, expected in table.items():
        s = presets.scheme(name)
        assert (s.mlp.bits, s.mlp.rank, s.attention.bits, s.attention.rank) == expected


def test_weakest_first_preset_file_flag_set(tmp_path) -> None:
    (tmp_path / "s.yaml").write_text("optim: {lr: 0.5, eps: 1.0e-6}\nloop: {batch_size: 2, max_steps: 7}\n")
    run = parsed(
        *("qat", "--preset", "q4_g32", "--settings", str(tmp_path / "s.yaml")),
        *("--batch-size", "3", "--set", "loop.batch_size=4", "--set", "scheme.mlp.bits=3"),
    )
    assert (run.scheme.mlp.bits, run.scheme.attention.bits) == (3, 4)
    assert (run.optim.lr, run.optim.eps, run.loop.max_steps, run.loop.batch_size) == (0.5, 1e-6, 7, 4)
    assert parsed("qat", "--preset", "q4_g32").optim.lr == presets.qat_run("q4_g32").optim.lr != run.optim.lr


def test_a_preset_named_in_a_file_or_by_set_brings_its_scheme(tmp_path) -> None:
    (tmp_path / "s.json").write_text('{"preset": "q2a4"}')
    assert parsed("qat", "--settings", str(tmp_path / "s.json")).scheme == presets.scheme("q2a4")
    assert parsed("qat", "--set", "preset=q2a2").scheme == presets.scheme("q2a2")


def test_the_run_json_of_a_run_is_a_settings_file(tmp_path) -> None:
    run = parsed("qat", "--preset", "q3_g32", "--max-steps", "11", "--train", "scales,luts")
    (tmp_path / "run.json").write_text(json.dumps({"command": "qat", "config": to_json(run), "versions": {}}))
    assert parsed("qat", "--settings", str(tmp_path / "run.json")) == run


def test_the_commands_of_the_design_parse_as_written() -> None:
    run = parsed(
        *["cache", "--teacher", "Qwen/Qwen3-0.6B", "--data", "hf:Salesforce/wikitext:wikitext-103-raw-v1"],
        *["--seq-len", "1024", "--top-k", "128", "--output", "caches/wikitext103_L1024_K128"],
    )
    assert isinstance(run, CacheRun) and run.output == Path("caches/wikitext103_L1024_K128")
    run = parsed(
        *["recover", "--tpu", "--model", "Qwen/Qwen3-0.6B", "--checkpoint", "runs/v2_q4/best.pt"],
        *["--kd-cache-dir", "caches/wikitext103_L1024_K128", "--recovery-r", "8", "--batch-size", "4"],
        *["--accumulation-steps", "8", "--max-steps", "1000"],
    )
    assert isinstance(run, RecoveryRun)
    assert (run.place.device, run.adapter.recovery_r, run.loop.accumulation_steps) == ("tpu", 8, 8)
    run = parsed(
        *["qat", "--from-scratch", "--cache-dir", "caches/openhermes_L128_K128_N50K", "--config", "q4_r32"],
        *["--batch-size", "8", "--accumulation-steps", "4", "--max-steps", "3000"],
    )
    assert run.scheme == presets.scheme("q4_r32")


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("loop.preload=maybe", "true or false"),
        ("loop.batch_size=1.5", "whole number"),
        ("loop", "key=value"),
        ("loop=3", "single setting"),
        ("loop.batch_size.x=3", "single setting"),
        ("nothing=3", "not a setting"),
    ],
)
def test_an_override_that_cannot_be_read_says_so(assignment, says) -> None:
    with pytest.raises(ConfigError, match=says):
        override_text(QatRun(), assignment)


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"bits": 5}, "2, 3, 4 or 8"), ({"levels": "nf4", "bits": 3}, "set bits=4"), ({"rank": 0}, "rank"),
     ({"levels": "fp4"}, "unknown"), ({"scale_dtype": "int8"}, "float16")],
)  # fmt: skip
def test_a_form_that_does_not_exist_is_refused(settings, says) -> None:
    with pytest.raises(ConfigError, match=says):
        LinearQuant(**settings)


@pytest.mark.parametrize("name", ["max_steps", "batch_size", "accumulation_steps"])
def test_loops_are_never_empty(name) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, but {name}=0"):
        LoopConfig(**{name: 0})
