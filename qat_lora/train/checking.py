"""What must hold before the first step of a run, in one list.

On a TPU a bad shape costs minutes of compilation, so that whatever can be wrong (config x cache x model x device) is
found here. A requirement raises a QatLoraError where it is not met.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat_lora.config import QatRun, QuantScheme, RecoveryRun
from qat_lora.data import bos_of
from qat_lora.errors import CheckpointError, ConfigError
from qat_lora.files import check_writable
from qat_lora.settings import from_json, to_json
from qat_lora.train.checkpoint import check_identity
from qat_lora.train.folder import leftovers
from qat_lora.train.objective import check_serves
from qat_lora.train.opening import Opening
from qat_lora.train.student import student_tensors

log = logging.getLogger(__name__)

# What may differ between a run and its resumption. Places are compared by what lies there (identity, cache); rows per
# step as batch_size x accumulation_steps x ranks; seq_len is a check of the cache, which is the same. Ranks on several
# machines may name places otherwise, too.
_PLACES = ("output", "place", "model", "cache_dir", "checkpoint", "preset")
_HOW_IT_RUNS = ("execution", "preload", "disk_cache_gb", "chunk_tokens", "seq_len")
_HOW_LONG_AND_WHAT_IT_REPORTS = ("max_steps", "log_every", "eval_every", "eval_rows", "save_every", "keep_last")
_ROWS_PER_STEP = ("batch_size", "accumulation_steps", "global_batch_size")
FREE_ON_RESUME = frozenset((*_PLACES, *_HOW_IT_RUNS, *_HOW_LONG_AND_WHAT_IT_REPORTS, *_ROWS_PER_STEP))


def check(opening: Opening) -> None:
    """Go through all requirements, from what costs nothing to what takes a model."""
    a_student_is_named(opening)
    no_run_is_lost(opening)
    the_output_is_a_folder_of_its_own(opening)
    the_start_can_be_read(opening)
    the_cache_has_what_the_loss_needs(opening)
    the_model_is_the_caches(opening)
    the_model_reads_the_caches_rows(opening)
    the_start_is_a_student_of_this_model(opening)
    a_resumed_run_is_the_same_run(opening)
    the_output_can_be_written(opening)


def a_student_is_named(opening: Opening) -> None:
    """Recovery starts from a student; QAT from scratch does not."""
    run = opening.run
    if isinstance(run, RecoveryRun) and not run.checkpoint:
        raise ConfigError(
            "recovery starts from a student, but checkpoint is empty; give --checkpoint runs/qat/best.pt."
        )
    if isinstance(run, QatRun) and run.checkpoint and opening.launch == "from_scratch":
        raise ConfigError(f"--from-scratch contradicts --checkpoint {run.checkpoint}; drop one of them.")


def no_run_is_lost(opening: Opening) -> None:
    """A new run replaces none that it was not told to replace; a resumed one says where there is nothing to resume."""
    output, launch, there = opening.run.output, opening.launch, opening.last.exists()
    if launch == "new" and there:
        raise ConfigError(
            f"{output} holds a run already; continue it with --resume, start anew with --from-scratch, "
            "or give another --output."
        )
    if launch != "from_scratch" and not there and (found := leftovers(output)):
        raise ConfigError(
            f"{output} holds {found[0].name} of an unfinished run, but no last.pt to continue from; "
            "replace it with --from-scratch, or give another --output."
        )
    if launch == "resume" and not there:
        log.warning("--resume: %s has no last.pt to continue from, so the run starts at step 0", output)


def the_output_is_a_folder_of_its_own(opening: Opening) -> None:
    """Neither the cache nor the student that the run starts from may lie where the run writes."""
    run = opening.run
    if run.output.resolve() == run.cache_dir.resolve():
        raise ConfigError(f"--output {run.output} is the cache's own folder; give another --output.")
    if run.checkpoint and Path(run.checkpoint).resolve().parent == run.output.resolve():
        raise ConfigError(
            f"--checkpoint {run.checkpoint} lies in --output, where it would be replaced; give another --output."
        )


def the_start_can_be_read(opening: Opening) -> None:
    """The checkpoint that the run begins from is there, whole, and of the right kind."""
    _ = opening.start


def the_cache_has_what_the_loss_needs(opening: Opening) -> None:
    """Its store, temperatures, row length and candidates."""
    cache, kd = opening.cache, opening.run.kd
    check_serves(cache.manifest.target_spec, kd, has_answers=cache.manifest.answers)
    cache.require(temperature=kd.temperature, seq_len=kd.seq_len or None, top_k=kd.top_k or None)


def the_model_is_the_caches(opening: Opening) -> None:
    """The cache's teacher, its tokenizer, and its vocabulary but for padding."""
    manifest, identity = opening.cache.manifest, opening.loaded.identity
    opening.cache.require(
        vocab_size=identity.vocab_size,
        tokenizer_size=identity.tokenizer_size,
        teacher_digest=identity.weights,
        tokenizer_digest=identity.tokenizer,
        bos=bos_of(opening.loaded.tokenizer),
    )
    if manifest.teacher_quantization:
        log.info("the cache's teacher was quantised to %s", manifest.teacher_quantization)
    if manifest.vocab_size != identity.vocab_size:
        log.info(
            "the cache's teacher %s has %s ids, the model %s has %s; their tokenizer has %s, the others are padding",
            manifest.teacher, f"{manifest.vocab_size:,}", identity.name, f"{identity.vocab_size:,}",
            f"{identity.tokenizer_size:,}",
        )  # fmt: skip


