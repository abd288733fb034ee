"""Rows of several documents on torch_xla: what a CPU computes, from one graph whatever the boundaries are.

The functions above the tests are programs, run as forks. Tolerances as in `test_xla`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qat_lora import models
from qat_lora.cache import KDCacheDataset
from qat_lora.cli import commands
from qat_lora.config import ExecutionConfig, KDConfig, PlaceConfig, RecoveryRun
from qat_lora.runtime import LocalRuntime, runtime_for
from qat_lora.train.run import run_qat, run_recovery
from tests.conftest import SEQ_LEN, cache_run, qat_run, recovery_run
from tests.runtime import programs

run_program = functools.partial(programs.run_program, module="tests.runtime.test_xla_documents")
pytestmark = [
    pytest.mark.xla,
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
]
ON_XLA = PlaceConfig(device="tpu", dtype="fp32")
LAYERS: dict[str, dict[str, Any]] = {
    "kept": {"gradient_checkpointing": "off"},
    "recomputed": {"gradient_checkpointing": "on"},
    "scanned": {"scan_layers": True},
}
CACHE = {"top_k": 16, "logprob_bits": 32, "packing": "documents"}


def settings(cache: Path, output: Path, student: Path, *, rows: int = 4, **execution: Any) -> RecoveryRun:
    loop = {"max_steps": 6, "accumulation_steps": 2, "eval_every": 3, "log_every": 1, "batch_size": rows}
    return recovery_run(
        cache, output, student, loop=loop,
        kd=KDConfig(ce_alpha=0.2, anchor_kl_weight=0.5, anchor_samples=4), optim=programs.OPTIM,
        execution=ExecutionConfig(max_recompiles=0, **execution),
    )  # fmt: skip


def numbers_of(result: Any) -> dict[str, Any]:
    return {
        "losses": [row["loss"] for row in result.losses.rows if row["loss"] == row["loss"]],
        "kl": [row["eval_kl"] for row in result.losses.rows if row["eval_kl"] == row["eval_kl"]],
    }


def train(cache: str, folder: str, student: str) -> dict[str, Any]:
    """A recovery run with every way to run the layers."""
    runtime, found = runtime_for(ON_XLA), {}
    for name, execution in LAYERS.items():
        output = Path(folder) / name
        result = run_recovery(settings(Path(cache), output, Path(student), **execution), runtime)
        found[name] = numbers_of(result) | {"summary": json.loads((output / "summary.json").read_text())}
    return found


def spread(cache: str, folder: str, student: str) -> dict[str, Any]:
    """A recovery run by one program on all devices, two rows on each, the model divided among them."""
    runtime = runtime_for(ON_XLA, shard="spmd")
    run = settings(Path(cache), Path(folder), Path(student), rows=2, shard="spmd")
    return numbers_of(run_recovery(run, runtime)) | {"devices": runtime.devices}


def build(teacher: str, text: str, folder: str) -> dict[str, Any]:
    """A cache; then hidden states of rows with boundaries of every kind, and what is compiled and read for them."""
    run = cache_run(Path(teacher), Path(text), Path(folder), place=ON_XLA, **CACHE)
    runtime = runtime_for(ON_XLA)
    commands.cache(run)
    found: dict[str, Any] = {"graphs": len(runtime.compilations())}
    import torch_xla.debug.metrics as metrics

    model = models.place(models.load(teacher).model, runtime)
    ids_BT = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) + 3
    one, many = torch.arange(SEQ_LEN), torch.zeros(SEQ_LEN, dtype=torch.int64)
    halves = one % (SEQ_LEN // 2)
    counts = []
    for rows in ((one, one), (one, halves), (many, halves), (one % 5, one)):
        batch = runtime.to_device({"ids": ids_BT, "positions": torch.stack(rows)})
        runtime.mark_step("set-up")
        before = [metrics.counter_value(name) or 0 for name in ("UncachedCompile", "aten::_local_scalar_dense")]
        with torch.no_grad():
            hidden = models.hidden_and_head(model, batch["ids"], runtime, position_ids_BT=batch["positions"])[0]
        runtime.mark_step("evaluation")
        after = [metrics.counter_value(name) or 0 for name in ("UncachedCompile", "aten::_local_scalar_dense")]
        counts.append([new - old for new, old in zip(after, before, strict=True)])
        cpu = models.hidden_and_head(
            models.load(teacher).model, ids_BT, LocalRuntime("cpu"), position_ids_BT=torch.stack(rows)
        )[0]
        found.setdefault("off by", []).append((hidden.cpu() - cpu).abs().max().item() / cpu.abs().max().item())
    return found | {"compiled, read": counts}


@pytest.fixture(scope="module")
def cache(tmp_path_factory, teacher_dir, text_file) -> Path:
    """Beginnings of lines as documents, so that most rows have some boundaries, each elsewhere."""
    folder = tmp_path_factory.mktemp("documents")
    lines = [" ".join(line.split()[: 2 + 5 * i % 9]) for i, line in enumerate(text_file.read_text().splitlines())]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    commands.cache(cache_run(teacher_dir, folder / "texts.jsonl", folder / "cache", **CACHE))
    return folder / "cache"


@pytest.fixture(scope="module")
def student(tmp_path_factory, cache) -> Path:
    return run_qat(qat_run(cache, tmp_path_factory.mktemp("student") / "qat"), LocalRuntime("cpu")).best


def test_training_is_the_cpus_and_compiles_nothing_for_other_boundaries(cache, student, tmp_path) -> None:
    """With anchor rows, next-token loss and evaluations; layers kept, recomputed and scanned; --max-recompiles 0."""
    positions = KDCacheDataset(cache, preload=True)
    seen = {tuple(positions[row]["position_ids"].tolist()) for row in range(len(positions))}
    assert len(seen) > len(positions) // 3, "boundaries that do not differ prove nothing"
    expected = numbers_of(run_recovery(settings(cache, tmp_path / "cpu", student), LocalRuntime("cpu")))
    found = run_program("train", cache, tmp_path / "xla", student)
    for name in LAYERS:
        assert found[name]["summary"]["compilations_after_first_step"] == 0, name
        assert found[name]["losses"] == pytest.approx(expected["losses"], rel=1e-4), name
        assert found[name]["kl"] == pytest.approx(expected["kl"], rel=1e-4), name


def test_four_devices_as_one_program_train_like_the_cpu(cache, student, tmp_path) -> None:
    expected = numbers_of(run_recovery(settings(cache, tmp_path / "cpu", student, rows=8), LocalRuntime("cpu")))
    found = run_program("spread", cache, tmp_path / "xla", student, CPU_NUM_DEVICES="4")
    assert found["devices"] == 4
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["kl"] == pytest.approx(expected["kl"], rel=1e-4)


def test_a_cache_built_there_is_the_cpus_from_one_graph_without_a_host_read(cache, teacher_dir, tmp_path) -> None:
    texts = cache.parent / "texts.jsonl"
    found = run_program("build", teacher_dir, texts, tmp_path / "cache")
    assert found["graphs"] == 1, "of the whole build"
    # 1e-6 of the largest entry: other kernels, other order
    assert max(found["off by"]) < 2e-6
    assert found["compiled, read"][1:] == [[0, 0]] * 3, "one graph serves all boundaries"
    assert found["compiled, read"][0] == [1, 0]
    ours, theirs = (KDCacheDataset(path, preload=True) for path in (tmp_path / "cache", cache))
    assert len(ours) == len(theirs)
    for row in range(len(ours)):
        a, b = ours[row], theirs[row]
        assert torch.equal(a["position_ids"], b["position_ids"]) and torch.equal(a["input_ids"], b["input_ids"])
        np.testing.assert_allclose(a["tail"], b["tail"], rtol=0, atol=3e-5)
