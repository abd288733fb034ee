"""Whole runs on the tiny teacher: what they leave behind, what they start from, what they train."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch

from qat_lora import models
from qat_lora.cli import commands
from qat_lora.config import AdapterConfig, KDConfig, OptimConfig, presets
from qat_lora.config.presets import SCHEMES, scheme
from qat_lora.errors import CheckpointError, ConfigError
from qat_lora.train.checkpoint import load_checkpoint
from qat_lora.train.folder import numbered, save_numbered
from qat_lora.train.run import run_qat, run_recovery
from qat_lora.train.student import load_student, round_to_nearest, trained_parameters
from qat_lora.urls import location
from tests.conftest import SEQ_LEN, cache_run, qat_run, recovery_run


def test_a_run_leaves_its_files_and_they_agree(tmp_path, cache_dir, runtime) -> None:
    loop = {"max_steps": 5, "eval_every": 2, "save_every": 1, "keep_last": 2, "log_every": 1}
    result = run_qat(qat_run(cache_dir, tmp_path / "run", loop=loop), runtime)
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {
        *("best.pt", "last.pt", "step-000004.pt", "step-000005.pt"),
        *("loss.csv", "loss.png", "run.json", "summary.json"),
    }
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["tokens"]) == (5, 5 * 4 * SEQ_LEN)
    assert summary["best_kl"] == result.state.best_kl <= result.state.first_kl
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["loop"]["max_steps"] == 5
    assert record["versions"]["torch"] == torch.__version__
    best = load_checkpoint(result.best)
    assert best["metrics"]["held_out_kl"] == result.state.best_kl
    assert best["run"] == record["config"]
    assert "optimizer" not in best, "best.pt is for later stages, not for resumption"


@pytest.mark.parametrize("preset", SCHEMES)
def test_every_preset_trains_and_gets_better(preset, tmp_path, cache_dir, runtime) -> None:
    loop = {"max_steps": 8, "eval_rows": 16}
    optim = OptimConfig(lr=presets.qat_run(preset).optim.lr, warmup_steps=2)
    result = run_qat(qat_run(cache_dir, tmp_path / "qat", preset=preset, loop=loop, optim=optim), runtime)
    assert result.state.last_kl < result.state.first_kl
    recovered = run_recovery(recovery_run(cache_dir, tmp_path / "rec", result.best, loop=loop, optim=optim), runtime)
    assert recovered.state.first_kl == result.state.best_kl, "the frozen student is the trained one, bit for bit"
    assert recovered.state.last_kl < recovered.state.first_kl


class Start:
    """A hook that keeps what the model is before the first step."""

    every = 0

    def start(self, state) -> None:
        self.tensors = {name: x.clone() for name, x in state.model.state_dict().items()}

    def after_step(self, state, info) -> None: ...

    def end(self, state) -> None: ...


@pytest.mark.parametrize(
    ("train", "preset", "moves"),
    [
        (("weights",), "q2a4", {"weight"}),
        (("scales",), "q2a4", {"quantizer.scale.a_OR", "quantizer.scale.b_RI"}),
        (("luts",), "q2a4", {"quantizer.levels_N"}),
        (("scales", "luts"), "q2_g32", {"quantizer.scale.scale_OG"}),
    ],
)
def test_only_what_is_named_is_trained(train, preset, moves, tmp_path, cache_dir, runtime) -> None:
    start = Start()
    run = qat_run(cache_dir, tmp_path / "qat", preset=preset, train=train, loop={"max_steps": 2})
    result = run_qat(run, runtime, hooks=[start])
    before, after = start.tensors, result.state.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and {name.split("_proj.")[-1] for name in changed} == moves
    asking = {name for name, p in result.state.model.named_parameters() if p.requires_grad}
    assert asking == set(result.state.trained), "a gradient that nobody uses costs time and memory"


def test_naming_only_what_a_scheme_lacks_is_refused(teacher_dir) -> None:
    model = models.load(str(teacher_dir)).model
    round_to_nearest(model, scheme("q2_g32"))
    with pytest.raises(ConfigError, match="names nothing that this scheme has"):
        trained_parameters(model, ("luts",))


def test_recovery_changes_the_adapters_alone(tmp_path, cache_dir, teacher_dir, runtime) -> None:
    best = run_qat(qat_run(cache_dir, tmp_path / "qat"), runtime).best
    run = recovery_run(cache_dir, tmp_path / "rec", best, adapter=AdapterConfig(recovery_r=3))
    result = run_recovery(run, runtime)
    assert all(".lora_" in name for name in result.state.trained)
    ours, _ = load_student(models.load(str(teacher_dir)), best)
    theirs, _ = load_student(models.load(str(teacher_dir)), result.best)
    ids = torch.arange(20)[None]
    with torch.no_grad(), theirs.disable_adapter():
        torch.testing.assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits, rtol=0, atol=0)


def test_a_students_checkpoint_reads_back_as_the_student(tmp_path, cache_dir, teacher_dir, runtime) -> None:
    result = run_qat(qat_run(cache_dir, tmp_path / "qat", preset="q2a4"), runtime)
    student, found = load_student(models.load(str(teacher_dir)), tmp_path / "qat" / "last.pt")
    assert found == scheme("q2a4")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(student(input_ids=ids).logits, result.state.model.eval()(input_ids=ids).logits)


def test_a_recovery_with_dropout_is_evaluated_without(tmp_path, cache_dir, teacher_dir, runtime) -> None:
    student = run_qat(qat_run(cache_dir, tmp_path / "qat"), runtime).best
    adapter = AdapterConfig(recovery_dropout=0.5)
    result = run_recovery(recovery_run(cache_dir, tmp_path / "recovery", student, adapter=adapter), runtime)
    read, _ = load_student(models.load(str(teacher_dir)), result.best)
    assert not any(module.training for module in read.modules())
    models.check_head(read)


def test_qat_continues_from_a_student_of_its_scheme_and_refuses_another(tmp_path, cache_dir, runtime) -> None:
    first = run_qat(qat_run(cache_dir, tmp_path / "one"), runtime)
    second = run_qat(qat_run(cache_dir, tmp_path / "two", checkpoint=str(first.best), train=("scales",)), runtime)
    assert second.state.first_kl == first.state.best_kl
    other = qat_run(cache_dir, tmp_path / "three", preset="q4_g32", checkpoint=str(first.best))
    with pytest.raises(ConfigError, match="another scheme"):
        run_qat(other, runtime)


def test_resuming_on_another_cache_is_refused(tmp_path, cache_dir, teacher_dir, text_file, runtime) -> None:
    from qat_lora.cli import commands

    run = qat_run(cache_dir, tmp_path / "qat")
    run_qat(run, runtime)
    commands.cache(cache_run(teacher_dir, text_file, tmp_path / "other", temperatures=(1.0,)))
    with pytest.raises(CheckpointError, match=r"trained on a cache with \w+"):
        run_qat(replace(run, cache_dir=tmp_path / "other"), runtime, launch="resume")


def test_a_moved_cache_and_a_longer_run_may_be_resumed(tmp_path, cache_dir, runtime) -> None:
    run = qat_run(cache_dir, tmp_path / "qat")
    run_qat(run, runtime)
    shutil.copytree(cache_dir, tmp_path / "moved")
    longer = replace(run, cache_dir=tmp_path / "moved", loop=replace(run.loop, max_steps=8))
    assert run_qat(longer, runtime, launch="resume").state.step == 8


def test_resuming_recovery_does_not_read_the_student_again(tmp_path, cache_dir, runtime) -> None:
    best = run_qat(qat_run(cache_dir, tmp_path / "qat"), runtime).best
    run = recovery_run(cache_dir, tmp_path / "rec", best)
    before = load_checkpoint(run_recovery(run, runtime).best)["tensors"]
    run_qat(qat_run(cache_dir, tmp_path / "qat", loop={"max_steps": 9}), runtime, launch="from_scratch")
    longer = replace(run, loop=replace(run.loop, max_steps=8))
    run_recovery(longer, runtime, launch="resume")
    after = load_checkpoint(tmp_path / "rec" / "last.pt")["tensors"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_start_from_scratch_leaves_nothing_of_the_earlier_run(tmp_path, cache_dir, runtime) -> None:
    loop = {"max_steps": 6, "save_every": 2}
    run_qat(qat_run(cache_dir, tmp_path / "qat", loop=loop), runtime)
    shorter = qat_run(cache_dir, tmp_path / "qat", loop={"max_steps": 3, "save_every": 2})
    run_qat(shorter, runtime, launch="from_scratch")
    assert sorted(p.name for p in (tmp_path / "qat").glob("step-*.pt")) == ["step-000002.pt", "step-000003.pt"]
    assert load_checkpoint(tmp_path / "qat" / "last.pt")["progress"]["step"] == 3


def test_no_numbered_checkpoint_stays_where_none_is_to_be_kept(tmp_path, cache_dir, runtime) -> None:
    run = qat_run(cache_dir, tmp_path / "qat", loop={"max_steps": 4, "save_every": 1, "keep_last": 0})
    run_qat(run, runtime)
    assert not list((tmp_path / "qat").glob("*step*"))
    assert load_checkpoint(tmp_path / "qat" / "last.pt")["progress"]["step"] == 4
    longer = replace(run, loop=replace(run.loop, max_steps=6))
    assert run_qat(longer, runtime, launch="resume").state.step == 6


def test_numbered_checkpoints_are_ordered_by_number_beyond_a_million_steps(tmp_path, runtime) -> None:
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        save_numbered({"step": step}, tmp_path, step, 3, runtime)
    assert [p.name for p in numbered(tmp_path)] == ["step-999999.pt", "step-1000000.pt", "step-1000001.pt"]
    assert torch.load(tmp_path / "last.pt", weights_only=True) == {"step": 1_000_001}


def test_an_anchor_holds_the_model_near_its_start(tmp_path, cache_dir, runtime) -> None:
    best = run_qat(qat_run(cache_dir, tmp_path / "qat"), runtime).best
    moved = []
    for weight in (0.0, 50.0):
        run = recovery_run(
            cache_dir, tmp_path / f"rec{weight}", best, kd=KDConfig(anchor_kl_weight=weight, anchor_samples=40),
            optim=OptimConfig(lr=1e-2, warmup_steps=1), loop={"max_steps": 15},
        )  # fmt: skip
        result = run_recovery(run, runtime)
        ids = torch.arange(24)[None]
        with torch.no_grad():
            after = result.state.model.eval()(input_ids=ids).logits
            with result.state.model.disable_adapter():
                moved.append((after - result.state.model(input_ids=ids).logits).pow(2).mean().item())
    assert moved[1] < 0.5 * moved[0]


def test_a_run_killed_before_its_last_evaluation_is_finished_by_resuming(tmp_path, cache_dir, runtime) -> None:
    run = qat_run(cache_dir, tmp_path / "qat", loop={"eval_every": 0, "save_every": 3})
    whole = run_qat(run, runtime)
    path = tmp_path / "qat" / "step-000003.pt"
    shutil.copyfile(path, tmp_path / "qat" / "last.pt")
    short = replace(run, loop=replace(run.loop, max_steps=3))  # at its end, and not evaluated there
    result = run_qat(short, runtime, launch="resume")
    assert (result.state.evaluated_step, result.state.step) == (3, 3)
    assert load_checkpoint(result.best)["metrics"]["step"] == result.state.best_step
    assert whole.state.evaluated_step == 6


class _Failing:
    every = 1

    def start(self, state) -> None:
        pass

    def after_step(self, state, info) -> None:
        raise RuntimeError("a hook fails")

    def end(self, state) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_when_a_run_ends_no_thread_reads_on(tmp_path, cache_dir, runtime, fails) -> None:
    def reading() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "qat_lora-prefetch"]

    if fails:
        with pytest.raises(RuntimeError, match="a hook fails") as caught:  # and with it all frames of the run
            run_qat(qat_run(cache_dir, tmp_path / "qat"), runtime, hooks=[_Failing()])
        assert caught.traceback and not reading()
    else:
        run_qat(qat_run(cache_dir, tmp_path / "qat"), runtime)
        assert not reading()


def test_the_command_builds_at_a_url_what_it_builds_in_a_folder(tmp_path, teacher_dir, text_file, monkeypatch) -> None:
    monkeypatch.setenv("QAT_LORA_CACHE_HOME", str(tmp_path / "home"))
    for place in (tmp_path / "here", location(f"file://{tmp_path}/there")):
        commands.cache(cache_run(teacher_dir, text_file, place, max_rows=20, rows_per_shard=8))
    here, there = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("here", "there"))
    assert here == there and len(here) == 5


def test_a_cache_at_a_url_trains_the_same_student(tmp_path, cache_dir, runtime, monkeypatch) -> None:
    monkeypatch.setenv("QAT_LORA_CACHE_HOME", str(tmp_path / "home"))
    url = location(f"file://{cache_dir}")
    loop = {"preload": False, "max_steps": 3}
    tensors = [
        load_checkpoint(run_qat(qat_run(place, tmp_path / name, loop=loop), runtime).best)["tensors"]
        for name, place in (("here", cache_dir), ("there", url))
    ]
    assert all(torch.equal(tensors[1][name], x) for name, x in tensors[0].items())
    record = json.loads((tmp_path / "there" / "run.json").read_text())
    assert record["config"]["cache_dir"] == f"file://{cache_dir}"
