"""A run's folder: its files, loss.csv, the numbered checkpoints, and which code made them."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import math
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from qat_lora.files import write_atomically
from qat_lora.runtime import Runtime
from qat_lora.train.checkpoint import load_checkpoint

COLUMNS = ("step", "loss", "grad_norm", "lr", "eval_kl", "tokens", "seconds")
_FILES = ("best.pt", "last.pt", "anchor.pt", "loss.csv", "loss.png", "run.json", "summary.json", "memory.jsonl")
_PACKAGES = ("transformers", "peft", "safetensors")


def leftovers(folder: Path) -> list[Path]:
    """Students in a folder that a new run would replace: numbered checkpoints, and a best.pt that has been trained."""
    best = folder / "best.pt"
    trained = best.exists() and load_checkpoint(best)["metrics"]["step"] > 0  # the start is made again at no cost
    return [*([best] if trained else []), *numbered(folder)]


def how_to_continue(folder: Path) -> str:
    """What to do about a run that was cut off: advice that will be accepted."""
    if (folder / "last.pt").exists():
        return "run the command again with --resume to continue from the last checkpoint"
    found = leftovers(folder)
    return "no checkpoint to continue from; run the command again" + (" with --from-scratch" if found else "")


def remove_run(folder: Path, runtime: Runtime) -> None:
    """Remove what an earlier run left in a folder, so that nothing of it is taken for the new one's."""
    if runtime.rank == 0:
        for path in (*numbered(folder), *(folder / name for name in _FILES)):
            path.unlink(missing_ok=True)


def numbered(folder: Path) -> list[Path]:
    """The numbered checkpoints of a run, oldest first."""
    found = {path: path.stem.removeprefix("step-") for path in folder.glob("step-*.pt")}
    return sorted((path for path, number in found.items() if number.isdecimal()), key=lambda path: int(found[path]))


def save_numbered(content: dict[str, Any], folder: Path, step: int, keep_last: int, runtime: Runtime) -> None:
    """Write step-N.pt, let last.pt be the same file, and drop all but the `keep_last` newest numbered ones."""
    path = folder / f"step-{step:06d}.pt"
    runtime.save(content, path)
    if runtime.rank == 0:
        _same_file(path, folder / "last.pt")
        for old in numbered(folder)[: -keep_last or None]:
            old.unlink()


def _same_file(path: Path, name: Path) -> None:
    """Let `name` be the file at `path`: a hard link, or a copy where the file system has none (Drive, FAT)."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    os.replace(temporary, name)


@dataclass
class LossLog:
    """Rows of loss.csv, in memory and on disk; a resumed run adds to the rows of its own past."""

    path: Path
    rows: list[dict[str, float]] = field(default_factory=list)
    writes: bool = True  # one rank of several does

    def open_at(self, step: int) -> None:
        """Keep the rows of up to `step` steps done and forget the rest."""
        if step and self.path.exists():
            with self.path.open(newline="") as stream:
                found = [_parsed(row) for row in csv.DictReader(stream)]
            self.rows = [row for row in found if row is not None and row["step"] <= step]
        if self.writes:
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, COLUMNS)
            writer.writeheader()
            writer.writerows(_readable(row) for row in self.rows)
            write_atomically(self.path, lambda stream: stream.write(text.getvalue().encode()))

    def add(self, **values: float) -> None:
        """Append one row; columns without a value stay empty."""
        row = {name: float(values.get(name, math.nan)) for name in COLUMNS}
        self.rows.append(row)
        if self.writes:
            with self.path.open("a", newline="") as stream:
                csv.DictWriter(stream, COLUMNS).writerow(_readable(row))


def _parsed(row: dict[str, str]) -> dict[str, float] | None:
    """The numbers of a row; None for one that a kill has cut short."""
    try:
        return {name: float(row[name]) if row[name] else math.nan for name in COLUMNS}
    except (KeyError, TypeError, ValueError):
        return None


def _readable(row: dict[str, float]) -> dict[str, str]:
    return {name: "" if math.isnan(value) else f"{value:.9g}" for name, value in row.items()}


def provenance() -> dict[str, Any]:
    """Versions and commit, read once when a run starts: files may change while it runs, its code does not."""
    return {"versions": versions(), "git_commit": git_commit()}


def versions() -> dict[str, str]:
    """Versions of the libraries that a result depends on."""
    found = {"qat_lora": importlib.metadata.version("qat_lora")}
    return found | {"torch": str(torch.__version__)} | {name: importlib.metadata.version(name) for name in _PACKAGES}


def git_commit() -> str:
    """Commit of the working tree that this package lies in, with -dirty where it was changed; empty outside git."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    tracked = [*git, "ls-files", "--error-unmatch", here.name]  # an install may lie inside somebody else's repository
    command = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, timeout=10, check=True)
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
