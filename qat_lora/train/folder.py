"""A run's folder: its files, which of them a new run would replace, and the numbered checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from qat_lora.runtime import Runtime
from qat_lora.train.checkpoint import load_checkpoint

_FILES = ("best.pt", "last.pt", "anchor.pt", "loss.csv", "loss.png", "run.json", "summary.json", "memory.jsonl")


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
