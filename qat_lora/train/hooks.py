"""What happens every so often: log, evaluate, save. A hook reads the state; none of them changes what is trained."""

from __future__ import annotations

import csv
import io
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from qat_lora.errors import TrainingError
from qat_lora.files import write_atomically
from qat_lora.runtime import Runtime
from qat_lora.train.optim import swapped_in
from qat_lora.train.state import StepInfo, TrainState

log = logging.getLogger(__name__)

COLUMNS = ("step", "loss", "grad_norm", "lr", "eval_kl", "tokens", "seconds")


@dataclass
class LossLog:
    """Rows of loss.csv, kept in memory and on disk; a resumed run goes on behind the rows of its own past."""

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

    def __init__(self, losses: LossLog, runtime: Runtime, *, every: int) -> None:
        """Log every `every` steps."""
        self.every = every
        self._losses = losses
        self._runtime = runtime

    def start(self, state: TrainState) -> None:
        """Open the log at the state's step."""
        self._losses.open_at(state.step)

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Write a row, once the values can be read without stalling the device."""
        self._runtime.log_later(lambda loss, norm: self._write(info, loss, norm), info.loss, info.grad_norm)

    def end(self, state: TrainState) -> None:
        """Write what was put off."""
        self._runtime.synchronize()

    def _write(self, info: StepInfo, loss: float, norm: float) -> None:
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} at step {info.step} (lr {info.lr:.3g}); lower --lr or --clip-norm."
            )
        log.info("step %d loss %.4f |g| %.3g lr %.3g %.3f s", info.step, loss, norm, info.lr, info.seconds)
        self._losses.add(
            step=info.step,
            loss=loss,
            grad_norm=norm,
            lr=info.lr,
            tokens=info.tokens * self._runtime.world_size,
            seconds=info.seconds,
        )


class EvalHook:
    """Held-out KL before the first step, every so often, and at the end; keeps the best student."""

    def __init__(
        self,
        evaluate: Callable[[], float],
        losses: LossLog,
        save_best: Callable[[TrainState], None],
        runtime: Runtime,
        *,
        every: int,
    ) -> None:
        """`evaluate` returns the KL of the model as it is; `save_best` writes best.pt."""
        self.every = every
        self._evaluate = evaluate
        self._runtime = runtime
        self._losses = losses
        self._save_best = save_best

    def start(self, state: TrainState) -> None:
        """Evaluate what the run starts from. A resumed run has done so, and only looks whether it is what it was.

        It must not be left out: a lazy device compiles the evaluation here, and not in the middle of the run.
        """
        if state.evaluated_step >= 0:
            with swapped_in(state.ema, state.trained, self._runtime):
                log.info("step %d held-out KL %.4f, resumed", state.step, self._evaluate())
        else:
            self._run(state)
            state.first_kl = state.last_kl
            if not math.isfinite(state.first_kl):
                raise TrainingError(
                    f"the held-out KL is {state.first_kl} before the first step; check the model and the cache."
                )

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Evaluate."""
        self._run(state)

    def end(self, state: TrainState) -> None:
        """Evaluate the end, and say so where it is worse than the start."""
        if state.evaluated_step != state.step:
            self._run(state)
        if not state.last_kl <= state.first_kl:
            log.warning(
                "the run ends worse than it began: held-out KL %.4f after %d steps, %.4f before; "
                "best.pt holds step %d with %.4f. Lower --lr, or train longer.",
                state.last_kl, state.step, state.first_kl, state.best_step, state.best_kl,
            )  # fmt: skip

    def _run(self, state: TrainState) -> None:
        with swapped_in(state.ema, state.trained, self._runtime):
            state.last_kl, state.evaluated_step = self._evaluate(), state.step
            if state.last_kl < state.best_kl:
                state.best_kl, state.best_step = state.last_kl, state.step
                self._save_best(state)
        self._losses.add(step=state.step, eval_kl=state.last_kl)
        log.info("step %d held-out KL %.4f", state.step, state.last_kl)


