"""Checkpoints: the student (best.pt), and everything that a resumed run needs as well (last.pt, step-*.pt).

A checkpoint is one torch.save file read back with ``weights_only=True``: nothing is unpickled. It names the run, the
model it was made from and the versions that made it, and is self-contained but for that model's own weights. Each
tensor is in it once: what is trained is part of the student, and read back with it.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat_lora import adapters
from qat_lora.errors import CheckpointError
from qat_lora.models import Identity
from qat_lora.runtime import Runtime
from qat_lora.train.loop import TrainState

FORMAT = "qat_lora.checkpoint"
_PROGRESS = ("step", "best_kl", "best_step", "first_kl", "last_kl", "evaluated_step")


def student_state(
    state: TrainState, tensors: Mapping[str, Tensor], runtime: Runtime, *, is_evaluated: bool
) -> dict[str, Any]:
    """The part that later stages read: the student's own tensors as they are now, whole, and their held-out KL.

    The KL is None where these very weights were not evaluated. Empty on ranks that write nothing.
    """
    found: dict[str, Any] = {"tensors": _on_host(tensors, runtime)}
    if adapters.has_adapters(state.model):
        found["adapters"] = _on_host(adapters.adapter_tensors(state.model), runtime)
    kl = state.last_kl if is_evaluated else None
    return found | {"metrics": {"held_out_kl": kl, "first_kl": state.first_kl, "step": state.step}}


def resume_state(state: TrainState, runtime: Runtime) -> dict[str, Any]:
    """The part that a resumed run reads beside the student: optimizer, progress and moving average, all tensors whole.

    Random numbers need none: they follow from the seed and the number of the micro-batch.
    """
    optimizer = state.optimizer.state_dict()
    optimizer["state"] = {index: _on_host(of_one, runtime) for index, of_one in optimizer["state"].items()}
    return {
        "optimizer": optimizer,
        "progress": {name: getattr(state, name) for name in _PROGRESS},
        "trained": list(state.trained),
        "ema": _on_host(state.ema, runtime),
    }


def restore(state: TrainState, content: dict[str, Any], path: Path, runtime: Runtime) -> None:
    """Put a run back to where `resume_state` found it; its model has been read back from the same file.

    Raises CheckpointError where the two do not fit.
    """
    if odd := sorted(set(content["trained"]) ^ state.trained.keys()):
        raise CheckpointError(
            f"{path} trained other tensors than this run ({odd[0]!r} differs); resume with its settings."
        )
    with torch.no_grad():
        for name, x in state.ema.items():
            x.copy_(runtime.scatter_like(content["ema"][name], x))
    own = state.optimizer.state_dict()
    moments = {
        index: {name: runtime.scatter_like(x, own["state"][index][name]) for name, x in of_one.items()}
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


def _on_host(tensors: Mapping[Any, Tensor], runtime: Runtime) -> dict[Any, Tensor]:
    """The tensors, whole, on the rank that writes. All ranks ask for each, since its parts may lie on all of them."""
    found = {}
    for name, x in tensors.items():
        whole = runtime.gather(x)
        if runtime.rank == 0:
            found[name] = whole
    return found
