"""What a run writes down is true of what it describes; what it advises is accepted."""

from __future__ import annotations

import logging
import math
import re
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qat_lora import models
from qat_lora.cache import KDCacheDataset
from qat_lora.cli.main import main
from qat_lora.config import OptimConfig, QatRun, RecoveryRun
from qat_lora.errors import CheckpointError, ConfigError, DiskFull, TrainingError
from qat_lora.evaluate import cached_kl
from qat_lora.runtime import LocalRuntime
from qat_lora.settings import to_json
from qat_lora.train import folder as folder_module
from qat_lora.train import run as run_module
from qat_lora.train.checking import differences
from qat_lora.train.checkpoint import load_checkpoint, student_state
from qat_lora.train.folder import remove_run, save_numbered
from qat_lora.train.loop import TrainState
from qat_lora.train.run import run_qat, run_recovery
from qat_lora.train.student import load_student
from tests.conftest import qat_run, recovery_run

OPTIM = OptimConfig(lr=2e-3, warmup_steps=2)
LOOP = {"max_steps": 3, "eval_every": 2, "save_every": 1, "keep_last": 9, "log_every": 1}


class Acts:
    """A hook that does something after each step."""

    every = 1

    def __init__(self, act) -> None:
        self.after_step = act

    def start(self, state) -> None: ...

    def end(self, state) -> None: ...


@pytest.fixture(scope="module")
def student(tmp_path_factory, cache_dir) -> Path:
    run = qat_run(cache_dir, tmp_path_factory.mktemp("student") / "qat", loop={"max_steps": 1})
    return run_qat(run, LocalRuntime("cpu")).best


@pytest.mark.parametrize("ema_decay", [0.0, 0.7])
def test_the_kl_in_a_checkpoint_is_that_of_the_student_in_it(
    ema_decay, tmp_path, cache_dir, teacher_dir, runtime
) -> None:
    run = qat_run(cache_dir, tmp_path / "qat", loop=LOOP, optim=replace(OPTIM, ema_decay=ema_decay))
    # step 3 is saved before it is evaluated as the run's end
    early = []
    look = Acts(lambda state, info: early.append(load_checkpoint(run.output / "last.pt")["metrics"]))
    run_qat(run, runtime, hooks=[look])
    assert [metrics["step"] for metrics in early] == [1, 2, 3]
    assert [metrics["held_out_kl"] is None for metrics in early] == [True, bool(ema_decay), True]

    held_out = KDCacheDataset(cache_dir, preload=True).part("eval")
    measured = 0
    for path in (run.output / "best.pt", *run.output.glob("step-*.pt")):
        metrics = load_checkpoint(path)["metrics"]
        if metrics["held_out_kl"] is not None:
            model, _ = load_student(models.load(str(teacher_dir)), path)
            batches = held_out.eval_batches(4, rows=run.loop.eval_rows)
            kl = cached_kl(model, batches, held_out.manifest.target_spec, runtime=runtime, chunk_tokens=256)
            assert kl == pytest.approx(metrics["held_out_kl"], rel=1e-6), path.name
            measured += 1
    assert measured == (1 if ema_decay else 3), "with averages best.pt alone holds what was evaluated"


def test_a_run_names_the_commit_that_it_started_with(tmp_path, cache_dir, runtime, monkeypatch) -> None:
    commits = iter(["first", "edited meanwhile", "and again"])
    monkeypatch.setattr(folder_module, "git_commit", lambda: next(commits))
    run = qat_run(cache_dir, tmp_path / "qat", loop=LOOP)
    run_qat(run, runtime)
    assert {load_checkpoint(path)["git_commit"] for path in run.output.glob("*.pt")} == {"first"}
    assert '"git_commit": "first"' in (run.output / "run.json").read_text()


FREE = {
    *(
        "preset",
        "model",
        "cache_dir",
        "output",
        "checkpoint",
        "place.*",
        "execution.*",
        "kd.chunk_tokens",
        "kd.seq_len",
    ),
    *("loop.max_steps", "loop.batch_size", "loop.accumulation_steps", "loop.global_batch_size", "loop.log_every"),
    *("loop.eval_every", "loop.eval_rows", "loop.save_every", "loop.keep_last", "loop.preload", "loop.disk_cache_gb"),
}


