"""What ranks say to each other beside their devices: barriers with names, and equal digests."""

from __future__ import annotations

import atexit
import datetime
import gc
import os
import time

import torch
import torch.distributed as dist

from qat_lora.errors import DeviceError, first_line


def join(backend: str, timeout_seconds: int, *, init_method: str | None = None, remedy: str) -> None:
    """Join the group that the environment describes, unless that is done; raises DeviceError with the remedy."""
    if dist.is_initialized():
        return
    try:
        dist.init_process_group(backend, init_method, datetime.timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as error:
        raise DeviceError(
            f"rank {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')} cannot join the others "
            f"({first_line(error)}); {remedy}."
        ) from None
    if backend == "gloo":  # NCCL's end waits for ranks that may be dead, and a process may end without it
        atexit.register(leave)


def leave() -> None:
    """Let go of the group; gloo's threads abort a process that ends while they run."""
    if dist.is_initialized():
        gc.collect()  # a sharded model holds the group, and lies in cycles
        dist.destroy_process_group()


class GlooControl:
    """A gloo group of all ranks on their hosts: only its monitored barriers say who is missing. All ranks make one."""

    def __init__(self, timeout_seconds: int) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        # Rank 0 knows who is missing, so the others wait a little longer.
        self._group = dist.new_group(backend="gloo", timeout=self._timeout + datetime.timedelta(seconds=5))

    def barrier(self, tag: str) -> None:
        """Wait for every rank; raises DeviceError, naming the tag and who is missing, after the timeout."""
        started = time.monotonic()
        try:
            dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise DeviceError(
                f"rank {dist.get_rank()} lost the others at barrier {tag!r} after {time.monotonic() - started:.0f} s "
                f"({first_line(error, 300)}); look at their messages first; a slow start may need a longer "
                "--barrier-timeout."
            ) from None

    def all_equal(self, digest: bytes) -> bool:
        """Whether the first eight bytes of every rank's digest are equal; a rank that is missing is told of first."""
        self.barrier("all_equal")
        own = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)])
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own, group=self._group)
        return all(torch.equal(other, own) for other in found)
