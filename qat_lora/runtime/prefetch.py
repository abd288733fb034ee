"""Batches made ready by a thread while the device works.

Owns the thread: what it reads, how far ahead, and that it ends. Does not own what makes a batch ready for a device
(`local`). torch_xla has a loader of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

BATCHES_AHEAD = 4
ENDING_SECONDS = 10.0  # after which one that waits for a dead network is left behind


def prefetched(batches: Iterable[T], prepare: Callable[[T], T], *, ahead: int = BATCHES_AHEAD) -> Generator[T]:
    """Yield ``prepare(batch)`` for each batch, in order, with at most `ahead` of them ready and not yet taken.

    Both are called by one thread, which begins with the first `next` and has ended when this generator is closed,
    exhausted or let go. What they raise is raised here, in place of the batch. What was made ready and not taken is
    lost: where to go on is for the caller to count, by what it took.
    """
    reading = _Reading(batches, prepare, ahead)
    reading.thread.start()
    try:
        yield from reading.taken()
    finally:
        reading.stop()


class _Reading(Generic[T]):
    def __init__(self, batches: Iterable[T], prepare: Callable[[T], T], ahead: int) -> None:
        self._batches, self._prepare, self._ahead = batches, prepare, ahead
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._is_stopped = self._is_ended = False
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="qat_lora-prefetch", daemon=True)

    def taken(self) -> Generator[T]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._is_ended)
                if not self._ready:
                    break
                batch = self._ready.popleft()
                self._changed.notify_all()
            yield batch
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self.thread.join(ENDING_SECONDS)

    def _run(self) -> None:
        try:
            for batch in self._batches:
                if not self._put(self._prepare(batch)):
                    break
        except BaseException as error:
            self._error = error
        finally:
            if isinstance(self._batches, Generator):
                self._batches.close()  # in the thread that ran it
            with self._changed:
                self._is_ended = True
                self._changed.notify_all()

    def _put(self, batch: T) -> bool:
        """Wait for a place; whether more is wanted."""
        with self._changed:
            self._ready.append(batch)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._ready) < self._ahead or self._is_stopped)
            return not self._is_stopped
