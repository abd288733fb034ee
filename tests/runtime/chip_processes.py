"""Processes as `launch` starts them for chips, two of them, on a machine without: python -m ... FOLDER, HOW=...

Each has a PJRT CPU device of its own; what torch_xla would say of their places is made up here, wherever this module is
imported, which the processes do before anything else. So how they start, meet and end is real, and what they compute is
not tried. Each writes its process id to FOLDER/pid-RANK.

Without a FOLDER it imports everything once and then forks: for each line HOW FOLDER that it reads, a process that
launches ranks as forks. It prints the process's id, and its exit code when it has ended; its errors are FOLDER/errors.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch_xla.runtime as xr
from torch_xla._internal import pjrt

from qat_lora.errors import DeviceError
from qat_lora.runtime.xla import chips as xla_chips

initialize = pjrt.initialize_multiprocess


def initialize_and_place(process: int, count: int) -> None:
    how = os.environ["HOW"]
    if process == 1 and how == "no chip":
        raise RuntimeError("the chip is held by another process")
    initialize(process, count)
    xr.world_size = xr.process_count = lambda: 1 if how == "unplaced" else count
    xr.global_ordinal = xr.process_index = lambda: process


pjrt.initialize_multiprocess = initialize_and_place


def rank_program(argv: list[str]) -> int:
    how, folder, rank = os.environ["HOW"], Path(argv[0]), xr.global_ordinal()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if how == "done":
        (folder / f"places-{rank}").write_text(f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
        return 0
    while not (folder / "pid-0").exists():  # a rank that fails ends the job, the slower ones with it
        time.sleep(0.1)
    if how == "meets":
        (folder / f"found-{rank}.json").write_text(json.dumps(met(rank)))
        return 0
    if rank == 1 and how == "raises":
        raise ValueError("only rank 1 knows what is wrong")
    if rank == 1 and how == "refuses":
        print("qat-lora: error (rank 1): what a user must mend", file=sys.stderr)
        return 2
    time.sleep(600)
    return 0


def met(rank: int) -> list:
    """What the real control of the real runtime says."""
    runtime = xla_chips.ChipsRuntime(dtype="fp32", barrier_timeout=4)
    runtime.barrier("together")
    found = [
        runtime.rank,
        runtime.world_size,
        runtime.all_equal(lambda: b"same"),
        runtime.all_equal(lambda: bytes([rank])),
    ]
    with runtime.rank_zero_first("in turn"):
        found.append(time.time())
        time.sleep(0.2)
    if rank == 1:
        time.sleep(12)
        return found
    try:
        runtime.barrier("late")
    except DeviceError as error:
        found.append(str(error))
    return found


def job(folder: str) -> int:
    xla_chips._limits = lambda chips: (2, {})
    # the module that runs is not the one that the processes import
    from tests.runtime.chip_processes import rank_program as by_name

    return xla_chips.launch(by_name, [folder], chips=0)


def fork_jobs() -> None:
    """Ranks that are forks need no import of their own; how they end, and end one another, is the same."""
    xla_chips.start_processes = functools.partial(start_as_forks, xla_chips.start_processes)
    for line in sys.stdin:
        how, folder = json.loads(line)
        if not (pid := os.fork()):
            for stream, name in ((1, "words"), (2, "errors")):
                os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            torch.set_num_threads(1)  # see tests.runtime.forked
            os.environ["HOW"] = how
            code = 1
            try:
                code = job(folder)
            except DeviceError as error:
                print(error, file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def start_as_forks(start, *given, start_method: str, **words):
    assert start_method == "spawn"
    return start(*given, start_method="fork", **words)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(job(sys.argv[1]))
    fork_jobs()
