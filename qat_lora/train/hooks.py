"""Logging, evaluating and saving every so often. A hook reads the state; none of them changes what is trained."""

from __future__ import annotations

import datetime
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from qat_lora.errors import TrainingError
from qat_lora.runtime import Runtime
from qat_lora.train.folder import LossLog
from qat_lora.train.loop import Hook, StepInfo, TrainState
from qat_lora.train.optim import swapped_in
from qat_lora.train.speed import SpeedHook

log = logging.getLogger(__name__)


@dataclass
class LogHook(Hook):
    """Reads the loss every `every` of `total` steps, writes it down, and stops a run whose loss is no number.

    `remedy` is what to do about such a loss.
    """

    losses: LossLog
    speed: SpeedHook
    runtime: Runtime
    every: int
    total: int = 0
    remedy: str = "lower --lr"
    _logged: tuple[int, float] = (0, 0.0)  # the step of the last row, and the seconds at it

    def start(self, state: TrainState) -> None:
        """Open the log at the state's step."""
        self.losses.open_at(state.step)
        self._logged = (state.step, 0.0)

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Write a row, once the values can be read without stalling the device."""
        self.runtime.log_later(lambda loss, norm: self._write(info, loss, norm), info.loss, info.grad_norm)

    def end(self, state: TrainState) -> None:
        """Write what was put off."""
        self.runtime.synchronize()

    def _write(self, info: StepInfo, loss: float, norm: float) -> None:
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss} at step {info.step} (lr {info.lr:.3g}); {self.remedy}.")
        step, seconds = self._logged
        self._logged = (info.step, self.speed.elapsed())  # the device has come to this step, or there would be no loss
        seconds_per_step = (self._logged[1] - seconds) / (info.step - step)
        tokens = info.tokens * self.runtime.world_size
        left = datetime.timedelta(seconds=round(seconds_per_step * max(0, self.total - info.step)))
        log.info(
            "step %d/%d loss %.4f |g| %.3g lr %.3g %.3f s, %s tokens/s, %s left", info.step, self.total, loss, norm,
            info.lr, seconds_per_step, f"{tokens / max(1e-9, seconds_per_step):,.0f}", left,
        )  # fmt: skip
        self.losses.add(step=info.step, loss=loss, grad_norm=norm, lr=info.lr, tokens=tokens, seconds=seconds_per_step)


@dataclass
class EvalHook(Hook):
    """Held-out KL before the first step, every so often, and at the end; keeps the best student.

    Attributes:
        evaluate: returns the KL of the model as it is.
        save_best: writes best.pt.
        other_rows: a resumed run evaluates other rows than before, whose KLs do not compare with the best so far.
    """

    evaluate: Callable[[TrainState], float]
    losses: LossLog
    save_best: Callable[[TrainState], None]
    speed: SpeedHook
    runtime: Runtime
    every: int
    other_rows: bool = False

    def start(self, state: TrainState) -> None:
        """Evaluate what the run starts from. A resumed run repeats its latest evaluation and records nothing.

        It repeats it because a lazy device then compiles the evaluation here, and not in the middle of the run.
        """
        if state.evaluated_step < 0:
            self._run(state)
            state.first_kl = state.last_kl
            if not math.isfinite(state.first_kl):
                raise TrainingError(
                    f"the held-out KL is {state.first_kl} before the first step; check the model and the cache."
                )
            return
        with swapped_in(state.ema, state.trained, self.runtime):
            kl = self.evaluate(state)
        log.info("step %d held-out KL %.4f, resumed", state.step, kl)
        if self.other_rows:
            log.info("other held-out rows than before: best.pt stays until a KL is below %.4f", kl)
            state.best_kl = state.last_kl = kl

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Evaluate."""
        self._run(state)

    def end(self, state: TrainState) -> None:
        """Evaluate the end, and say so where it is worse than the start."""
        if state.evaluated_step != state.step:
            self._run(state)
        if not state.last_kl <= state.first_kl:
            log.warning(
                "the run ends worse than it began: held-out KL %.4f after %d steps, %.4f before; best.pt holds step %d "
                "with %.4f. Start another run with a lower --lr, or train longer.",
                state.last_kl, state.step, state.first_kl, state.best_step, state.best_kl,
            )  # fmt: skip

    def _run(self, state: TrainState) -> None:
        with self.speed.apart():
            with swapped_in(state.ema, state.trained, self.runtime):
                state.last_kl, state.evaluated_step = self.evaluate(state), state.step
                if state.last_kl < state.best_kl:
                    state.best_kl, state.best_step = state.last_kl, state.step
                    self.save_best(state)
            self.losses.add(step=state.step, eval_kl=state.last_kl)
        log.info("step %d held-out KL %.4f", state.step, state.last_kl)


@dataclass
class CheckpointHook(Hook):
    """Writes numbered checkpoints and last.pt every so often and at the end, by `save`.

    `remedy` is what to do about weights that are not finite.
    """

    save: Callable[[TrainState], None]
    speed: SpeedHook
    runtime: Runtime
    every: int
    remedy: str = "lower --lr"
    _saved: tuple[int, int] = (-1, -1)  # steps done and evaluated at the last one

    def start(self, state: TrainState) -> None:
        """Save nothing: a resumed run has its checkpoint, a fresh one has nothing to lose."""
        self._check_finite(state)
        self._saved = (state.step, state.evaluated_step)

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Save, unless the weights are not finite: the last good checkpoint must not be replaced by such."""
        self._check_finite(state)
        with self.speed.apart():
            self.save(state)
        self._saved = (state.step, state.evaluated_step)

    def end(self, state: TrainState) -> None:
        """Save the end, anew where it was evaluated after it was saved: last.pt knows its own evaluation."""
        if self._saved != (state.step, state.evaluated_step):
            self._check_finite(state)
            with self.speed.apart():
                self.save(state)

    def _check_finite(self, state: TrainState) -> None:
        # of all parts where ranks hold parts, so that all ranks find the same
        if not self.runtime.joint_norm([p.detach() for p in state.trained.values()]).isfinite().item():
            raise TrainingError(f"weights are not finite after step {state.step}; {self.remedy}.")
