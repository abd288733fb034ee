"""`qat-lora export`: a checkpoint as folders that others load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from qat_lora import models
from qat_lora.config import ExportRun, QuantScheme
from qat_lora.errors import ConfigError, OutputError
from qat_lora.evaluate import Fidelity, read_fidelity, size_of
from qat_lora.export import Facts, write_export
from qat_lora.files import check_writable
from qat_lora.train.checkpoint import load_checkpoint
from qat_lora.train.student import load_student


def export(run: ExportRun) -> Path:
    """Write a student in the asked-for format; what is there in the end has been reloaded and compared."""
    if not run.checkpoint:
        raise ConfigError("export needs a student, but checkpoint is empty; give --checkpoint runs/recovery/best.pt.")
    if run.output.exists() and any(run.output.iterdir() if run.output.is_dir() else [run.output]):
        raise OutputError(f"{run.output} exists and is not empty; give a new --output.")
    if run.output.resolve() == Path.cwd():
        raise OutputError(f"--output {run.output} is the current folder; give the name of a new one.")
    check_writable(run.output.parent)
    if run.threads:
        torch.set_num_threads(run.threads)
    content = load_checkpoint(Path(run.checkpoint))
    loaded = models.load(run.model or content["identity"]["name"])
    student, scheme = load_student(loaded, Path(run.checkpoint))
    facts = Facts(
        teacher=content["identity"]["name"],
        checkpoint="/".join(Path(run.checkpoint).resolve().parts[-2:]),  # no path of this machine
        scheme=_words(scheme, content["run"].get("preset", "")),
        size=size_of(student, stored_bits=loaded.stored_bits),
        data=str(content["cache"].get("source", "not recorded")),
        held_out_kl=content.get("metrics", {}).get("held_out_kl"),
        fidelity=_measured(run, content),
    )
    partial = run.output.with_name(f".{run.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        verified = write_export(student, loaded.tokenizer, partial, format=run.format, facts=facts)
        if run.output.exists():
            run.output.rmdir()
        os.replace(verified, run.output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return run.output


def _measured(run: ExportRun, content: dict[str, Any]) -> list[Fidelity]:
    """What `qat-lora eval` has written of this very step beside the checkpoint."""
    path, step = Path(run.checkpoint), content.get("metrics", {}).get("step")
    try:
        rows = [row for row in read_fidelity(path.parent / "fidelity.json") if row.get("checkpoint")]
        same = [row for row in rows if Path(row["checkpoint"]).resolve() == path.resolve() and row.get("step") == step]
        return [Fidelity(**row) for row in same if step is not None]
    except (OutputError, TypeError):  # of another tool, or of another version of this one
        return []


def _words(scheme: QuantScheme, preset: str) -> str:
    parts = []
    for role, form in (("MLP", scheme.mlp), ("attention", scheme.attention)):
        scales = {"group": f"a scale per {form.group_size} weights", "lowrank": f"scales of rank {form.rank}"}
        parts.append(f"{role} {form.bits} bits, {form.levels} levels, {scales.get(form.scales, 'a scale per channel')}")
    return f"{preset}: {'; '.join(parts)}".removeprefix(": ")
