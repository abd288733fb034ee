"""Progress bars for long work; on a terminal they move, in a log file only their end is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from qat_lora.train.loop import Hook
from qat_lora.train.state import StepInfo, TrainState

# Of those that torchrun started; alone one is the first, whatever a job scheduler has set.
IS_FIRST_RANK = os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"
console = Console(stderr=True, quiet=not IS_FIRST_RANK)


@contextmanager
def bar(title: str, *, total: int, unit_per_second: str = "", units_each: int = 1) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how many are done; shows a rate where the unit has a name."""
    rate = TextColumn(f"{{task.fields[rate]}} {unit_per_second}" if unit_per_second else "")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), rate)
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(title, total=total, rate="")

        def update(done: int) -> None:
            speed = progress.tasks[0].finished_speed or progress.tasks[0].speed
            shown = f"{speed * units_each:,.0f}" if speed else ""
            progress.update(task, completed=done, rate=shown)

        yield update


@contextmanager
def counted(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that is told how many shards are done, and of how many."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("shards"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class BarHook(Hook):
    """Moves a bar once per optimizer step; reads no tensor."""

    every = 1

    def __init__(self, update: Callable[[int], None]) -> None:
        """Take the function that `bar` yields."""
        self._update = update

    def start(self, state: TrainState) -> None:
        """Show where a resumed run goes on."""
        self._update(state.step)

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        """Move on."""
        self._update(info.step)

    def end(self, state: TrainState) -> None:
        """Nothing."""
