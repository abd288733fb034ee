"""Evaluating and saving every so often. A hook reads the state; none of them changes what is trained."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from qat_lora.errors import TrainingError
from qat_lora.runtime import Runtime
from qat_lora.train.losses import LossLog
from qat_lora.train.optim import swapped_in
from qat_lora.train.speed import SpeedHook
from qat_lora.train.state import StepInfo, TrainState

log = logging.getLogger(__name__)


class EvalHook:
    """Held-out KL before the first step, every so often, and at the end; keeps the best student."""

    def __init__(
        self,
        evaluate: Callable[[TrainState], float],
        losses: LossLog,
        save_best: Callable[[TrainState], None],
        speed: SpeedHook,
        runtime: Runtime,
        *,
        every: int,
        other_rows: bool = False,
    ) -> None:
        """`evaluate` returns the KL of the model as it is; `save_best` writes best.pt.

        `other_rows`: a resumed run evaluates other rows than before, whose KLs do not compare with the best so far.
        """
        self.every, self._other_rows = every, other_rows
        self._evaluate, self._losses, self._save_best = evaluate, losses, save_best
        self._speed, self._runtime = speed, runtime

    def start(self, state: TrainState) -> None:
        """Evaluate what the run starts from. A resumed run repeats its latest evaluation and records nothing.

        It is not left out, since a lazy device compiles the evaluation here, and not in the middle of the run.
        """
        if state.evaluated_step >= 0:
            with swapped_in(state.ema, state.trained, self._runtime):
                kl = self._evaluate(state)
            log.info("step %d held-out KL %.4f, resumed", state.step, kl)
            if self._other_rows:
                log.info("other held-out rows than before: best.pt stays until a KL is below %.4f", kl)
                state.best_kl = state.last_kl = kl
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
                "the run ends worse than it began: held-out KL %.4f after %d steps, %.4f before; best.pt holds step %d "
                "with %.4f. Start another run with a lower --lr, or train longer.",
                state.last_kl, state.step, state.first_kl, state.best_step, state.best_kl,
            )  # fmt: skip

    def _run(self, state: TrainState) -> None:
        with self._speed.apart():
            with swapped_in(state.ema, state.trained, self._runtime):
                state.last_kl, state.evaluated_step = self._evaluate(state), state.step
                if state.last_kl < state.best_kl:
                    state.best_kl, state.best_step = state.last_kl, state.step
                    self._save_best(state)
            self._losses.add(step=state.step, eval_kl=state.last_kl)
        log.info("step %d held-out KL %.4f", state.step, state.last_kl)


class CheckpointHook:
    """Writes numbered checkpoints and last.pt every so often and at the end."""

    def __init__(
        self,
        save: Callable[[TrainState], None],
        speed: SpeedHook,
        runtime: Runtime,
        *,
        every: int,
        remedy: str = "lower --lr",
    ) -> None:
        """`save` writes one checkpoint of the state; `remedy` is what to do about weights that are not finite."""
        self.every = every
        self._save, self._speed, self._runtime, self._remedy = save, speed, runtime, remedy
        self._saved = (-1, -1)

    def start(self, state: TrainState) -> None:
        """Look at the weights, but save nothing: a resumed run has its checkpoint, a fresh one has nothing to lose."""
        self._check_finite(state)
        self._saved = (state.step, state.evaluated_step)

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Save, unless the weights are not finite: the last good checkpoint must not be replaced by such."""
        self._check_finite(state)
        with self._speed.apart():
            self._save(state)
        self._saved = (state.step, state.evaluated_step)

    def end(self, state: TrainState) -> None:
        """Save the end, anew where it was evaluated after it was saved: last.pt knows its own evaluation."""
        if self._saved != (state.step, state.evaluated_step):
            self._check_finite(state)
            with self._speed.apart():
                self._save(state)

    def _check_finite(self, state: TrainState) -> None:
        # of all parts where ranks hold parts, so that all ranks find the same
        if not self._runtime.joint_norm([p.detach() for p in state.trained.values()]).isfinite().item():
            raise TrainingError(f"weights are not finite after step {state.step}; {self._remedy}.")
