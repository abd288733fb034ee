"""Batches made ready by a thread: in order, so many ahead, failures passed on, and no thread left behind."""

from __future__ import annotations

import contextlib
import gc
import threading
import time

import pytest
import torch

from qat_lora.runtime import LocalRuntime
from qat_lora.runtime import prefetch as prefetch_module
from qat_lora.runtime.prefetch import prefetched


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "qat_lora-prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert not reading_threads()


def wait_until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class Counted:
    """Whole numbers for ever; how many were read, by which threads, and whether it was closed."""

    def __init__(self, fails_at: int = -1) -> None:
        self.read, self.threads, self.closed, self.fails_at = 0, set(), False, fails_at

    def __call__(self):
        try:
            while True:
                if self.read == self.fails_at:
                    raise OSError("the disk is gone")
                self.threads.add(threading.get_ident())
                self.read += 1
                yield self.read - 1
        finally:
            self.closed = True


def test_order_is_kept_and_everything_comes() -> None:
    assert list(prefetched(range(50), lambda x: x + 1)) == list(range(1, 51))
    assert list(prefetched([], lambda x: x)) == []


@pytest.mark.parametrize("ahead", [1, 3])
def test_so_many_are_ready_and_no_more_and_another_thread_reads_them(ahead) -> None:
    source = Counted()
    batches = prefetched(source(), lambda x: x, ahead=ahead)
    assert source.read == 0, "nothing begins before the first batch is asked for"
    for taken in range(1, 6):
        assert next(batches) == taken - 1
        wait_until(lambda: source.read == taken + ahead)  # noqa: B023
        time.sleep(0.02)
        assert source.read == taken + ahead
    assert threading.get_ident() not in source.threads
    batches.close()
    assert source.closed


def test_a_failure_comes_in_its_place_after_the_batches_before_it() -> None:
    batches = prefetched(Counted(fails_at=3)(), lambda x: x)
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert not reading_threads()


def test_a_failure_to_prepare_comes_too() -> None:
    def prepare(x):
        raise MemoryError("no pinned memory")

    source = Counted()
    with pytest.raises(MemoryError):
        next(prefetched(source(), prepare))
    assert source.closed


@pytest.mark.parametrize("how", ["close", "break", "let go", "raise"])
def test_the_thread_ends_when_the_consumer_stops(how) -> None:
    source = Counted()
    batches = prefetched(source(), lambda x: x)
    next(batches)
    assert len(reading_threads()) == 1
    if how == "close":
        batches.close()
    elif how == "break":
        for _ in batches:
            break
        del batches, _
        gc.collect()
    elif how == "let go":
        del batches
        gc.collect()
    else:
        with contextlib.suppress(ZeroDivisionError), contextlib.closing(batches):
            for _ in batches:
                1 / 0  # noqa: B018
    assert not reading_threads() and source.closed


def test_a_thread_that_hangs_keeps_nobody_waiting_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(prefetch_module, "ENDING_SECONDS", 0.05)
    network = threading.Event()

    def hanging():
        yield 0
        network.wait(20)
        yield 1

    batches = prefetched(hanging(), lambda x: x)
    assert next(batches) == 0
    batches.close()
    assert reading_threads()
    network.set()
    wait_until(lambda: not reading_threads())


def test_a_runtime_reads_ahead_and_hands_out_the_same_tensors() -> None:
    source = [{"x": torch.full((2,), float(i))} for i in range(9)]
    out = list(LocalRuntime("cpu").wrap_loader(iter(source)))
    assert all(batch["x"] is given["x"] for batch, given in zip(out, source, strict=True))
    counted = Counted()
    batches = LocalRuntime("cpu").wrap_loader({"x": torch.tensor(i)} for i in counted())
    assert next(batches)["x"] == 0
    wait_until(lambda: counted.read == 1 + prefetch_module.BATCHES_AHEAD)
    batches.close()
    assert not reading_threads() and counted.closed


def test_on_cuda_the_thread_pins_on_its_device_and_the_copy_does_not_block(monkeypatch) -> None:
    """No GPU here: what would be called, and by which thread."""
    runtime, calls = LocalRuntime("cpu"), []
    runtime.device = torch.device("cuda:3")

    class Fake:
        def pin_memory(self):
            calls.append(("pin", threading.current_thread().name))
            return self

        def is_pinned(self):
            return True

        def to(self, device, non_blocking=False):
            calls.append(("copy", threading.current_thread().name, str(device), non_blocking))
            return self

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", str(device))))
    assert len(list(runtime.wrap_loader([{"x": Fake()}]))) == 1
    main = threading.current_thread().name
    assert calls == [("device", "cuda:3"), ("pin", "qat_lora-prefetch"), ("copy", main, "cuda:3", True)]
