"""Plant one fault at a time and see that a test fails: `make mutants`.

    python -m tests.mutants [--room quant] [--name rounding] [--jobs 2] [--json PATH]

The faults stand in `<room>.toml` beside this file: a name, the file, the text that is replaced and what replaces it,
the tests that must fail, whether a review named the fault (`listed`), and for a fault that no test can see the reason
why (`equivalent`). A fault survives when all of its tests pass.

Each fault is planted in a copy of the tree, by a process that is forked after torch, transformers and peft are
imported, so that one fault costs as long as its tests. Exit code 1: a listed fault survived, more than 5% of the
others did, a test fails without any fault, or the text to be replaced does not occur exactly once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("qat_lora", "tests", "scripts", "benchmarks", "notebooks", "docs", "README.md", "pyproject.toml")
MAX_SURVIVING_SHARE = 0.05
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` in `file` becomes `new`, and one of `tests` must fail."""

    room: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    listed: bool = False
    equivalent: str = ""

    def planted(self, source: str) -> str:
        """The source with the fault in it."""
        count = source.count(self.old)
        if count != 1:
            raise SystemExit(
                f"{self.room}: {self.name!r}: its `old` text occurs {count} times in {self.file}; make it exactly one."
            )
        return source.replace(self.old, self.new)


def load_mutants(room: str | None = None, name: str | None = None) -> list[Mutant]:
    """All faults of the tables, or those of one room, or those whose names hold some words."""
    found = []
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        if room in (None, path.stem):
            for entry in tomllib.loads(path.read_text())["mutant"]:
                mutant = Mutant(path.stem, **entry | {"tests": tuple(entry["tests"])})
                if name is None or name in mutant.name:
                    found.append(mutant)
    return found


@contextlib.contextmanager
def tree() -> Iterator[Path]:
    """A copy of what the tests need, to plant faults in."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        yield Path(folder)


def start(folder: Path, tests: tuple[str, ...], log: Path) -> int:
    """Fork a process that runs tests in a tree; its exit code is pytest's."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        for name in [m for m in sys.modules if m.split(".")[0] in ("tests", "qat_lora")]:
            del sys.modules[name]
        sys.path[:] = [str(folder), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
        import pytest

        code = int(pytest.main(["-o", "addopts=", "-x", "-q", "-p", "no:cacheprovider", *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int) -> int:
    """The exit code of a forked process; 124 where it ran too long and was stopped, 128 + n where signal n ended it."""
    late = time.monotonic() + TIMEOUT_SECONDS
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) if not os.WIFSIGNALED(status) else 128 + os.WTERMSIG(status)
        if time.monotonic() > late:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return 124
        time.sleep(0.02)


def judge(mutants: list[Mutant], folder: Path, log: Path) -> dict[str, str]:
    """Plant each in turn; name -> killed, SURVIVED or equivalent."""
    verdicts = {}
    for mutant in mutants:
        path = folder / mutant.file
        source = path.read_text()
        path.write_text(mutant.planted(source))
        began = time.perf_counter()
        try:
            code = wait(start(folder, mutant.tests, log))
        finally:
            path.write_text(source)
        verdict = "killed" if code else "equivalent" if mutant.equivalent else "SURVIVED"
        verdicts[f"{mutant.room}: {mutant.name}"] = verdict
        print(f"{verdict:10} {time.perf_counter() - began:5.1f} s  {mutant.room}: {mutant.name}", flush=True)
    return verdicts


def check_without_faults(mutants: list[Mutant], folder: Path, log: Path) -> None:
    """All named tests pass without a fault, else a kill would mean nothing."""
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    if code := wait(start(folder, tests, log)):
        raise SystemExit(f"without any fault the tests end in exit code {code}:\n{log.read_text()[-3000:]}")


def main() -> int:
    """Judge all faults, in some processes side by side; print a line each and the sums."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--room", help="faults of this table alone")
    parser.add_argument("--name", help="faults whose names hold these words")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4))
    parser.add_argument("--json", type=Path, help="write the verdicts there")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mutants = load_mutants(args.room, args.name)
    import peft  # noqa: F401  forked processes begin with it
    import pytest  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    verdicts: dict[str, str] = {}
    workers = []
    for job in range(args.jobs):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with tree() as folder:
                    log = folder / "log.txt"
                    mine = mutants[job :: args.jobs]
                    check_without_faults(mine, folder, log)
                    with os.fdopen(write, "w") as stream:
                        json.dump(judge(mine, folder, log), stream)
                code = 0
            except SystemExit as error:
                print(error, file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        os.close(write)
        workers.append((pid, read))
    failed = False
    for pid, read in workers:
        with os.fdopen(read) as stream:
            text = stream.read()
        failed |= bool(os.waitpid(pid, 0)[1])
        verdicts |= json.loads(text) if text else {}
    if failed:
        return 1
    survived = {name for name, verdict in verdicts.items() if verdict == "SURVIVED"}
    listed = {f"{m.room}: {m.name}" for m in mutants if m.listed and not m.equivalent}
    others = {f"{m.room}: {m.name}" for m in mutants if not m.listed and not m.equivalent}
    equivalent = [m for m in mutants if m.equivalent]
    print(
        f"{len(listed)} from reviews, {len(listed & survived)} survived; {len(others)} others, "
        f"{len(others & survived)} survived; {len(equivalent)} that no test can see, each with its reason"
    )
    for mutant in equivalent:
        print(f"  {mutant.room}: {mutant.name}: {mutant.equivalent}")
    if args.json:
        rows = [asdict(m) | {"verdict": verdicts[f"{m.room}: {m.name}"]} for m in mutants]
        args.json.write_text(json.dumps(rows, indent=1))
    return int(bool(listed & survived) or len(others & survived) > MAX_SURVIVING_SHARE * max(len(others), 1))


if __name__ == "__main__":
    sys.exit(main())
