"""QAT and recovery as whole runs: open, check, wire, train, summarise.

A stage is a function that makes its student of what was opened; all else is the same for all stages.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat_lora import adapters, models
from qat_lora.config import QatRun, QuantScheme, RecoveryRun
from qat_lora.errors import DiskFull
from qat_lora.evaluate import cached_kl, size_of
from qat_lora.files import write_json
from qat_lora.quant import freeze_codes
from qat_lora.runtime import Runtime
from qat_lora.settings import from_json, to_json
from qat_lora.train.anchor import anchor_of
from qat_lora.train.checking import another_run, check, check_ranks_agree
from qat_lora.train.checkpoint import restore, resume_state, student_state
from qat_lora.train.execution import Run, autoscaled, lower_layers, state_bytes, with_global_batch
from qat_lora.train.folder import LossLog, how_to_continue, provenance, remove_run, save_numbered
from qat_lora.train.graphs import RecompileHook
from qat_lora.train.hooks import CheckpointHook, EvalHook, LogHook
from qat_lora.train.loop import Hook, TrainState, train
from qat_lora.train.memory import MemoryHook
from qat_lora.train.objective import KDObjective
from qat_lora.train.opening import Launch, Opening
from qat_lora.train.optim import averages_of, build_optimizer
from qat_lora.train.plot import write_loss_png
from qat_lora.train.speed import SpeedHook
from qat_lora.train.student import Student, restored, round_to_nearest, student_tensors, trained_parameters

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder's best student, its curves, and the state it ended in."""

    best: Path
    losses: LossLog
    state: TrainState


def run_qat(run: QatRun, runtime: Runtime, *, launch: Launch = "new", hooks: Sequence[Hook] = ()) -> RunResult:
    """Train a quantised student against a cache; what does not fit raises a QatLoraError before the first step."""
    opening = _opened(run, runtime, launch)
    model = opening.loaded.model
    if opening.start is None:
        round_to_nearest(model, run.scheme)
    else:
        restored(model, opening.start, opening.start_path)
    weights, scales = trained_parameters(model, run.train)
    return _fit(opening, Student(model, run.scheme, tuple(weights), tuple(scales)), hooks)


def run_recovery(
    run: RecoveryRun, runtime: Runtime, *, launch: Launch = "new", hooks: Sequence[Hook] = ()
) -> RunResult:
    """Freeze a student and train LoRA adapters on it against a cache. A resumed run has its student in last.pt."""
    opening = _opened(run, runtime, launch)
    assert opening.start is not None
    model = restored(opening.loaded.model, opening.start, opening.start_path)
    if not opening.is_resumed:
        freeze_codes(model)
        targets = models.target_linears(model)
        model = adapters.attach(model, targets, run.adapter, base_name=opening.loaded.identity.name)
    trained = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    return _fit(opening, Student(model, from_json(QuantScheme, opening.start["scheme"]), trained), hooks)


def _opened(run: Run, runtime: Runtime, launch: Launch) -> Opening:
    """The run with the batch and rate of this machine, all that it names, and nothing that does not fit."""
    run = with_global_batch(autoscaled(run, runtime), runtime)
    opening = Opening(run, runtime, launch)
    check(opening)
    torch.manual_seed(run.loop.seed)  # adapters' initial values follow from it
    return opening


def _fit(opening: Opening, student: Student, extra_hooks: Sequence[Hook]) -> RunResult:
    """Train what a stage has made, and leave its files."""
    run, runtime, output = opening.run, opening.runtime, opening.run.output
    manifest = opening.cache.manifest
    check_ranks_agree(opening, student.model)
    _log_what_is_trained(opening, student)
    models.place(student.model, runtime)
    tensors = student_tensors(student.model)  # before the layers are made one, under their plain names
    state = _state(opening, student)
    if opening.is_resumed:
        assert opening.start is not None
        restore(state, opening.start, opening.last, runtime)
        log.info("resuming %s at step %d", output, state.step)
    else:
        remove_run(output, runtime)  # after all that may refuse the run
    losses, best = LossLog(output / "loss.csv", writes=runtime.rank == 0), output / "best.pt"
    anchor = anchor_of(student.model, opening.train_rows, run, runtime, is_resumed=opening.is_resumed)
    if state.step >= run.loop.max_steps and state.evaluated_step == state.step and best.exists():
        losses.open_at(state.step)
        log.warning("%s is at step %d of %d already: nothing to do", output, state.step, run.loop.max_steps)
        return RunResult(best, losses, state)
    made_by = provenance()
    if runtime.rank == 0:
        identity = dataclasses.asdict(opening.loaded.identity)
        write_json(output / "run.json", {"command": run.command, "config": to_json(run), "model": identity, **made_by})
    objective = KDObjective(run.kd, manifest.target_spec, runtime, total_steps=run.loop.max_steps, anchor=anchor)
    speed, watch = SpeedHook(runtime), RecompileHook(runtime, max_recompiles=run.execution.max_recompiles)
    facts = opening.facts(student.scheme, made_by)
    hooks = [*_hooks(opening, facts, tensors, losses, speed), speed, *extra_hooks, watch]
    batches = opening.train_rows.batches(
        run.loop.batch_size * runtime.devices, position=state.step * run.loop.accumulation_steps
    )
    try:
        train(state, batches, objective, loop=run.loop, optim=run.optim, runtime=runtime, hooks=hooks)
    except DiskFull as error:
        raise DiskFull(f"{error} Then {how_to_continue(output)}.") from None
    if runtime.rank == 0:
        write_json(output / "summary.json", speed.summary(state) | watch.summary())
        write_loss_png(output / "loss.png", losses.rows, title=f"{run.command} ({output.name})")
    runtime.barrier("end")  # nobody leaves while rank 0 still writes
    return RunResult(best, losses, state)


