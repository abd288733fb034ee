"""One program for four XLA devices: the model on each of them, or divided among them; the same as on one CPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from qat_lora import models
from qat_lora.runtime import LocalRuntime
from qat_lora.train.checkpoint import load_checkpoint
from qat_lora.train.run import run_recovery
from qat_lora.train.student import load_student
from tests.runtime import programs, ranks
from tests.runtime.xla_spmd import CHUNK_TOKENS

pytestmark = [
    pytest.mark.xla,
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
]
DEVICES = 4
run_program = functools.partial(programs.run_program, module="tests.runtime.xla_spmd", CPU_NUM_DEVICES=str(DEVICES))


@pytest.fixture(scope="module")
def divided(cache_dir, tmp_path_factory, student) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("divided")
    return run_program("train", folder, "recover", cache_dir, student, "spmd", "kept"), folder / "run"


def left_at_15(run: Path, folder: Path) -> Path:
    """A folder as the run would have left it, had it ended after its checkpoint of step 15."""
    shutil.copytree(run, folder)
    (folder / "last.pt").unlink()
    (folder / "step-000015.pt").rename(folder / "last.pt")
    return folder


def is_same(found: dict[str, Any], alone: dict[str, Any], *, kl: bool = True) -> None:
    for part in ("losses", "grad_norms", *(["kl"] if kl else [])):  # 7e-7 of a KL seen
        assert found[part] == pytest.approx(alone[part], rel=1e-5), part
    for name, values in alone["trained"].items():  # 1e-5 of an adapter's largest entry seen
        assert found["trained"][name] == pytest.approx(values, abs=1e-3 * max(map(abs, values))), name


@pytest.mark.parametrize(
    ("stage", "shard", "layers"),
    [
        ("recover", "spmd_data", "kept"),
        ("recover", "spmd", "kept"),
        ("recover", "spmd", "recomputed"),
        ("recover", "spmd", "scanned"),
        ("qat", "spmd", "kept"),
    ],
)
def test_four_devices_compute_what_one_cpu_computes_and_compile_once(
    stage, shard, layers, tmp_path, cache_dir, student, alone, divided
) -> None:
    """20 steps with accumulation 2, clipping, anchor rows, averages, evaluations, checkpoints; --max-recompiles 0."""
    if (stage, shard, layers) == ("recover", "spmd", "kept"):
        found = divided[0]
    else:
        found = run_program("train", tmp_path, stage, cache_dir, student, shard, layers)
    is_same(found, alone[stage])
    assert found["devices"] == DEVICES
    how = "{devices=[4,1]0,1,2,3}" if shard == "spmd" else "{replicated}"
    assert found["specs"] == {kind: [how] for kind in ("trained", "moments", "ema")}
    assert found["summary"]["compilations_after_first_step"] == 0
    assert len({graph for _, graph in found["graphs"]}) == len(found["graphs"]), "no program is compiled twice"


def test_a_run_that_was_cut_off_ends_as_the_whole_one(tmp_path, cache_dir, student, divided) -> None:
    found = run_program("resumed", tmp_path, "recover", cache_dir, student, "spmd", "kept")
    assert found["trained"] == divided[0]["trained"]
    assert found["specs"] == divided[0]["specs"], "what was read back is divided again"


def test_it_goes_on_on_one_device(tmp_path, cache_dir, student, divided, alone) -> None:
    folder = left_at_15(divided[1], tmp_path / "run")
    run = ranks.settings("recover", cache_dir, folder, student, 1)
    run = dataclasses.replace(run, kd=dataclasses.replace(run.kd, chunk_tokens=CHUNK_TOKENS))
    assert load_checkpoint(folder / "last.pt")["progress"]["step"] == 15
    runtime = LocalRuntime("cpu")
    is_same(ranks.outcome(run_recovery(run, runtime, launch="resume"), runtime), alone["recover"], kl=False)


def test_memory_that_torch_xla_does_not_count_is_not_taken_for_the_hosts() -> None:
    """What a model that is divided among chips leaves free of each must not come out as hundreds of gigabytes."""
    found = run_program("memory")
    assert found["cpu"] > 0 == found["tpu"]


def test_its_checkpoints_are_like_any_others(teacher_dir, divided) -> None:
    found, folder = divided
    assert load_checkpoint(folder / "last.pt")["trained"] == list(found["trained"])
    adapted, _ = load_student(models.load(str(teacher_dir)), folder / "last.pt")
    loaded = {name: p.flatten().tolist() for name, p in adapted.named_parameters() if ".lora_" in name}
    assert loaded == found["trained"]
