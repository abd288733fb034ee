"""Ranks that share one model by FSDP2: each holds a part, together they are one device with the whole batch."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from qat_lora import models
from qat_lora.cli.main import main
from qat_lora.runtime import LocalRuntime
from qat_lora.train.checkpoint import load_checkpoint
from qat_lora.train.run import run_qat, run_recovery
from qat_lora.train.student import load_student
from tests.runtime import ranks
from tests.runtime.test_distributed import forked_in, on_ranks

pytestmark = pytest.mark.ranks
STAGES = {"qat": run_qat, "recover": run_recovery}
RELATIVE = 1e-5  # of the largest entry of a tensor; about 1e-6 was seen, from sums in another order
BACKWARDS = 2 * 2 * ranks.STEPS  # of two micro-batches per step, each with its anchor rows


def on_shared(world_size: int, folder: Path, name: str, *arguments: object) -> list[dict[str, Any]]:
    return on_ranks(world_size, folder, f"tests.runtime.fsdp_ranks:{name}", *arguments)


@pytest.fixture(scope="module", params=STAGES)
def stage(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(stage, cache_dir, tmp_path_factory, student) -> dict[str, Any]:
    """What one device makes of the whole batch, and where."""
    runtime, folder = LocalRuntime("cpu"), tmp_path_factory.mktemp(f"{stage}_alone")
    result = STAGES[stage](ranks.settings(stage, cache_dir, folder, student, 1), runtime)
    return ranks.outcome(result, runtime) | {"folder": folder}


@pytest.fixture(scope="module")
def shared(stage, cache_dir, tmp_path_factory, student) -> list[dict[str, Any]]:
    """What two ranks make of it together, and where."""
    folder = tmp_path_factory.mktemp(f"{stage}_shared")
    found = on_shared(2, folder, "train", stage, cache_dir, student, "new", "off")
    return [each | {"folder": folder / "run"} for each in found]


def assert_equal_but_for_rounding(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """20 steps with accumulation 2, clipping that clips, warm-up, anchor rows, a moving average and evaluations."""
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-3)  # before clipping
    assert min(expected["grad_norms"]) > ranks.OPTIM.clip_norm, "nothing was clipped"
    assert found["kl"] == pytest.approx(expected["kl"], rel=1e-4)
    for part in ("trained", "ema"):
        assert found[part].keys() == expected[part].keys()
        for name, values in expected[part].items():
            largest = max(abs(value) for value in values)
            assert found[part][name] == pytest.approx(values, rel=0, abs=RELATIVE * largest), (part, name)


def test_ranks_together_train_what_one_device_would_and_each_holds_its_share(shared, alone) -> None:
    first, other = shared
    for part in ("trained", "ema", "losses", "kl", "grad_norms"):
        assert other[part] == first[part], part
    assert_equal_but_for_rounding(first, alone)
    count = sum(len(values) for values in alone["trained"].values())
    for each in shared:
        assert each["bytes"] == {"trained": [2 * count, 4 * count], "moments": [4 * count, 8 * count],
                                 "ema": [2 * count, 4 * count]}  # fmt: skip
        assert each["elsewhere"] == 211 * 44 + 44, "the embedding and the last norm alone are whole"
        assert each["reduced_bytes"] == BACKWARDS * 4 * count, "each backward sums once"


def test_four_ranks_that_recompute_their_layers_train_the_same(tmp_path, stage, cache_dir, student, alone) -> None:
    found = on_shared(4, tmp_path, "train", stage, cache_dir, student, "new", "on")
    assert_equal_but_for_rounding(found[0], alone)
    count = sum(len(values) for values in alone["trained"].values())
    assert [each["bytes"]["trained"] for each in found] == [[count, 4 * count]] * 4


def test_checkpoints_are_whole_and_named_like_those_of_one_device(shared, alone, teacher_dir, tmp_path) -> None:
    for name in ("best.pt", "last.pt"):
        theirs, ours = (load_checkpoint(each["folder"] / name) for each in (shared[0], alone))
        assert _shapes(theirs) == _shapes(ours) and _shapes(ours)
        assert theirs["world_size"] == 2
    tensors = theirs["tensors"] | theirs.get("adapters", {})
    assert {x.untyped_storage().nbytes() == x.element_size() * x.numel() for x in tensors.values()} == {True}
    students = [
        load_student(models.load(str(teacher_dir)), each["folder"] / "best.pt")[0] for each in (shared[0], alone)
    ]
    ids = torch.arange(12)[None]
    torch.testing.assert_close(*(student(ids).logits for student in students), rtol=1e-4, atol=1e-4)
    best = str(shared[0]["folder"] / "best.pt")
    assert main(["export", "--checkpoint", best, "--output", str(tmp_path / "export"), "--quiet"]) == 0


def test_a_killed_rank_ends_the_job_and_the_run_goes_on_shared_or_alone(
    tmp_path, stage, cache_dir, student, shared, alone
) -> None:
    name = "tests.runtime.fsdp_ranks:train"
    done = forked_in(2, tmp_path / "cut off", name, stage, cache_dir, student, "killed", "off")
    assert done.codes[1] == -signal.SIGKILL
    assert load_checkpoint(tmp_path / "cut off" / "run" / "last.pt")["progress"]["step"] == 5
    shutil.copytree(tmp_path / "cut off" / "run", tmp_path / "by one")
    two = on_shared(2, tmp_path / "cut off", "train", stage, cache_dir, student, "resume", "off")[0]
    for part in ("trained", "ema"):
        assert two[part] == shared[0][part], part
    assert two["losses"] == pytest.approx(shared[0]["losses"], rel=1e-8), "the first were read back from loss.csv"
    summary = json.loads((tmp_path / "cut off" / "run" / "summary.json").read_text())
    assert summary["launch_steps"] == 15
    runtime = LocalRuntime("cpu")
    run = ranks.settings(stage, cache_dir, tmp_path / "by one", student, 1)
    assert_equal_but_for_rounding(ranks.outcome(STAGES[stage](run, runtime, launch="resume"), runtime), alone)


def test_ranks_that_begin_from_different_weights_are_told(tmp_path, cache_dir, student) -> None:
    """Parts of two students put together would be one student on all ranks, and nobody's."""
    content = load_checkpoint(student)
    content["tensors"] = {name: x * 1.01 if x.is_floating_point() else x for name, x in content["tensors"].items()}
    torch.save(content, tmp_path / "other.pt")
    for each in on_shared(2, tmp_path, "disagreeing", cache_dir, student, tmp_path / "other.pt"):
        assert each["error"].startswith("the ranks do not start from the same: their settings, caches, models, weights")
    assert not list((tmp_path / "run").glob("*"))


def _shapes(content: dict[str, Any]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor of a checkpoint, by its path."""
    found, left = {}, [("", content)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{path}/{key}", inner) for key, inner in value.items()]
        elif isinstance(value, torch.Tensor):
            assert type(value) is torch.Tensor, path
            found[path] = value.shape, value.dtype
    return found
