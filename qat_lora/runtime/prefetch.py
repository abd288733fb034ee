"""Batches made ready by a thread while the device works.

Owns the thread: what it reads, how far ahead, and that it ends. What makes a batch ready for a device is a runtime's.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")

BATCHES_AHEAD = 4
ENDING_SECONDS = 10.0  # after which one that waits for a dead network is left behind


def prefetched(batches: Iterable[T], prepare: Callable[[T], T], *, ahead: int = BATCHES_AHEAD) -> Generator[T]:
    """Yield ``prepare(batch)`` for each batch, in order, with at most `ahead` of them ready and not yet taken.

    Both are called by one thread, which begins with the first `next` and has ended when this generator is closed,
    exhausted or let go. What they raise is raised here, in place of the batch. What was made ready and not taken is
    lost: where to continue is for the caller to count, by what it took.
    """
    ready: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
    places, is_stopped = threading.Semaphore(ahead - 1), threading.Event()

    def read() -> None:
        ending = None
        try:
            # a generator is closed in the thread that ran it
            with contextlib.closing(batches) if isinstance(batches, Generator) else contextlib.nullcontext():
                for batch in batches:
                    ready.put((prepare(batch),))
                    places.acquire()
                    if is_stopped.is_set():
                        break
        except BaseException as error:
            ending = error
        ready.put(ending)

    thread = threading.Thread(target=read, name="qat_lora-prefetch", daemon=True)
    thread.start()
    try:
        while isinstance(item := ready.get(), tuple):
            places.release()
            yield item[0]
        if item is not None:
            raise item
    finally:
        is_stopped.set()
        places.release()
        thread.join(ENDING_SECONDS)
