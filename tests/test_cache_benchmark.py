"""The cache's benchmark: its synthetic caches are real ones, its table says what was measured and which bar holds."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

from qat_lora.cache import KDCacheDataset, verify


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("cache")


def test_a_synthetic_cache_has_its_size_and_is_whole(benchmark, tmp_path) -> None:
    written = benchmark.write_synthetic(tmp_path, 12)
    assert written == pytest.approx(12e6, rel=0.01)
    assert len(verify(tmp_path).shards) == 3
    batch = next(KDCacheDataset(tmp_path, split="train", eval_fraction=0.1).batches(4))
    assert batch["topk_ids"].shape == (4, benchmark.SEQ_LEN, benchmark.TOP_K)


def test_memory_is_watched_in_a_process_of_its_own(benchmark, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    args = argparse.Namespace(sizes_mb=[1, 2], epochs=1.0, folder=str(tmp_path))
    small, large = benchmark.measure_memory(args)
    assert (small["epochs"], large["epochs"]) == (pytest.approx(1, abs=0.3), pytest.approx(1, abs=0.3))
    assert large["flat_mb"] == large["both"] - small["both"] and "flat_mb" not in small
    assert list(tmp_path.iterdir()) == []
    lines = benchmark.lines_of([small, large], args)
    assert lines[-1].endswith(f"{large['flat_mb']:.1f} | at most 64 MB |")
