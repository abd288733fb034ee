"""Draws from the teacher on torch_xla: what a CPU draws and trains on, without a new graph after the first step.

The functions above the tests are programs, run as forks.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from qat_lora.cache import KDCacheDataset
from qat_lora.cli import commands
from qat_lora.config import ExecutionConfig, KDConfig, PlaceConfig
from qat_lora.runtime import LocalRuntime, runtime_for
from qat_lora.train.run import run_qat
from tests.conftest import cache_run, qat_run
from tests.runtime import programs

run_program = functools.partial(programs.run_program, module="tests.runtime.test_xla_stores")
pytestmark = [
    pytest.mark.xla,
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
]
STORE = {"store": "sampled", "samples": 20, "temperatures": (1.0, 2.0)}
KD = KDConfig(ce_alpha=0.2, anchor_kl_weight=0.5, anchor_samples=4)


def build(teacher: str, text: str, folder: str) -> dict[str, Any]:
    """The cache as torch_xla's device draws it, after one of a few rows; graphs of the two together."""
    place = PlaceConfig(device="tpu", dtype="fp32")
    runtime, compiled = runtime_for(place), []
    for output, rows in ((f"{folder}.few", 8), (folder, 0)):
        commands.cache(cache_run(Path(teacher), Path(text), Path(output), place=place, max_rows=rows, **STORE))
        compiled.append(len(runtime.compilations()))
    return {"compiled": compiled}


def train(cache: str, folder: str) -> dict[str, Any]:
    """Some steps of QAT with --max-recompiles 0."""
    runtime = runtime_for(PlaceConfig(device="tpu", dtype="fp32"))
    return numbers_of(run(Path(cache), Path(folder), max_recompiles=0), runtime)


def run(cache: Path, folder: Path, **execution: Any) -> Any:
    loop = {"max_steps": 6, "accumulation_steps": 2, "eval_every": 3, "log_every": 1, "batch_size": 4}
    return qat_run(cache, folder, loop=loop, kd=KD, execution=ExecutionConfig(**execution))


def numbers_of(settings: Any, runtime: Any) -> dict[str, Any]:
    rows = run_qat(settings, runtime).losses.rows
    return {name: [row[name] for row in rows if row[name] == row[name]] for name in ("loss", "eval_kl")}


@pytest.fixture(scope="module")
def cache(teacher_dir, text_file, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "cache"
    commands.cache(cache_run(teacher_dir, text_file, folder, **STORE))
    return folder


def test_an_xla_device_draws_what_the_cpu_draws(teacher_dir, text_file, cache, tmp_path) -> None:
    """All but a few of ten thousand, which lie where rounding decides; from the graph of the first batch."""
    first, second = run_program("build", teacher_dir, text_file, tmp_path / "c")["compiled"]
    assert 0 < first == second
    ours, theirs = (next(KDCacheDataset(folder).eval_batches(64)) for folder in (tmp_path / "c", cache))
    differing = (ours["draw_ids"] != theirs["draw_ids"]).double().mean().item()
    assert differing < 2e-3
    torch.testing.assert_close(ours["entropy"], theirs["entropy"], rtol=2e-3, atol=2e-3)  # of float16


def test_training_on_draws_compiles_nothing_new_and_is_what_the_cpu_computes(cache, tmp_path) -> None:
    found = run_program("train", cache, tmp_path / "xla")
    alone = numbers_of(run(cache, tmp_path / "cpu"), LocalRuntime("cpu"))
    for name, values in alone.items():
        assert len(values) >= 2 and found[name] == pytest.approx(values, rel=1e-4), name
