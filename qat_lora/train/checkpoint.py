"""Checkpoints: the student (best.pt) and everything a run needs to go on as if never interrupted (last.pt, step-*.pt).

A checkpoint is one torch.save file read back with ``weights_only=True``: nothing is unpickled. It names the run, the
model it was made from and the versions that made it, and is self-contained but for that model's own weights.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import pickle
import shutil
import subprocess
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat_lora.cache import CacheManifest
from qat_lora.config import QatRun, QuantScheme, RecoveryRun
from qat_lora.errors import CheckpointError
from qat_lora.models import Identity
from qat_lora.runtime import Runtime
from qat_lora.settings import to_json
from qat_lora.train.state import TrainState

FORMAT = "qat_lora.checkpoint"
# What may differ between a run and its resumption. Places are compared by what lies there (identity, cache), the rest
# changes no step that is already done.
_FREE_ON_RESUME = (
    *("output", "place", "execution", "model", "cache_dir", "checkpoint", "preset", "preload", "disk_cache_gb"),
    *("max_steps", "log_every", "eval_every", "save_every", "keep_last"),
    *("batch_size", "accumulation_steps", "global_batch_size"),  # their product over the ranks is compared
)
_PACKAGES = ("transformers", "peft", "safetensors")


def student_checkpoint(
    run: QatRun | RecoveryRun,
    identity: Identity,
    manifest: CacheManifest,
    tensors: dict[str, Tensor],
    scheme: QuantScheme,
    runtime: Runtime,
) -> dict[str, Any]:
    """The part that later stages read: what was run, on which model, and the student's own tensors, whole."""
    return {
        "format": FORMAT,
        "kind": run.command,
        "run": to_json(run),
        "identity": asdict(identity),
        "cache": manifest.identity(),
        "versions": versions(),
        "git_commit": git_commit(),
        "scheme": to_json(scheme),
        "tensors": {name: runtime.whole(x) for name, x in tensors.items()},
    }


def resume_state(state: TrainState, runtime: Runtime) -> dict[str, Any]:
    """The part that a resumed run reads: optimizer, progress and moving average, all tensors whole.

    Random numbers need none: they follow from the seed and the number of the micro-batch.
    """
    names = ("step", "best_kl", "best_step", "first_kl", "last_kl", "evaluated_step")
    progress = {name: getattr(state, name) for name in names}
    optimizer = state.optimizer.state_dict()
    optimizer["state"] = {
        index: {name: runtime.whole(x) for name, x in of_one.items()} for index, of_one in optimizer["state"].items()
    }
    return {
        "optimizer": optimizer,
        "progress": progress,
        "trained": {name: runtime.whole(p) for name, p in state.trained.items()},
        "ema": {name: runtime.whole(x) for name, x in state.ema.items()},
    }


def restore(state: TrainState, content: dict[str, Any], path: Path, runtime: Runtime) -> None:
    """Put a run back to where `resume_state` found it; raises CheckpointError where the two do not fit."""
    saved, ours = content["trained"], state.trained
    if saved.keys() != ours.keys():
        odd = sorted(saved.keys() ^ ours.keys())[0]
        raise CheckpointError(
            f"{path} trained other tensors than this run ({odd!r} differs); resume with its settings."
        )
    with torch.no_grad():
        for name, p in ours.items():
            p.copy_(runtime.part_of(saved[name], p))
        for name, x in state.ema.items():
            x.copy_(runtime.part_of(content["ema"][name], x))
    own = state.optimizer.state_dict()
    moments = {
        index: {name: runtime.part_of(x, own["state"][index][name]) for name, x in of_one.items()}
        for index, of_one in content["optimizer"]["state"].items()
    }
    # the groups are ours: how AdamW runs is a matter of this device
    state.optimizer.load_state_dict({"state": moments, "param_groups": own["param_groups"]})
    for name, value in content["progress"].items():
        setattr(state, name, value)


