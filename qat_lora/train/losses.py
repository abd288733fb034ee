"""Loss curves: loss.csv, and the hook that writes it."""

from __future__ import annotations

import csv
import datetime
import io
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

from qat_lora.errors import TrainingError
from qat_lora.files import write_atomically
from qat_lora.runtime import Runtime
from qat_lora.train.speed import SpeedHook
from qat_lora.train.state import StepInfo, TrainState

log = logging.getLogger(__name__)

COLUMNS = ("step", "loss", "grad_norm", "lr", "eval_kl", "tokens", "seconds")


@dataclass
class LossLog:
    """Rows of loss.csv, kept in memory and on disk; a resumed run adds to the rows of its own past."""

    path: Path
    rows: list[dict[str, float]] = field(default_factory=list)
    writes: bool = True  # one rank of several does

    def open_at(self, step: int) -> None:
        """Keep the rows of up to `step` steps done and forget the rest."""
        if step and self.path.exists():
            with self.path.open(newline="") as stream:
                self.rows = [
                    row for row in map(_parsed, csv.DictReader(stream)) if row is not None and row["step"] <= step
                ]
        if not self.writes:
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(_readable(row) for row in self.rows)
        write_atomically(self.path, lambda stream: stream.write(text.getvalue().encode()))

    def add(self, **values: float) -> None:
        """Append one row; columns without a value stay empty."""
        row = {name: float(values.get(name, math.nan)) for name in COLUMNS}
        self.rows.append(row)
        if self.writes:
            with self.path.open("a", newline="") as stream:
                csv.DictWriter(stream, COLUMNS).writerow(_readable(row))


class LogHook:
    """Reads the loss every so often, writes it down, and stops a run whose loss is no number."""

    def __init__(
        self,
        losses: LossLog,
        speed: SpeedHook,
        runtime: Runtime,
        *,
        every: int,
        total: int = 0,
        remedy: str = "lower --lr",
    ) -> None:
        """Log every `every` of `total` steps; `remedy` is what to do about a loss that is no number."""
        self.every, self._total = every, total
        self._losses, self._speed, self._runtime, self._remedy = losses, speed, runtime, remedy
        self._logged_step, self._logged_seconds = 0, 0.0

    def start(self, state: TrainState) -> None:
        """Open the log at the state's step."""
        self._losses.open_at(state.step)
        self._logged_step = state.step

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Write a row, once the values can be read without stalling the device."""
        self._runtime.log_later(lambda loss, norm: self._write(info, loss, norm), info.loss, info.grad_norm)

    def end(self, state: TrainState) -> None:
        """Write what was put off."""
        self._runtime.synchronize()

    def _write(self, info: StepInfo, loss: float, norm: float) -> None:
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss} at step {info.step} (lr {info.lr:.3g}); {self._remedy}.")
        elapsed = self._speed.elapsed()  # the device has come to this step, or there would be no loss
        seconds_per_step = (elapsed - self._logged_seconds) / (info.step - self._logged_step)
        self._logged_step, self._logged_seconds = info.step, elapsed
        tokens = info.tokens * self._runtime.world_size
        tokens_per_second = f"{tokens / max(1e-9, seconds_per_step):,.0f}"
        left = datetime.timedelta(seconds=round(seconds_per_step * max(0, self._total - info.step)))
        log.info(
            "step %d/%d loss %.4f |g| %.3g lr %.3g %.3f s, %s tokens/s, %s left",
            info.step, self._total, loss, norm, info.lr, seconds_per_step, tokens_per_second, left,
        )  # fmt: skip
        self._losses.add(step=info.step, loss=loss, grad_norm=norm, lr=info.lr, tokens=tokens, seconds=seconds_per_step)


def _parsed(row: dict[str, str]) -> dict[str, float] | None:
    """The numbers of a row; None for one that a kill has cut short."""
    try:
        return {name: float(row[name]) if row[name] else math.nan for name in COLUMNS}
    except (KeyError, TypeError, ValueError):
        return None


def _readable(row: dict[str, float]) -> dict[str, str]:
    return {name: "" if math.isnan(value) else f"{value:.9g}" for name, value in row.items()}
