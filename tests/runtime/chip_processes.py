"""Processes as `launch` starts them for chips, two of them, on a machine without: python -m ... HOW FOLDER

Each has a PJRT CPU device of its own, so they know nothing of each other on the device; what is tried here is how they
are started and how they end. Each writes its process id to FOLDER/pid-RANK.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from qat_lora.runtime import xla_chips


def rank_program(argv: list[str]) -> int:
    how, folder = argv
    rank = int(os.environ["PJRT_LOCAL_PROCESS_RANK"])
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    if how == "done":
        return 0
    while not (Path(folder) / "pid-0").exists():  # a rank that fails ends the job, the slower ones with it
        time.sleep(0.1)
    if rank == 1 and how == "raises":
        raise ValueError("only rank 1 knows what is wrong")
    if rank == 1 and how == "refuses":
        print("qat-lora: error (rank 1): what a user must mend", file=sys.stderr)
        return 2
    time.sleep(600)
    return 0


if __name__ == "__main__":
    from torch_xla._internal import pjrt

    pjrt.plugins.using_dynamic_plugins = lambda: True
    pjrt.plugins.default = lambda: SimpleNamespace(physical_chip_count=lambda: 2)
    pjrt._merge_replica_results = dict  # both believe to be the only device, hence to be number 0
    xla_chips._limit_chips = lambda chips: 2
    # the module that runs is not the one that the processes import
    from tests.runtime.chip_processes import rank_program as by_name

    sys.exit(xla_chips.launch(by_name, sys.argv[1:], chips=0))