def _log_what_is_trained(opening: Opening, student: Student) -> None:
    run, runtime, rows = opening.run, opening.runtime, len(opening.train_rows)
    size = size_of(student.model, stored_bits=opening.loaded.stored_bits)
    adapter = f" + {size.adapter_bits:.2f} of adapters" if size.adapter_bits else ""
    log.info(
        "%s: %.2f bits per weight%s; cache %s: %s rows of %d tokens to train on, %s held out",
        f"preset {run.preset}" if isinstance(run, QatRun) else f"student {run.checkpoint}",
        size.bits_per_weight - size.adapter_bits, adapter, run.cache_dir,
        f"{rows:,}", opening.cache.manifest.seq_len, f"{len(opening.held_out_rows):,}",
    )  # fmt: skip
    devices = runtime.world_size * runtime.devices
    of_a_step = run.loop.batch_size * run.loop.accumulation_steps * devices
    log.info(
        "effective batch: %d rows x %d micro-batches x %d devices = %d rows, %s tokens", run.loop.batch_size,
        run.loop.accumulation_steps, devices, of_a_step, f"{of_a_step * opening.cache.manifest.seq_len:,}",
    )  # fmt: skip
    if rows < of_a_step:
        log.warning(
            "a step takes %d rows, but the cache has only %d to train on, so rows repeat within a step; lower "
            "--batch-size, or build a larger cache", of_a_step, rows,
        )  # fmt: skip


def _state(opening: Opening, student: Student) -> TrainState:
    """The run's state before its first step; the model's layers set up to be trained."""
    run, runtime = opening.run, opening.runtime
    weights, scales = student.parameters(student.weights), student.parameters(student.scales)
    trained = weights | scales
    lower_layers(
        student.model, run.execution, runtime, tokens=run.loop.batch_size * opening.cache.manifest.seq_len,
        to_come_bytes=state_bytes(trained.values(), run.optim),
    )  # fmt: skip
    runtime.barrier("before_warmup")  # every rank has read what is there before one of them changes it
    optimizer = build_optimizer(weights.values(), scales.values(), run.optim)
    averages = averages_of(trained) if run.optim.ema_decay else {}
    return TrainState(student.model, trained, optimizer, seed=run.loop.seed, ema=averages)


def _hooks(
    opening: Opening, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], losses: LossLog, speed: SpeedHook
) -> list[Hook]:
    """What the run does every so often, in this order: a checkpoint knows the evaluation of its own step."""
    run, runtime, loop, held_out = opening.run, opening.runtime, opening.run.loop, opening.held_out_rows
    output = run.output

    def evaluate(state: TrainState) -> float:
        batches = held_out.eval_batches(loop.batch_size * runtime.devices, rows=loop.eval_rows)
        return cached_kl(
            state.model, batches, held_out.manifest.target_spec, runtime=runtime, chunk_tokens=run.kd.chunk_tokens,
            answers_only=run.kd.loss_on == "answers",
        )  # fmt: skip

    def save_best(state: TrainState) -> None:
        runtime.save({**facts, **student_state(state, tensors, runtime, is_evaluated=True)}, output / "best.pt")

    def save(state: TrainState) -> None:
        is_evaluated = state.evaluated_step == state.step and not state.ema  # else it was the average
        content = {**facts, **student_state(state, tensors, runtime, is_evaluated=is_evaluated)}
        save_numbered(content | resume_state(state, runtime), output, state.step, loop.keep_last, runtime)

    remedy = f"{another_run(run)} and a lower --lr"
    return [
        LogHook(losses, speed, runtime, every=loop.log_every, total=loop.max_steps, remedy=remedy),
        EvalHook(
            evaluate, losses, save_best, speed, runtime, every=loop.eval_every, other_rows=opening.has_other_eval_rows
        ),
        CheckpointHook(save, speed, runtime, every=loop.save_every, remedy=remedy),
        MemoryHook(output / "memory.jsonl", runtime, level=run.execution.mem_debug, every=loop.log_every),
    ]