@pytest.mark.parametrize("run", [QatRun(), RecoveryRun()], ids=lambda run: run.command)
def test_these_settings_may_change_on_resumption_and_no_others(run) -> None:
    def leaves(tree: dict, prefix: str = ""):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", tree, key

    saved, refused, names = to_json(run), set(), set()
    asked = to_json(run)
    for name, tree, key in leaves(asked):
        names.add(name)
        old, tree[key] = tree[key], "something else"
        refused |= {found for found, _, _ in differences(saved, asked)}
        tree[key] = old
    free = {name for name in names if name in FREE or f"{name.split('.')[0]}.*" in FREE}
    assert refused == names - free
    assert "loop.seed" in refused and len(free) > 15


def test_how_much_is_evaluated_and_at_once_may_change_on_resumption(tmp_path, cache_dir, runtime, caplog) -> None:
    run = qat_run(cache_dir, tmp_path / "qat", loop=LOOP)
    run_qat(run, runtime)
    more = replace(run, kd=replace(run.kd, chunk_tokens=16), loop=replace(run.loop, max_steps=4))
    with caplog.at_level(logging.INFO):
        run_qat(more, runtime, launch="resume")
        assert "other held-out rows" not in caplog.text
        fewer = replace(more, loop=replace(more.loop, eval_rows=4, max_steps=5))
        assert run_qat(fewer, runtime, launch="resume").state.step == 5
        assert "other held-out rows than before: best.pt stays until a KL is below" in caplog.text


def advised(message: str) -> Path:
    found = re.search(r"start another run: --checkpoint (\S+) with another --output", message)
    assert found, message
    return Path(found[1])


@pytest.mark.parametrize("where", ["loss", "weights"])
def test_after_a_loss_that_is_not_finite_the_advice_is_accepted(where, tmp_path, cache_dir, runtime, student) -> None:
    def spoil(state, info) -> None:
        next(iter(state.trained.values())).data.fill_(math.nan)

    loop = LOOP | {"max_steps": 8, "log_every": 1 if where == "loss" else 99, "save_every": 2, "eval_every": 0}
    qat = qat_run(cache_dir, tmp_path / "qat", loop=loop)
    recovery = recovery_run(cache_dir, tmp_path / "rec", student, loop=loop)
    for run, start in ((qat, run_qat), (recovery, run_recovery)):
        with pytest.raises(TrainingError, match="lower --lr") as caught:
            start(run, runtime, hooks=[Acts(spoil)])
        again = replace(
            run, checkpoint=str(advised(str(caught.value))), output=tmp_path / f"new {run.command}",
            optim=replace(run.optim, lr=1e-4), loop=replace(run.loop, max_steps=1),
        )  # fmt: skip
        assert math.isfinite(start(again, runtime).state.last_kl)


def test_a_run_resumed_at_another_rate_is_told_what_works(tmp_path, cache_dir, runtime, student) -> None:
    loop = LOOP | {"max_steps": 1}
    for run, start in (
        (qat_run(cache_dir, tmp_path / "qat", loop=loop), run_qat),
        (recovery_run(cache_dir, tmp_path / "rec", student, loop=loop), run_recovery),
    ):
        start(run, runtime)
        changed = replace(run, optim=replace(OPTIM, lr=1e-4))
        with pytest.raises(
            CheckpointError, match=r"optim.lr=0.002, this run has 0.0001; resume with the same"
        ) as caught:
            start(changed, runtime, launch="resume")
        start(
            replace(changed, checkpoint=str(advised(str(caught.value))), output=tmp_path / f"new {run.command}"),
            runtime,
        )


def test_resuming_nothing_is_said_in_one_line(tmp_path, cache_dir, runtime, caplog) -> None:
    run = qat_run(cache_dir, tmp_path / "mistyped", loop={"max_steps": 1})
    run_qat(run, runtime, launch="resume")
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    expected = f"--resume: {run.output} has no last.pt to continue from, so the run starts at step 0"
    assert [text for text in warnings if "--resume" in text] == [expected]


