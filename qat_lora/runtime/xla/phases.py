"""What a first run is told: which graph is being compiled, how long it took, and what to expect."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from qat_lora.runtime.base import Phase

log = logging.getLogger(__name__)


class PhaseLog:
    """Announces each phase the first time it is cut, and says afterwards what it took, compilation included."""

    def __init__(self, compiled: Callable[[], int], *, expectation: str) -> None:
        """`compiled` counts compilations so far; `expectation` is said once, before the first of a training step."""
        self._compiled = compiled
        self._expectation = expectation
        self._seen: set[str] = set()

    @contextlib.contextmanager
    def entry(self, phase: Phase) -> Iterator[bool]:
        """Yield whether this is the phase's first time, in which case the device should be waited for."""
        if phase in self._seen:
            yield False
            return
        if self._expectation and phase not in ("set-up", "evaluation", "cache", "anchor rows"):
            log.info(self._expectation)
            self._expectation = ""
        self._seen.add(phase)
        before, started = self._compiled(), time.perf_counter()
        log.info("compiling the %s graph ...", phase)
        yield True
        compiled, seconds = self._compiled() - before, time.perf_counter() - started
        log.info("%s: %.1f s, %d graph%s compiled", phase, seconds, compiled, "" if compiled == 1 else "s")
