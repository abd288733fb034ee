"""`--mem-debug`: lines of JSON, each level with more in them, and true."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from torch import nn

from qat_lora.config import ExecutionConfig, OptimConfig
from qat_lora.runtime import CompiledGraph, LocalRuntime, MemoryUse
from qat_lora.train.loop import StepInfo, TrainState
from qat_lora.train.memory import MemoryHook, census
from qat_lora.train.optim import build_optimizer
from qat_lora.train.run import run_qat
from tests.conftest import qat_run

GRAPH = CompiledGraph("forward", hash="ab", inputs=3, outputs=1, bytes_by_use={"temporary": 7}, frames=("f (x.py:1)",))


class Counting(LocalRuntime):
    """The CPU, with counters and graphs of its own."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def memory(self) -> MemoryUse:
        return MemoryUse(10, 20, 30, 40)

    def metrics(self) -> dict[str, float]:
        return {"UncachedCompile": 4.0}

    def compilations(self) -> list[CompiledGraph]:
        return [GRAPH]


@pytest.fixture
def state() -> TrainState:
    p = nn.Parameter(torch.ones(2))
    return TrainState(nn.Module(), {"p": p}, build_optimizer([p], [], OptimConfig()))


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path, state, level: str) -> list[dict]:
    hook = MemoryHook(path, Counting(), level=level, every=5)
    hook.start(state)
    state.step = 5
    hook.after_step(state, StepInfo(5, torch.tensor(0.0), torch.tensor(0.0), 0.1, 1))
    hook.end(state)
    return lines(path)


BASIC = {"when", "step", "used_bytes", "peak_bytes", "total_bytes", "free_bytes"}
FIELDS = {
    "basic": BASIC,
    "tensors": BASIC | {"tensors", "largest"},
    "metrics": BASIC | {"tensors", "largest", "metrics"},
    "hlo": BASIC | {"tensors", "largest", "metrics", "graphs"},
}


@pytest.mark.parametrize("level", FIELDS)
def test_each_level_adds_its_fields_to_the_lines_of_those_before(level, tmp_path, state) -> None:
    found = written(tmp_path / "memory.jsonl", state, level)
    assert [(line["when"], line["step"]) for line in found] == [("start", 0), ("step", 5), ("end", 5)]
    for line in found:
        assert set(line) == FIELDS[level]
        assert (line["used_bytes"], line["peak_bytes"], line["total_bytes"]) == (10, 20, 30)
        assert line.get("metrics", {"UncachedCompile": 4.0}) == {"UncachedCompile": 4.0}
    if level == "hlo":
        assert found[0]["graphs"] == [
            {
                "phase": "forward", "hash": "ab", "inputs": 3, "outputs": 1, "bytes_by_use": {"temporary": 7},
                "frames": ["f (x.py:1)"],
            }
        ]  # fmt: skip


def test_off_writes_nothing_and_is_called_never(tmp_path, state) -> None:
    hook = MemoryHook(tmp_path / "memory.jsonl", Counting(), level="off", every=5)
    assert hook.every == 0
    hook.start(state)
    hook.end(state)
    assert not (tmp_path / "memory.jsonl").exists()


def test_one_rank_of_several_writes(tmp_path, state) -> None:
    runtime = Counting()
    runtime.rank = 1
    MemoryHook(tmp_path / "memory.jsonl", runtime, level="hlo", every=5).start(state)
    assert not (tmp_path / "memory.jsonl").exists()


def test_the_census_counts_tensors_by_device_and_dtype_and_names_the_largest() -> None:
    gc.collect()
    before, _ = census()
    held = [torch.zeros(1 << 20, 3), nn.Parameter(torch.zeros(1 << 20, 3)), torch.zeros(5, dtype=torch.int16)]
    after, largest = census()

    def grown(kind: str) -> tuple[int, int]:
        old = before.get(kind, {"count": 0, "bytes": 0})
        return after[kind]["count"] - old["count"], after[kind]["bytes"] - old["bytes"]

    assert grown("cpu float32") == (2, 2 * 3 * 4 << 20)
    assert grown("cpu int16") == (1, 10)
    mine = {"device": "cpu", "dtype": "float32", "shape": [1 << 20, 3], "count": 2, "bytes": 2 * 3 * 4 << 20}
    assert mine in largest
    assert [kind["bytes"] for kind in largest] == sorted((kind["bytes"] for kind in largest), reverse=True)
    assert len(largest) <= 10
    del held


def test_the_census_reads_no_value(monkeypatch) -> None:
    held = torch.ones(3)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a value is read"))
    census()
    monkeypatch.undo()
    assert held.sum() == 3


def test_a_run_writes_its_memory_beside_its_losses_and_a_resumed_one_continues(tmp_path, cache_dir, runtime) -> None:
    loop = {"max_steps": 4, "log_every": 2, "save_every": 2}
    run = qat_run(cache_dir, tmp_path / "qat", loop=loop, execution=ExecutionConfig(mem_debug="metrics"))
    run_qat(run, runtime)
    found = lines(run.output / "memory.jsonl")
    assert [(line["when"], line["step"]) for line in found] == [("start", 0), ("step", 2), ("step", 4), ("end", 4)]
    assert all(0 < line["used_bytes"] <= line["peak_bytes"] for line in found)
    longer = qat_run(cache_dir, run.output, loop=loop | {"max_steps": 6}, execution=ExecutionConfig(mem_debug="basic"))
    run_qat(longer, runtime, launch="resume")
    found = lines(run.output / "memory.jsonl")[4:]
    assert [(line["when"], line["step"]) for line in found] == [("start", 4), ("step", 6), ("end", 6)]
    assert all(set(line) == BASIC for line in found)
