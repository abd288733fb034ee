"""How fast a run is: seconds on the clock between two moments at which the device had nothing left to do."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from qat_lora.runtime import Runtime
from qat_lora.train.loop import Hook, StepInfo, TrainState

log = logging.getLogger(__name__)


class SpeedHook(Hook):
    """Times steps, the first step of a launch apart, which compiles or fills caches; evaluation and saving left out.

    A call returns before an asynchronous device has done its work, so the clock is read after `synchronize()`. That
    stalls such a device, hence it happens only after the first two steps and where it stands still anyway.
    """

    every = 1

    def __init__(self, runtime: Runtime) -> None:
        """Start from nothing."""
        self._runtime = runtime
        self._steps = self._tokens_per_step = 0
        self._seconds = self._first_seconds = 0.0
        self._since = time.perf_counter()

    def start(self, state: TrainState) -> None:
        """Start the clock."""
        self._lap()
        self._seconds = 0.0

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Count the step; after the second say what a step takes from now on."""
        self._steps += 1
        self._tokens_per_step = info.tokens * self._runtime.world_size
        if self._steps > 2:
            return
        self._lap()
        if self._steps == 1:
            self._first_seconds = self._seconds
        else:
            seconds = self._seconds - self._first_seconds
            log.info("a step takes %.3f s, %s tokens/s", seconds, f"{self._tokens_per_step / max(1e-9, seconds):,.0f}")

    def end(self, state: TrainState) -> None:
        """Stop the clock."""
        self._lap()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """A block that is no part of a step, and whose seconds do not count."""
        self._lap()
        yield
        self._runtime.synchronize()
        self._since = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds in steps so far, for one who has just read from the device."""
        return self._seconds + time.perf_counter() - self._since

    def summary(self, state: TrainState) -> dict[str, float | int]:
        """What summary.json holds: steps and tokens of the whole run over all ranks, the speed of this launch."""
        later = self._steps - 1
        seconds = (self._seconds - self._first_seconds) / later if later > 0 else self._seconds
        return {
            "steps": state.step,
            "tokens": self._tokens_per_step * state.step,
            "launch_steps": self._steps,
            "first_step_seconds": self._first_seconds,
            "seconds_per_step": seconds,
            "tokens_per_second": self._tokens_per_step / max(1e-9, seconds),
            "peak_bytes": self._runtime.memory().peak_bytes,
            "first_kl": state.first_kl,
            "best_kl": state.best_kl,
            "best_step": state.best_step,
            "last_kl": state.last_kl,
        }

    def _lap(self) -> None:
        """Add what has passed until the device is done."""
        self._runtime.synchronize()
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + now - self._since, now
