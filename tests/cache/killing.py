"""A program that kills commands at random moments, goes on with them, and compares what they leave.

    python -m tests.cache.killing '{"argv": [..., "--output", "{output}"], "folder": ..., "kills": 200, "seed": 7}'

It runs the command once, whole, for the files to compare with and so that all is imported; from then on each run is a
fork, which starts in no time. A kill is SIGKILL at a moment drawn evenly from the time that a run takes, four of five
times counted from the manifest on, before which nothing is written. Half of the killed runs are killed again while
they continue. Then one runs to its end, and every file must have the bytes that it has without kills.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

from qat_lora.cli.main import main
from scripts.convert_older_cache import main as convert_older


def run(argv: list[str]) -> int:
    """Do what a command line says, of `qat-lora` or of the script that it begins with."""
    return convert_older(argv[1:]) if argv[0] == "convert_older_cache.py" else main(argv)


class Runs:
    """One command that is run again and again, each time as a fork."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        self.argv, self.folder, self.output = argv, folder, folder / "killed"
        assert run(self.of(folder / "whole")) == 0
        self.whole = contents(folder / "whole")
        times = [self.timed() for _ in range(3)]
        self.until_record, self.seconds = (sorted(x)[1] for x in zip(*times, strict=True))

    def of(self, output: Path) -> list[str]:
        return [arg.replace("{output}", str(output)) for arg in self.argv]

    def start(self) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                log = os.open(self.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                code = run(self.of(self.output))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return pid

    def timed(self) -> tuple[float, float]:
        """Seconds until the manifest of a run, and until its end."""
        shutil.rmtree(self.output, ignore_errors=True)
        started, pid = time.perf_counter(), self.start()
        self.wait_for_record()
        first = time.perf_counter() - started
        self.end(pid)
        return first, time.perf_counter() - started

    def wait_for_record(self) -> None:
        late = time.perf_counter() + 60  # a run that fails has none, and is told of by `end`
        while not self.has_record() and time.perf_counter() < late:
            time.sleep(0.0005)

    def has_record(self) -> bool:
        # os.walk, since the folder comes and goes while the run proves that it can be written
        return any(name.startswith("manifest") for _, _, names in os.walk(self.output) for name in names)

    def end(self, pid: int) -> None:
        status = os.waitpid(pid, 0)[1]
        assert status == 0, (self.folder / "log.txt").read_text()[-3000:]

    def kill(self, chance: random.Random) -> str | None:
        """Start a run, kill it at a random moment, and say what it left; None where it had ended before."""
        pid = self.start()
        if chance.random() < 0.8:
            self.wait_for_record()
            time.sleep(chance.uniform(0, self.seconds - self.until_record))
        else:
            time.sleep(chance.uniform(0, self.seconds))
        os.kill(pid, signal.SIGKILL)
        return self.left() if os.WIFSIGNALED(os.waitpid(pid, 0)[1]) else None

    def left(self) -> str:
        files = [path for path in self.output.rglob("*") if path.is_file()]
        if any(path.suffix == ".tmp" for path in files):
            return "a file half written"
        if any(path.name == "index.json" for path in files):
            return "all"
        return "shards" if any(path.suffix == ".safetensors" for path in files) else "nothing or a manifest"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def kill_and_compare(argv: list[str], folder: Path, kills: int, seed: int) -> dict[str, object]:
    """Kill `kills` runs of the command; AssertionError where one that was gone on with left other bytes."""
    runs, chance, done = Runs(argv, folder), random.Random(seed), 0
    left: Counter[str] = Counter()
    compared = too_late = 0
    while done < kills:
        shutil.rmtree(runs.output, ignore_errors=True)
        while done < kills:
            state = runs.kill(chance)
            if state is None:
                too_late += 1
                break
            done += 1
            left[state] += 1
            if chance.random() < 0.5:
                break
        runs.end(runs.start())
        found = contents(runs.output)
        differing = sorted(name for name in found.keys() | runs.whole.keys() if found.get(name) != runs.whole.get(name))
        assert not differing, f"after kill {done} of seed {seed}: {differing} differ"
        compared += 1
    return {
        "kills": done,
        "seed": seed,
        "left": dict(left),
        "compared": compared,
        "files": len(runs.whole),
        "ended before the kill": too_late,
        "seconds of a run": round(runs.seconds, 3),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    print(json.dumps(kill_and_compare(job["argv"], Path(job["folder"]), job["kills"], job["seed"])))
