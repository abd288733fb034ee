"""The scaling benchmark: its formulas against numbers by hand, its parameters against what two ranks sent."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoConfig

from qat_lora import models

ROOT = Path(__file__).parents[1]


@pytest.fixture
def scaling(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("scaling")


def test_the_formulas_give_what_a_pencil_gives(scaling) -> None:
    assert scaling.ring_bytes(80, 1) == 0
    assert scaling.ring_bytes(80, 2) == 80
    assert scaling.ring_bytes(80, 4) == 120, "two rounds of three turns, a quarter of it each"
    assert scaling.ring_seconds(80, 4, bytes_per_second=40, hop=0.5) == 3 + 6 * 0.5
    assert scaling.step_seconds(3.2e12, 918e12) == 2.0, "bound by bytes: 1.6 TB/s"
    assert scaling.step_seconds(1.6e12, 3 * 918e12) == 3.0, "bound by FLOPs"
    assert scaling.efficiency(3.0, 2, 2.0) == 0.75
    assert scaling.efficiency(3.0, 1, 0.0) == 1.0


def test_a_row_of_the_paper_is_what_a_pencil_gives(scaling) -> None:
    """Recovery of rank 8 on q, v, o, gate, up and down of 28 layers; 256 chips in one ring of 2 x 100 GB/s."""
    rows = {(row["step"], row["chips"]): row for row in scaling.on_paper()}
    row = rows["recovery r=8, layers kept", 256]
    q, v, mlp = 1024 + 2048, 1024 + 1024, 1024 + 3072
    assert row["trained"] == 28 * 8 * (2 * q + v + 3 * mlp) == 4_587_520
    assert row["gradient_bytes"] == 18_350_080
    comm = 2 * 255 / 256 * (18_350_080 + 16) / 200e9 + 3 * 510e-6
    assert row["comm_seconds"] == pytest.approx(comm)
    assert row["efficiency_1"] == pytest.approx(0.16375 / (0.16375 + comm))
    assert row["efficiency_8"] == pytest.approx(8 * 0.16375 / (8 * 0.16375 + comm))
    flops, slow = 12.5e12 / 918e12, comm + 3 * 510 * 9e-6 + 6 * 18_350_080 / 1.6e12
    assert row["pessimistic_1"] == pytest.approx(flops / (flops + slow))
    block = 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072)
    assert rows["QAT, recomputed", 4]["trained"] == 28 * (block + block // 32), "a scale per 32 weights"


def test_the_steps_are_the_ones_of_the_table_in_the_tpu_guide(scaling) -> None:
    table = re.findall(
        r"^\| (recovery|QAT), q4_g32 \| (?:kept|recomputed) .*? \| ([\d.]+) \([\d.]+\) \| (\d+) \|",
        (ROOT / "docs" / "TPU.md").read_text(), re.MULTILINE,
    )  # fmt: skip
    ours = [(step.name.split()[0].rstrip(","), step.flops, step.bytes_accessed) for step in scaling.STEPS]
    assert [(stage, float(flops) * 1e12, float(moved) * 1e9) for stage, flops, moved in table] == ours


def test_two_ranks_send_the_gradients_of_what_is_counted_on_the_meta_device(scaling, tmp_path) -> None:
    """And nothing else in a step but three counts and the loss."""
    scaling.make_cache(tmp_path)
    config = AutoConfig.from_pretrained(models.resolve(models.EMBEDDED))
    rows = scaling.counted(tmp_path, steps=1)
    assert {row["stage"] for row in rows} == {"QAT", "recovery"}
    for stage in ("QAT", "recovery"):
        found = {row["what"]: row for row in rows if row["stage"] == stage}
        assert {what: row["per_step"] for what, row in found.items()} == {"counts": 1, "loss": 1, "gradients": 1}
        assert {row["call"] for row in found.values()} == {"all_reduce"}
        assert found["gradients"]["bytes"] == 4 * scaling.trained_of(config, stage.lower())
        assert (found["counts"]["bytes"], found["loss"]["bytes"]) == scaling.SMALL_COLLECTIVES
