"""Progress of long work: a bar that moves on a terminal; elsewhere a line now and then, and one at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from qat_lora.train.loop import Hook, StepInfo, TrainState

# Of those that torchrun started; without it one is the first, whatever a job scheduler has set.
IS_FIRST_RANK = os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"
LINE_SECONDS = 30.0  # at most, between two lines in a log file
console = Console(stderr=True, quiet=not IS_FIRST_RANK)


@contextmanager
def bar(title: str, *, total: int, unit_per_second: str = "", units_each: int = 1) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how many are done; shows a rate where the unit has a name.

    Where the work ends, all of it is done, also what was done before; where it fails, nothing is left on the screen.
    """
    with _terminal(title, total) if console.is_terminal else _lines(title, total) as show:
        started, first = time.monotonic(), -1

        def update(done: int) -> None:
            nonlocal first
            first = done if first < 0 else first  # what was there before says nothing of the speed
            rate = (done - first) * units_each / max(1e-9, time.monotonic() - started)
            text = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
            show(done, total, f"{text} {unit_per_second}" if unit_per_second and rate else "")

        yield update
        update(total)


@contextmanager
def counted(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that is told how many shards are done, and of how many."""
    with _terminal(title, None) if console.is_terminal else _lines(title, None) as show:
        yield lambda done, total: show(done, total, "shards")


Show = Callable[[int, int, str], None]


@contextmanager
def _terminal(title: str, total: int | None) -> Iterator[Show]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(title, total=total, note="")
        try:
            yield lambda done, total, note: progress.update(task, completed=done, total=total, note=note)
        except BaseException:
            progress.live.transient = True  # a bar that will never end is no result
            raise


@contextmanager
def _lines(title: str, total: int | None) -> Iterator[Show]:
    started = told = time.monotonic()
    last = ""

    def show(done: int, total: int, note: str) -> None:
        nonlocal told, last
        now = time.monotonic()
        passed = f"{int(now - started) // 60}:{int(now - started) % 60:02d}"
        last = ", ".join(x for x in (f"{title} {done:,}/{total:,}", note, passed) if x)
        if now - told >= LINE_SECONDS and done < total:
            left = (now - started) / max(1, done) * (total - done)
            console.print(f"{last}, about {duration(left)} left", highlight=False, markup=False, soft_wrap=True)
            told = now

    yield show
    if last:
        console.print(last, highlight=False, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Words for a time: 40 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class BarHook(Hook):
    """Moves a bar once per optimizer step; reads no tensor."""

    every = 1

    def __init__(self, update: Callable[[int], None]) -> None:
        """Take the function that `bar` yields."""
        self._update = update

    def start(self, state: TrainState) -> None:
        """Show where a resumed run continues."""
        self._update(state.step)

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Move on."""
        self._update(info.step)