class CheckpointHook:
    """Writes numbered checkpoints and last.pt every so often and at the end."""

    def __init__(self, save: Callable[[TrainState], None], runtime: Runtime, *, every: int) -> None:
        """`save` writes one checkpoint of the state."""
        self.every = every
        self._save, self._runtime = save, runtime
        self._saved = (-1, -1)

    def start(self, state: TrainState) -> None:
        """Look at the weights, but save nothing: a resumed run has its checkpoint, a fresh one has nothing to lose."""
        _check_finite(state, self._runtime)
        self._saved = (state.step, state.evaluated_step)

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Save."""
        self._save_finite(state)

    def end(self, state: TrainState) -> None:
        """Save the end, anew where it was evaluated after it was saved: last.pt knows its own evaluation."""
        if self._saved != (state.step, state.evaluated_step):
            self._save_finite(state)

    def _save_finite(self, state: TrainState) -> None:
        """Save, unless the weights are no numbers any more: the last good checkpoint must not be pushed out by such."""
        _check_finite(state, self._runtime)
        self._save(state)
        self._saved = (state.step, state.evaluated_step)


class SpeedHook:
    """Counts tokens and the host's seconds in steps, evaluation and saving left out, and the first step apart.

    The first step of a launch is not like the others: it compiles, or fills caches.
    """

    every = 1

    def __init__(self, runtime: Runtime) -> None:
        """Start from nothing."""
        self._runtime = runtime
        self._steps = self._tokens = 0
        self._seconds = self._first_seconds = 0.0

    def start(self, state: TrainState) -> None:
        """Nothing."""

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Add the step; after the second say what a step takes from now on."""
        self._steps += 1
        self._tokens += info.tokens
        self._seconds += info.seconds
        if self._steps == 1:
            self._first_seconds = info.seconds
            self._runtime.synchronize()
        if self._steps == 2:
            self._wait()
            seconds = self._seconds - self._first_seconds
            tokens = info.tokens * self._runtime.world_size
            log.info("a step takes %.3f s, %s tokens/s", seconds, f"{tokens / seconds:,.0f}")

    def end(self, state: TrainState) -> None:
        """Add what the device still has to do."""
        self._wait()

    def _wait(self) -> None:
        started = time.perf_counter()
        self._runtime.synchronize()
        self._seconds += time.perf_counter() - started

    def summary(self, state: TrainState) -> dict[str, float | int]:
        """What summary.json holds: steps and tokens of the whole run over all ranks, the speed of this launch."""
        tokens_per_step = self._tokens * self._runtime.world_size // max(1, self._steps)
        later = self._steps - 1
        seconds = (self._seconds - self._first_seconds) / later if later > 0 else self._seconds
        return {
            "steps": state.step,
            "tokens": tokens_per_step * state.step,
            "launch_steps": self._steps,
            "first_step_seconds": self._first_seconds,
            "seconds_per_step": seconds,
            "tokens_per_second": tokens_per_step / max(1e-9, seconds),
            "peak_bytes": self._runtime.memory().peak_bytes,
            "first_kl": state.first_kl,
            "best_kl": state.best_kl,
            "best_step": state.best_step,
            "last_kl": state.last_kl,
        }


def _check_finite(state: TrainState, runtime: Runtime) -> None:
    # of all parts where ranks hold parts, so that all ranks find the same
    if not runtime.joint_norm([p.detach() for p in state.trained.values()]).isfinite().item():
        raise TrainingError(f"weights are no numbers after step {state.step}; lower --lr or --clip-norm.")


def _parsed(row: dict[str, str]) -> dict[str, float] | None:
    """The numbers of a row; None for one that a kill has cut short."""
    try:
        return {name: float(row[name]) if row[name] else math.nan for name in COLUMNS}
    except (KeyError, TypeError, ValueError):
        return None


def _readable(row: dict[str, float]) -> dict[str, str]:
    return {name: "" if math.isnan(value) else f"{value:.9g}" for name, value in row.items()}