class Elsewhere(LocalRuntime):
    """A device from which every tensor is copied, as from any but the CPU."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__("cpu")
        self.rank = rank

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone()


def test_last_pt_holds_each_tensor_once(tmp_path, cache_dir, runtime) -> None:
    """Weights, two moments of them, and what is not trained: off the CPU as on it."""
    sizes = []
    for name, device in (("cpu", runtime), ("elsewhere", Elsewhere())):
        run = qat_run(cache_dir, tmp_path / name, loop={"max_steps": 1})
        state = run_qat(run, device).state
        sizes.append((run.output / "last.pt").stat().st_size)
        trained_bytes = sum(4 * p.numel() for p in state.trained.values())
        parts = load_checkpoint(run.output / "last.pt")
        assert parts["trained"] == list(state.trained)
    assert sizes[1] == pytest.approx(sizes[0], abs=4096)
    assert 3 * trained_bytes < sizes[1] < 3.5 * trained_bytes + 100_000


def test_a_rank_that_writes_nothing_builds_nothing() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    state = TrainState(torch.nn.Module(), {"p": p}, torch.optim.SGD([p]))
    content = [student_state(state, {"p": p}, Elsewhere(rank), is_evaluated=False)["tensors"] for rank in (0, 1)]
    assert [list(tensors) for tensors in content] == [["p"], []]


def test_what_is_evaluated_is_never_trained_on(tmp_path, cache_dir, monkeypatch) -> None:
    trained, evaluated = set(), set()

    class Watching(LocalRuntime):
        into = trained

        def wrap_loader(self, loader):
            for batch in super().wrap_loader(loader):
                real = batch["input_ids"][batch["length"] > 0]
                type(self).into |= {tuple(row) for row in real.tolist()}
                yield batch

    def watched(*args, **words):
        Watching.into = evaluated
        try:
            return cached_kl(*args, **words)
        finally:
            Watching.into = trained

    monkeypatch.setattr(run_module, "cached_kl", watched)
    run_qat(qat_run(cache_dir, tmp_path / "qat", loop={"max_steps": 8, "batch_size": 8}), Watching("cpu"))
    assert len(evaluated) >= 4 and len(trained) >= 20
    assert not trained & evaluated


def test_a_new_run_takes_nothing_of_an_earlier_one(tmp_path, runtime) -> None:
    names = ("best.pt", "last.pt", "anchor.pt", "loss.csv", "loss.png", "run.json", "summary.json", "memory.jsonl")
    for name in (*names, "step-000007.pt", "notes.txt"):
        (tmp_path / name).write_text("")
    remove_run(tmp_path, runtime)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_last_pt_is_exchanged_whole(links, tmp_path, runtime, monkeypatch) -> None:
    """One who reads it, or a machine that loses power, has the old file or the new one, never a part."""

    def no_link(*_) -> None:
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr(folder_module.os, "link", no_link)
    save_numbered({"step": 1}, tmp_path, 1, 2, runtime)
    with (tmp_path / "last.pt").open("rb") as reader:
        save_numbered({"step": 2}, tmp_path, 2, 2, runtime)
        assert torch.load(reader, weights_only=True) == {"step": 1}
    assert torch.load(tmp_path / "last.pt", weights_only=True) == {"step": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "step-000001.pt", "step-000002.pt"]


def test_a_full_disk_leaves_the_checkpoints_and_is_told_in_a_sentence(tmp_path, cache_dir, runtime) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = qat_run(cache_dir, tmp_path / "qat", loop={"max_steps": 6, "save_every": 2})

    def fill(state, info) -> None:
        if state.step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(
            DiskFull, match=r"step-000004.pt cannot be written .* Then run the command again with --resume"
        ):
            run_qat(run, runtime, hooks=[Acts(fill)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert load_checkpoint(run.output / "last.pt")["progress"]["step"] == 2
    assert not list(run.output.glob(".*"))
    assert run_qat(run, runtime, launch="resume").state.step == 6


@pytest.mark.parametrize("command", ["qat", "recover"])
@pytest.mark.parametrize(
    ("there", "advice"),
    [
        ((), "no checkpoint to continue from; run the command again\n"),
        (("step-000002.pt",), "no checkpoint to continue from; run the command again with --from-scratch\n"),
        (("last.pt",), "run the command again with --resume to continue from the last checkpoint\n"),
    ],
    ids=["nothing", "leftovers", "a checkpoint"],
)
def test_an_interruption_ends_with_130_and_advice_that_is_accepted(
    command, there, advice, tmp_path, monkeypatch, capsys
) -> None:
    from qat_lora.cli import commands

    def interrupted(*_, **__) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, command, interrupted)
    for name in there:
        (tmp_path / name).write_text("")
    assert main([command, "--output", str(tmp_path), "--checkpoint", "x.pt"]) == 130
    assert capsys.readouterr().err.endswith(f"interrupted: {advice}")


def test_what_cannot_be_started_is_refused_before_the_cache_is_opened(tmp_path, runtime) -> None:
    nowhere = tmp_path / "no cache"
    with pytest.raises(CheckpointError, match="does not exist"):
        run_recovery(recovery_run(nowhere, tmp_path / "rec", tmp_path / "missing.pt"), runtime)
    with pytest.raises(ConfigError, match="checkpoint is empty"):
        run_recovery(replace(recovery_run(nowhere, tmp_path / "rec", Path("x")), checkpoint=""), runtime)