def load_checkpoint(path: Path, *, kind: str | None = None) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; raises CheckpointError where it is missing, truncated or of another kind."""
    content = load_tensors(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by qat_lora; give the best.pt or last.pt of a run.")
    if kind is not None and content["kind"] != kind:
        raise CheckpointError(f"{path} comes from `qat-lora {content['kind']}`; this needs one from `qat-lora {kind}`.")
    return content


def load_tensors(path: Path) -> Any:
    """Read what torch.save wrote, tensors and plain values only, onto the CPU."""
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist; give the best.pt or last.pt of a run.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, OSError, ValueError, KeyError):
        raise CheckpointError(
            f"checkpoint {path} is truncated or no checkpoint ({path.stat().st_size} bytes); use another of the run."
        ) from None


def check_identity(content: dict[str, Any], identity: Identity, path: Path) -> None:
    """Raise CheckpointError unless the checkpoint was made from this very model and tokenizer."""
    for part in ("weights", "tokenizer"):
        theirs, ours = content["identity"][part], getattr(identity, part)
        if theirs != ours:
            raise CheckpointError(
                f"{path} was made from {content['identity']['name']!r} ({part} {theirs[:12]}), but --model "
                f"{identity.name!r} has {part} {ours[:12]}; give the model that it was made from."
            )


def check_same_run(
    content: dict[str, Any], run: QatRun | RecoveryRun, manifest: CacheManifest, path: Path, world_size: int
) -> None:
    """Raise CheckpointError where the resumed run would be another one: at a setting, or at the cache.

    The number of ranks may be another, as long as a step has equally many rows: the stream of rows is then the same.
    """
    _check_settings(content["run"], to_json(run), path)
    saved, ranks = content["run"]["loop"], content.get("world_size", 1)
    ours = (run.loop.batch_size, run.loop.accumulation_steps, world_size)
    theirs = (saved["batch_size"], saved["accumulation_steps"], ranks)
    if math.prod(ours) != math.prod(theirs):
        names = ("batch_size={}", "accumulation_steps={}", "{} rank(s)")
        said = [
            " x ".join(name.format(n) for name, n in zip(names, numbers, strict=True)) for numbers in (theirs, ours)
        ]
        raise CheckpointError(
            f"{path} was made with {said[0]} = {math.prod(theirs)} rows per step, this run has {said[1]} = "
            f"{math.prod(ours)}; resume with as many rows, or start another run in another --output."
        )
    for name, value in manifest.identity().items():
        if content["cache"].get(name) != value:
            raise CheckpointError(
                f"{path} was trained on a cache with {name}={content['cache'].get(name)}, this one has {value}; resume "
                "with the same cache, or start another run in another --output."
            )


def leftovers(folder: Path) -> list[Path]:
    """Students in a folder that a new run would replace: numbered checkpoints, and a best.pt that has been trained."""
    best = folder / "best.pt"
    trained = best.exists() and load_checkpoint(best)["metrics"]["step"] > 0  # the start is made again at no cost
    return [*([best] if trained else []), *numbered(folder)]


def remove_run(folder: Path, runtime: Runtime) -> None:
    """Remove what an earlier run left in a folder, so that nothing of it is taken for the new one's."""
    if runtime.rank == 0:
        names = ("best.pt", "last.pt", "anchor.pt", "loss.csv", "loss.png", "run.json", "summary.json", "memory.jsonl")
        for path in (*numbered(folder), *(folder / name for name in names)):
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


def _check_settings(saved: dict[str, Any], asked: dict[str, Any], path: Path, prefix: str = "") -> None:
    for key, value in asked.items():
        if key in _FREE_ON_RESUME:
            continue
        if isinstance(value, dict):
            _check_settings(saved.get(key, {}), value, path, f"{prefix}{key}.")
        elif saved.get(key) != value:
            raise CheckpointError(
                f"{path} was made with {prefix}{key}={saved.get(key)}, this run has {value}; resume with the same "
                "value, or start another run in another --output."
            )


def _same_file(path: Path, name: Path) -> None:
    """Let `name` be the file at `path`: a hard link, or a copy where the file system has none (Drive, FAT)."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    os.replace(temporary, name)


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