def the_model_reads_the_caches_rows(opening: Opening) -> None:
    """Rows fit its context, its head is understood, and documents in one row are kept apart."""
    manifest = opening.cache.manifest
    opening.loaded.check(seq_len=manifest.seq_len, documents=manifest.packing == "documents")


def the_start_is_a_student_of_this_model(opening: Opening) -> None:
    """The checkpoint was made from the model and, for QAT, has the scheme of the run."""
    run, start, path = opening.run, opening.start, opening.start_path
    if start is None:
        return
    check_identity(start, opening.loaded.identity, path)
    if isinstance(run, QatRun) and not opening.is_resumed and from_json(QuantScheme, start["scheme"]) != run.scheme:
        raise ConfigError(
            f"{path} holds a student of another scheme than {run.preset!r}; give --preset of its own run."
        )


def a_resumed_run_is_the_same_run(opening: Opening) -> None:
    """Its settings, rows per step and cache are those of the checkpoint.

    The number of ranks may be another, as long as a step has equally many rows: the stream of rows is then the same.
    """
    if opening.start is None or not opening.is_resumed:
        return
    run, runtime, start, path = opening.run, opening.runtime, opening.start, opening.last
    remedy = f"or {another_run(run)}."
    for name, saved, asked in differences(start["run"], to_json(run)):
        of_scheme = name.startswith("scheme.")  # which the student that is there does not have
        raise CheckpointError(
            f"{path} was made with {name}={saved}, this run has {asked}; resume with the same value, "
            + ("or start another run in another --output." if of_scheme else remedy)
        )
    loop = start["run"]["loop"]
    theirs = (loop["batch_size"], loop["accumulation_steps"], start.get("world_size", 1))
    ours = (run.loop.batch_size, run.loop.accumulation_steps, runtime.world_size * runtime.devices)
    if math.prod(ours) != math.prod(theirs):
        words = "batch_size={} x accumulation_steps={} x {} rank(s) = {} rows per step"
        raise CheckpointError(
            f"{path} was made with {words.format(*theirs, math.prod(theirs))}, this run has "
            f"{words.format(*ours, math.prod(ours))}; resume with as many rows, {remedy}"
        )
    for name, value in opening.cache.manifest.identity().items():
        if start["cache"].get(name) != value:
            raise CheckpointError(
                f"{path} was trained on a cache with {name}={start['cache'].get(name)}, this one has {value}; resume "
                f"with the same cache, {remedy}"
            )


def the_output_can_be_written(opening: Opening) -> None:
    """By rank 0, who alone writes."""
    if opening.runtime.rank == 0:
        check_writable(opening.run.output)


def another_run(run: QatRun | RecoveryRun) -> str:
    """How to train with other settings than those of a run that has begun: a command that is accepted."""
    student = run.output / "best.pt" if isinstance(run, QatRun) else run.checkpoint
    return f"start another run: --checkpoint {student} with another --output"


def differences(saved: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Settings that differ and may not: name, value in the checkpoint, value now."""
    found: list[tuple[str, Any, Any]] = []
    for key, value in asked.items():
        if key in FREE_ON_RESUME:
            continue
        if isinstance(value, dict):
            found += differences(saved.get(key, {}), value, f"{prefix}{key}.")
        elif saved.get(key) != value:
            found.append((f"{prefix}{key}", saved.get(key), value))
    return found


def check_ranks_agree(opening: Opening, model: nn.Module) -> None:
    """Raise CheckpointError where ranks would begin from different things.

    Before the model is placed: parts put together are the same on all ranks, whatever each of them was cut from.
    """
    if not opening.runtime.all_equal(lambda: _digest(opening, model)):
        raise CheckpointError(
            f"the ranks do not start from the same: their settings, caches, models, weights or steps differ at "
            f"{opening.run.output}; give all the same command, and folders that all of them see."
        )


def _digest(opening: Opening, model: nn.Module) -> bytes:
    """Of all that ranks must have in common before the first step; the model is on the host."""
    run, identity, start = opening.run, opening.loaded.identity, opening.start if opening.is_resumed else None
    settings = {name: value for name, value in to_json(run).items() if name not in _PLACES}
    begun = [start["progress"], (run.output / "best.pt").exists()] if start else []
    model_facts = [identity.weights, identity.tokenizer, str(opening.runtime.precision.compute)]
    facts = [settings, begun, opening.cache.manifest.identity(), *model_facts]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = trained | student_tensors(model)  # of a student that recovery freezes, too
    for x in (*tensors.values(), *(start["ema"].values() if start else ())):
        digest.update(x.detach().reshape(-1).view(torch.uint8).numpy())
    return digest.digest()
