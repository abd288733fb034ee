"""Hooks watch a run: they log, keep the best, say so when it ends worse, and stop it when it is lost."""

from __future__ import annotations

import csv
import logging
import math

import pytest
import torch
from torch import nn

from qat_lora.config import OptimConfig
from qat_lora.errors import TrainingError
from qat_lora.runtime import LocalRuntime
from qat_lora.train.folder import LossLog
from qat_lora.train.hooks import CheckpointHook, EvalHook, LogHook
from qat_lora.train.loop import StepInfo, TrainState
from qat_lora.train.optim import build_optimizer
from qat_lora.train.speed import SpeedHook

CPU = LocalRuntime("cpu")


@pytest.fixture
def state() -> TrainState:
    p = nn.Parameter(torch.ones(2))
    return TrainState(nn.Module(), {"p": p}, build_optimizer([p], [], OptimConfig()))


def info(step: int, loss: float = 1.0) -> StepInfo:
    return StepInfo(step, torch.tensor(loss), torch.tensor(0.5), 0.1, 100)


def read(path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_loss_csv_continues_behind_the_step_that_is_resumed(tmp_path, state) -> None:
    losses = LossLog(tmp_path / "loss.csv")
    hook = LogHook(losses, SpeedHook(CPU), CPU, every=1)
    hook.start(state)
    for step in (1, 2, 3):
        hook.after_step(state, info(step, loss=step / 8))
    state.step = 2
    again = LossLog(tmp_path / "loss.csv")
    LogHook(again, SpeedHook(CPU), CPU, every=1).start(state)
    again.add(step=3, eval_kl=0.5)
    rows = read(tmp_path / "loss.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["loss"] for row in rows] == ["0.125", "0.25", ""]
    assert rows[2]["eval_kl"] == "0.5"
    assert [row["step"] for row in again.rows] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_the_run(tmp_path, state, loss) -> None:
    hook = LogHook(LossLog(tmp_path / "loss.csv"), SpeedHook(CPU), CPU, every=1)
    hook.start(state)
    with pytest.raises(TrainingError, match=r"at step 7 .*lower --lr"):
        hook.after_step(state, info(7, loss))


def test_weights_that_are_no_numbers_are_never_saved(state) -> None:
    saved: list[int] = []
    hook = CheckpointHook(lambda s: saved.append(s.step), SpeedHook(CPU), CPU, every=1)
    hook.start(state)
    state.step = 1
    hook.after_step(state, info(1))
    state.step = 2
    state.trained["p"].data[0] = math.nan
    with pytest.raises(TrainingError, match="after step 2"):
        hook.after_step(state, info(2))
    assert saved == [1]


def test_the_end_is_saved_once(state) -> None:
    saved: list[int] = []
    hook = CheckpointHook(lambda s: saved.append(s.step), SpeedHook(CPU), CPU, every=2)
    hook.start(state)
    state.step = 2
    hook.after_step(state, info(2))
    hook.end(state)
    state.step = 3
    hook.end(state)
    assert saved == [2, 3]


def evaluated(tmp_path, state, values: list[float]) -> tuple[EvalHook, list[int]]:
    best: list[int] = []
    losses = LossLog(tmp_path / "loss.csv")
    losses.open_at(0)
    series = iter(values)
    hook = EvalHook(lambda s: next(series), losses, lambda s: best.append(s.step), SpeedHook(CPU), CPU, every=1)
    hook.start(state)
    for step in range(1, len(values)):
        state.step = step
        hook.after_step(state, info(step))
    hook.end(state)
    return hook, best


def test_the_best_student_is_kept_from_before_the_first_step_on(tmp_path, state) -> None:
    _, best = evaluated(tmp_path, state, [0.5, 0.75, 0.25, 0.375])
    assert best == [0, 2]
    assert (state.first_kl, state.best_kl, state.best_step, state.last_kl) == (0.5, 0.25, 2, 0.375)


def test_best_pt_is_replaced_by_what_is_lower_however_little_and_by_nothing_else(tmp_path, state) -> None:
    hair = 0.5 - 2**-40
    _, best = evaluated(tmp_path, state, [0.5, 0.5, hair, hair, 0.5])
    assert best == [0, 2]


def test_an_end_that_is_worse_than_the_start_is_said(tmp_path, state, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        evaluated(tmp_path, state, [0.5, 0.25, 0.75])
    assert "ends worse than it began" in caplog.text
    assert "0.7500" in caplog.text and "0.5000" in caplog.text and "step 1" in caplog.text


@pytest.mark.parametrize("values", [[0.5, 0.4], [0.5, 0.5]])
def test_an_end_that_is_no_worse_is_not_complained_of(tmp_path, state, caplog, values) -> None:
    with caplog.at_level(logging.WARNING):
        evaluated(tmp_path, state, values)
    assert not caplog.records


def test_an_evaluation_that_is_no_number_is_complained_of(tmp_path, state, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        evaluated(tmp_path, state, [0.5, math.nan])
    assert "ends worse" in caplog.text


def test_the_evaluation_sees_the_moving_average(tmp_path, state) -> None:
    state.ema = {"p": torch.full((2,), 0.5)}
    losses = LossLog(tmp_path / "loss.csv")
    losses.open_at(0)
    seen: list[float] = []
    look = lambda s: seen.append(state.trained["p"][0].item()) or 0.1  # noqa: E731
    EvalHook(look, losses, lambda s: None, SpeedHook(CPU), CPU, every=1).start(state)
    assert seen == [0.5]
    assert state.trained["p"][0].item() == 1.0


def test_a_resumed_run_evaluates_before_its_first_step_and_records_nothing(tmp_path, state) -> None:
    """So that a lazy device compiles the evaluation there, and not in the middle of the run."""
    state.step, state.evaluated_step, state.last_kl = 4, 4, 0.25
    losses, calls = LossLog(tmp_path / "loss.csv"), []
    losses.open_at(4)
    hook = EvalHook(lambda s: calls.append(1) or 0.75, losses, lambda s: None, SpeedHook(CPU), CPU, every=1)
    hook.start(state)
    assert calls == [1]
    assert (state.last_kl, state.evaluated_step, read(tmp_path / "loss.csv")) == (0.25, 4, [])


def test_other_held_out_rows_begin_a_comparison_of_their_own(tmp_path, state) -> None:
    """KLs of other rows do not compare: what is best so far stays until it is beaten on the rows of now."""
    state.step, state.evaluated_step, state.best_step, state.best_kl = 4, 4, 2, 0.5
    series, best = iter([0.9, 0.8, 0.85]), []
    hook = EvalHook(
        lambda s: next(series), LossLog(tmp_path / "loss.csv"), lambda s: best.append(s.step), SpeedHook(CPU), CPU,
        every=1, other_rows=True,
    )  # fmt: skip
    hook.start(state)
    assert (state.best_kl, state.best_step, best) == (0.9, 2, [])
    for step in (5, 6):
        state.step = step
        hook.after_step(state, info(step))
    assert (state.best_kl, state.best_step, best) == (0.8, 5, [5])
