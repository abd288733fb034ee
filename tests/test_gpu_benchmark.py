"""`make gpu`, which nobody here can run on a GPU: that every part of it runs, on the CPU and in little."""

from __future__ import annotations

import json
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_report_for_a_gpu_is_made(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    monkeypatch.setattr(gpu, "demo", lambda *args, **settings: [])  # it has tests of its own
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--quick", "--output", str(tmp_path)])
    assert gpu.main() == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["equality"]["right"] and report["equality"]["worst_relative_error"] == 0, "the CPU against itself"
    assert report["equality"]["tensors"] > 50
    assert report["repeatable"] == {"QAT": True, "recovery": True}
    assert [row["kind"] for row in report["steps"]] == list(gpu.KINDS)
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in report["steps"])
    said = capsys.readouterr().out
    assert "equality with the CPU, float32: right" in said and "tokens/s" in said


def test_a_wrong_gradient_is_seen(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu
    import torch

    from qat_lora.config import PlaceConfig

    found = iter([(1.0, {"w": torch.ones(3)}), (1.0, {"w": torch.tensor([1.0, 1.0, 1.01])})])
    monkeypatch.setattr(gpu, "Steps", lambda *args: type("", (), {"gradients": lambda self: next(found)})())
    assert gpu.equality(None, PlaceConfig(device="cpu"))["right"] is False
