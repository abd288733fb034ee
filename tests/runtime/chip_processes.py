"""Processes as `launch` starts them for chips, two of them, on a machine without: python -m ... FOLDER, HOW=...

Each has a PJRT CPU device of its own; what torch_xla would say of their places is made up here, wherever this module is
imported, which the processes do before anything else. So how they start, meet and end is real, and what they compute is
not tried. Each writes its process id to FOLDER/pid-RANK.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch_xla.runtime as xr
from torch_xla._internal import pjrt

from qat_lora.errors import DeviceError
from qat_lora.runtime.xla import chips as xla_chips

HOW = os.environ.get("HOW", "")
initialize = pjrt.initialize_multiprocess


def initialize_and_place(process: int, count: int) -> None:
    if process == 1 and HOW == "no chip":
        raise RuntimeError("the chip is held by another process")
    initialize(process, count)
    xr.world_size = xr.process_count = lambda: 1 if HOW == "unplaced" else count
    xr.global_ordinal = xr.process_index = lambda: process


pjrt.initialize_multiprocess = initialize_and_place


def rank_program(argv: list[str]) -> int:
    folder, rank = Path(argv[0]), xr.global_ordinal()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if HOW == "done":
        (folder / f"places-{rank}").write_text(f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
        return 0
    while not (folder / "pid-0").exists():  # a rank that fails ends the job, the slower ones with it
        time.sleep(0.1)
    if HOW == "meets":
        (folder / f"found-{rank}.json").write_text(json.dumps(met(rank)))
        return 0
    if rank == 1 and HOW == "raises":
        raise ValueError("only rank 1 knows what is wrong")
    if rank == 1 and HOW == "refuses":
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


if __name__ == "__main__":
    xla_chips._limits = lambda chips: (2, {})
    # the module that runs is not the one that the processes import
    from tests.runtime.chip_processes import rank_program as by_name

    sys.exit(xla_chips.launch(by_name, sys.argv[1:], chips=0))
