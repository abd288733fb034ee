"""What ranks say to each other beside their devices: barriers with names, equal digests, and who goes first."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist

from qat_lora.errors import DeviceError


class Control(Protocol):
    """A group of ranks that talk to each other on their hosts, whatever device they compute on."""

    def barrier(self, tag: str) -> None:
        """Wait for every rank; raises DeviceError, naming the tag and who is missing, after a while."""

    def all_equal(self, digest: bytes) -> bool:
        """Whether the first eight bytes of every rank's digest are equal."""


class GlooControl:
    """`Control` over gloo, whose monitored barriers alone say who is missing. A process group must be there."""

    def __init__(self, timeout_seconds: int) -> None:
        """Make a gloo group of all ranks; each of them must call."""
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        # Rank 0 knows who is missing, so the others wait a little longer.
        self._group = dist.new_group(backend="gloo", timeout=self._timeout + datetime.timedelta(seconds=5))

    def barrier(self, tag: str) -> None:
        """Wait for every rank; raises DeviceError, naming the tag and who is missing, after the timeout."""
        started = time.monotonic()
        try:
            dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            reason = (str(error).splitlines() or [""])[0][:300]
            raise DeviceError(
                f"rank {dist.get_rank()} lost the others at barrier {tag!r} after {time.monotonic() - started:.0f} s "
                f"({reason}); look at their messages first; a slow start may need a longer --barrier-timeout."
            ) from None

    def all_equal(self, digest: bytes) -> bool:
        """Whether the first eight bytes of every rank's digest are equal; a rank that is missing is told of first."""
        self.barrier("all_equal")
        own = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)])
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own, group=self._group)
        return all(torch.equal(other, own) for other in found)


class RankedProcess:
    """The part of `Runtime` that one of several ranks shares whatever its device."""

    rank: int
    control: Control

    def barrier(self, tag: str) -> None:
        """Wait for every rank; raises DeviceError, naming the tag and who is missing, after the timeout."""
        self.control.barrier(tag)

    def all_equal(self, digest: Callable[[], bytes]) -> bool:
        """Whether the first eight bytes of every rank's digest are equal."""
        return self.control.all_equal(digest())

    @contextlib.contextmanager
    def rank_zero_first(self, tag: str) -> Iterator[None]:
        """Let rank 0 do the block first, and the others after it."""
        if self.rank:
            self.barrier(tag)
        yield
        if not self.rank:
            self.barrier(tag)
