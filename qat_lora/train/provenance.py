"""Which code made a result: versions of the libraries, and the commit of the working tree."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("transformers", "peft", "safetensors")


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
