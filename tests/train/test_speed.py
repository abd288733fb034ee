"""Speed is that of the clock on the wall, also where calls return before the device has done its work."""

from __future__ import annotations

import csv
import logging

import pytest
import torch
from torch import nn

from qat_lora.runtime import LocalRuntime
from qat_lora.train import speed as speed_module
from qat_lora.train.folder import LossLog
from qat_lora.train.hooks import CheckpointHook, EvalHook, LogHook
from qat_lora.train.loop import StepInfo, TrainState
from qat_lora.train.speed import SpeedHook


class Asynchronous(LocalRuntime):
    """A device whose work is done later than the call returns, and the clock that both go by."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.now = self.done_at = 100.0

    def launch(self, host_seconds: float, device_seconds: float) -> None:
        self.now += host_seconds
        self.done_at = max(self.done_at, self.now) + device_seconds

    def synchronize(self) -> None:
        self.now = max(self.now, self.done_at)

    def log_later(self, fn, *tensors) -> None:
        self.synchronize()  # as reading a value does
        fn(*(t.item() for t in tensors))


@pytest.fixture
def device(monkeypatch) -> Asynchronous:
    device = Asynchronous()
    monkeypatch.setattr(speed_module.time, "perf_counter", lambda: device.now)
    return device


def run(device: Asynchronous, folder, *, steps: int, every: int, log_every: int = 1) -> tuple[SpeedHook, TrainState]:
    """Steps of 0.5 s on the device, the first of 30 s, launched in 0.01 s; evaluations of 5 s and saves of 7 s."""
    p = nn.Parameter(torch.ones(2))
    state = TrainState(nn.Module(), {"p": p}, torch.optim.SGD([p]))
    losses = LossLog(folder / "loss.csv")

    def evaluate(state: TrainState) -> float:
        device.launch(0.01, 5.0)
        device.synchronize()
        return 0.5

    speed = SpeedHook(device)
    hooks = [
        LogHook(losses, speed, device, every=log_every),
        EvalHook(evaluate, losses, lambda s: device.launch(0.01, 3.0), speed, device, every=every),
        CheckpointHook(lambda s: device.launch(7.0, 0.0), speed, device, every=every),
        speed,
    ]
    for hook in hooks:
        hook.start(state)
    for _ in range(steps):
        device.launch(0.01, 0.5 if state.step else 30.0)
        state.step += 1
        info = StepInfo(state.step, torch.tensor(1.0), torch.tensor(0.5), 0.1, 100)
        for hook in hooks:
            if hook.every and state.step % hook.every == 0:
                hook.after_step(state, info)
    for hook in hooks:
        hook.end(state)
    return speed, state


@pytest.mark.parametrize("every", [0, 1, 3], ids=["uninterrupted", "evaluated at every step", "at every third"])
def test_an_asynchronous_device_is_timed_by_when_it_is_done(device, tmp_path, every, caplog) -> None:
    with caplog.at_level(logging.INFO):
        speed, state = run(device, tmp_path, steps=8, every=every)
    summary = speed.summary(state)
    assert (summary["steps"], summary["tokens"], summary["launch_steps"]) == (8, 800, 8)
    assert summary["first_step_seconds"] == pytest.approx(30.01)
    assert summary["seconds_per_step"] == pytest.approx(0.5, rel=0.03), "0.01 s of launching where the device waits"
    assert summary["tokens_per_second"] == pytest.approx(200, rel=0.03)
    assert summary["peak_bytes"] > 0
    assert "a step takes 0.5" in caplog.text


def test_loss_csv_has_the_mean_seconds_of_the_steps_since_the_row_before(device, tmp_path) -> None:
    run(device, tmp_path, steps=9, every=2, log_every=3)
    with (tmp_path / "loss.csv").open(newline="") as stream:
        seconds = [float(row["seconds"]) for row in csv.DictReader(stream) if row["loss"]]
    assert seconds[0] > 30 / 3 and seconds[1:] == pytest.approx([0.5, 0.5], rel=0.05)
