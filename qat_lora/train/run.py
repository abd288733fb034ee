"""QAT and recovery as whole runs: open, check, wire, train, summarise. The stages differ in the lines that build them.

Everything that can be wrong with a run (config x model x cache x device) is found before the first step, since on a
TPU a bad shape costs minutes of compilation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qat_lora import adapters, models
from qat_lora.cache import CacheManifest, KDCacheDataset
from qat_lora.config import QatRun, QuantScheme, RecoveryRun
from qat_lora.errors import CheckpointError, ConfigError
from qat_lora.evaluate import cached_kl, check_documents, placed
from qat_lora.files import check_writable, write_json
from qat_lora.quant import freeze_codes
from qat_lora.runtime import Runtime
from qat_lora.settings import from_json, to_json
from qat_lora.train.anchor import anchor_spec, build_anchor
from qat_lora.train.checkpoint import (
    check_identity,
    check_same_run,
    git_commit,
    leftovers,
    load_checkpoint,
    load_tensors,
    remove_run,
    restore,
    resume_state,
    save_numbered,
    student_checkpoint,
    versions,
)
from qat_lora.train.execution import autoscaled, lower_layers, with_global_batch
from qat_lora.train.graphs import RecompileHook
from qat_lora.train.hooks import CheckpointHook, EvalHook, LogHook, LossLog, SpeedHook
from qat_lora.train.loop import Hook, train
from qat_lora.train.memory import MemoryHook
from qat_lora.train.objective import Anchor, KDObjective, check_serves
from qat_lora.train.optim import averages_of, build_optimizer
from qat_lora.train.plot import write_loss_png
from qat_lora.train.state import TrainState
from qat_lora.train.student import restored, round_to_nearest, student_tensors, trained_parameters

log = logging.getLogger(__name__)

Launch = Literal["new", "resume", "from_scratch"]


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder's best student, its curves, and the state it ended in."""

    best: Path
    losses: LossLog
    state: TrainState


@dataclass(frozen=True)
class _Stage:
    """What QAT and recovery fill in differently: a placed model, what is trained, what a checkpoint must hold."""

    model: nn.Module
    scheme: QuantScheme
    weights: dict[str, nn.Parameter]
    scales: dict[str, nn.Parameter]
    student: dict[str, Tensor]


@dataclass(frozen=True)
class _Inputs:
    """What both stages open and check first."""

    dataset: KDCacheDataset
    held_out: KDCacheDataset
    loaded: models.Loaded
    resumed: dict[str, Any] | None


def run_qat(run: QatRun, runtime: Runtime, *, launch: Launch = "new", hooks: Sequence[Hook] = ()) -> RunResult:
    """Train a quantised student against a cache; what does not fit raises a QatLoraError before the first step."""
    if run.checkpoint and launch == "from_scratch":
        raise ConfigError(f"--from-scratch contradicts --checkpoint {run.checkpoint}; drop one of them.")
    run = with_global_batch(autoscaled(run, runtime), runtime)
    inputs = _open(run, runtime, launch)
    model, start = inputs.loaded.model, inputs.resumed
    if start is None and run.checkpoint:
        start = load_checkpoint(Path(run.checkpoint), kind=QatRun.command)
    if start is None:
        round_to_nearest(model, run.scheme)
    else:
        path = run.output / "last.pt" if inputs.resumed else Path(run.checkpoint)
        check_identity(start, inputs.loaded.identity, path)
        if from_json(QuantScheme, start["scheme"]) != run.scheme:
            raise ConfigError(
                f"{path} holds a student of another scheme than {run.preset!r}; give --preset of its own run."
            )
        restored(model, start, path)
    trained = trained_parameters(model, run.train)
    _check_ranks_agree(run, runtime, model, inputs)
    placed(model, runtime)
    weights, scales = ({name: model.get_parameter(name) for name in part} for part in trained)  # as they are now held
    stage = _Stage(model, run.scheme, weights, scales, student_tensors(model))
    return _fit(run, runtime, inputs, stage, hooks)


def run_recovery(
    run: RecoveryRun, runtime: Runtime, *, launch: Launch = "new", hooks: Sequence[Hook] = ()
) -> RunResult:
    """Freeze a student and train LoRA adapters on it against a cache. A resumed run has its student in last.pt."""
    if not run.checkpoint:
        raise ConfigError(
            "recovery starts from a student, but checkpoint is empty; give --checkpoint runs/qat/best.pt."
        )
    last = run.output / "last.pt"
    resuming = launch == "resume" and last.exists()
    path = last if resuming else Path(run.checkpoint)
    start = load_checkpoint(path, kind=run.command if resuming else QatRun.command)
    run = dataclasses.replace(run, model=run.model or start["identity"]["name"])
    run = with_global_batch(autoscaled(run, runtime), runtime)
    inputs = _open(run, runtime, launch)
    check_identity(start, inputs.loaded.identity, path)
    model = restored(inputs.loaded.model, start, path)
    if not resuming:
        freeze_codes(model)
        targets = models.target_linears(model)
        model = adapters.attach(model, targets, run.adapter, base_name=inputs.loaded.identity.name)
    _check_ranks_agree(run, runtime, model, inputs)
    placed(model, runtime)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    scheme = from_json(QuantScheme, start["scheme"])
    return _fit(run, runtime, inputs, _Stage(model, scheme, weights, {}, student_tensors(model)), hooks)


def _open(run: QatRun | RecoveryRun, runtime: Runtime, launch: Launch) -> _Inputs:
    """Open cache, model and, on resumption, last.pt; check that they, the settings and the output go together."""
    last = run.output / "last.pt"
    if launch == "new" and last.exists():
        raise ConfigError(
            f"{run.output} holds a run already; go on with --resume, start anew with --from-scratch, "
            "or give another --output."
        )
    if launch != "from_scratch" and not last.exists() and (found := leftovers(run.output)):
        raise ConfigError(
            f"{run.output} holds {found[0].name} of an unfinished run, but no last.pt to go on from; "
            "replace it with --from-scratch, or give another --output."
        )
    if run.output.resolve() == run.cache_dir.resolve():
        raise ConfigError(f"--output {run.output} is the cache's own folder; give another --output.")
    if run.checkpoint and Path(run.checkpoint).resolve().parent == run.output.resolve():
        raise ConfigError(
            f"--checkpoint {run.checkpoint} lies in --output, where it would be replaced; give another --output."
        )
    kd, loop = run.kd, run.loop
    cache = KDCacheDataset(
        run.cache_dir,
        rank=runtime.rank,
        world_size=runtime.world_size,
        preload=loop.preload,
        seed=loop.seed,
        shuffle_shards=loop.shuffle_shards,
        disk_cache_gb=loop.disk_cache_gb,
    )
    check_serves(cache.manifest.target_spec, kd)
    cache.require(temperature=kd.temperature, seq_len=kd.seq_len or None, top_k=kd.top_k or None)
    with runtime.first("model_download"):
        loaded = models.load(run.model or cache.manifest.teacher)
    identity = loaded.identity
    cache.require(
        vocab_size=identity.vocab_size,
        tokenizer_size=identity.tokenizer_size,
        teacher_digest=identity.weights,
        tokenizer_digest=identity.tokenizer,
    )
    _say_how_teacher_differs(cache.manifest, identity)
    cache = cache.within(identity.vocab_size)
    models.check_context(loaded.model, cache.manifest.seq_len)
    models.check_head(loaded.model)
    if cache.manifest.packing == "documents":
        check_documents(loaded.model)
    resumed = None
    if launch == "resume" and last.exists():
        resumed = load_checkpoint(last, kind=run.command)
        check_identity(resumed, identity, last)
        check_same_run(resumed, run, cache.manifest, last, runtime.world_size * runtime.devices)
    if runtime.rank == 0:  # who alone writes
        check_writable(run.output)
    torch.manual_seed(loop.seed)  # adapters' initial values follow from it
    return _Inputs(cache.part("train", loop.eval_fraction), cache.part("eval", loop.eval_fraction), loaded, resumed)


def _say_how_teacher_differs(manifest: CacheManifest, identity: models.Identity) -> None:
    if manifest.teacher_quantization:
        log.info("the cache's teacher was quantised to %s", manifest.teacher_quantization)
    if manifest.vocab_size != identity.vocab_size:
        log.info(
            "the cache's teacher %s has %s ids, the model %s has %s; their tokenizer has %s, the others are padding",
            manifest.teacher, f"{manifest.vocab_size:,}", identity.name, f"{identity.vocab_size:,}",
            f"{identity.tokenizer_size:,}",
        )  # fmt: skip


def _fit(
    run: QatRun | RecoveryRun, runtime: Runtime, inputs: _Inputs, stage: _Stage, extra_hooks: Sequence[Hook]
) -> RunResult:
    manifest = inputs.dataset.manifest
    lower_layers(stage.model, run.execution, runtime, tokens=run.loop.batch_size * manifest.seq_len)
    runtime.barrier("before_warmup")  # every rank has read what is there before one of them changes it
    optimizer = build_optimizer(stage.weights.values(), stage.scales.values(), run.optim)
    state = TrainState(stage.model, stage.weights | stage.scales, optimizer, seed=run.loop.seed)
    if run.optim.ema_decay:
        state.ema = averages_of(state.trained)
    if inputs.resumed is None:
        remove_run(run.output, runtime)  # after all that may refuse the run
    else:
        restore(state, inputs.resumed, run.output / "last.pt", runtime)
        log.info("resuming %s at step %d", run.output, state.step)
    anchor = _anchor(run, runtime, inputs, stage.model)
    losses, speed = LossLog(run.output / "loss.csv", writes=runtime.rank == 0), SpeedHook(runtime)
    best = run.output / "best.pt"
    if state.step >= run.loop.max_steps and state.evaluated_step == state.step and best.exists():
        losses.open_at(state.step)
        log.warning("%s is at step %d of %d already: nothing to do", run.output, state.step, run.loop.max_steps)
        return RunResult(best, losses, state)
    objective = KDObjective(run.kd, manifest.target_spec, runtime, total_steps=run.loop.max_steps, anchor=anchor)
    watch = RecompileHook(runtime, max_recompiles=run.execution.max_recompiles)
    hooks = [*_hooks(run, runtime, inputs, stage, losses), speed, *extra_hooks, watch]
    if runtime.rank == 0:
        write_json(run.output / "run.json", _record(run, inputs.loaded))
    rows_at_once = run.loop.batch_size * runtime.devices
    batches = inputs.dataset.batches(rows_at_once, position=state.step * run.loop.accumulation_steps)
    devices = runtime.world_size * runtime.devices
    rows = run.loop.batch_size * run.loop.accumulation_steps * devices
    log.info(
        "effective batch: %d rows x %d micro-batches x %d devices = %d rows, %s tokens",
        run.loop.batch_size, run.loop.accumulation_steps, devices, rows, f"{rows * manifest.seq_len:,}",
    )  # fmt: skip
    train(state, batches, objective, loop=run.loop, optim=run.optim, runtime=runtime, hooks=hooks)
    if runtime.rank == 0:
        write_json(run.output / "summary.json", speed.summary(state) | watch.summary())
        write_loss_png(run.output / "loss.png", losses.rows, title=f"{run.command} ({run.output.name})")
    runtime.barrier("end")  # nobody leaves while rank 0 still writes
    return RunResult(best, losses, state)


def _check_ranks_agree(run: QatRun | RecoveryRun, runtime: Runtime, model: nn.Module, inputs: _Inputs) -> None:
    """Raise CheckpointError where ranks would begin from different things.

    Before the model is placed: parts put together are the same on all ranks, whatever each of them was cut from.
    """
    if not runtime.agree(lambda: _digest(run, model, inputs, runtime)):
        raise CheckpointError(
            f"the ranks do not start from the same: their settings, caches, models, weights or steps differ at "
            f"{run.output}; give all the same command, and folders that all of them see."
        )


def _digest(run: QatRun | RecoveryRun, model: nn.Module, inputs: _Inputs, runtime: Runtime) -> bytes:
    """Of all that ranks must have in common before the first step; the model is on the host."""
    places = ("place", "output", "cache_dir", "checkpoint", "model")  # which may be named otherwise on another machine
    settings = {name: value for name, value in to_json(run).items() if name not in places}
    identity, resumed = inputs.loaded.identity, inputs.resumed
    begun = [resumed["progress"], (run.output / "best.pt").exists()] if resumed else []
    facts = [settings, begun, inputs.dataset.manifest.identity(), identity.weights, identity.tokenizer]
    facts.append(str(runtime.precision.compute))
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = trained | student_tensors(model)  # of a student that recovery freezes, too
    for x in (*tensors.values(), *(resumed["ema"].values() if resumed else ())):
        digest.update(x.detach().reshape(-1).view(torch.uint8).numpy())
    return digest.digest()


def _anchor(run: QatRun | RecoveryRun, runtime: Runtime, inputs: _Inputs, model: nn.Module) -> Anchor | None:
    """Anchor rows of the model as the run first began: a resumed run reads back the ones that its beginning wrote."""
    if not run.kd.anchor_kl_weight:
        return None
    path = run.output / "anchor.pt"
    if inputs.resumed is not None:
        return Anchor(runtime.to_device(load_tensors(path)), anchor_spec(inputs.dataset.manifest.target_spec))
    log.info("computing the anchor rows' targets")
    anchor = build_anchor(
        model,
        inputs.dataset,
        samples=run.kd.anchor_samples,
        batch_size=run.loop.batch_size * runtime.devices,
        chunk_tokens=run.kd.chunk_tokens,
        runtime=runtime,
    )
    runtime.save(anchor.batch, path)
    return anchor


def _hooks(run: QatRun | RecoveryRun, runtime: Runtime, inputs: _Inputs, stage: _Stage, losses: LossLog) -> list[Hook]:
    """Log, evaluate, save, in this order: a checkpoint knows the evaluation of its own step."""
    loop = run.loop

    def evaluate() -> float:
        batches = inputs.held_out.eval_batches(loop.batch_size * runtime.devices, rows=loop.eval_rows)
        return cached_kl(
            stage.model,
            batches,
            inputs.held_out.manifest.target_spec,
            runtime=runtime,
            chunk_tokens=run.kd.chunk_tokens,
        )

    def content(state: TrainState) -> dict[str, Any]:
        found = student_checkpoint(
            run, inputs.loaded.identity, inputs.dataset.manifest, stage.student, stage.scheme, runtime
        )
        found["world_size"] = runtime.world_size * runtime.devices
        found["metrics"] = {"held_out_kl": state.last_kl, "first_kl": state.first_kl, "step": state.step}
        if isinstance(run, RecoveryRun):
            found["adapters"] = {k: runtime.whole(v) for k, v in adapters.adapter_tensors(stage.model).items()}
        return found

    def save_best(state: TrainState) -> None:
        runtime.save(content(state), run.output / "best.pt")

    def save(state: TrainState) -> None:
        save_numbered(content(state) | resume_state(state, runtime), run.output, state.step, loop.keep_last, runtime)

    memory_path = run.output / "memory.jsonl"
    return [
        LogHook(losses, runtime, every=loop.log_every),
        EvalHook(evaluate, losses, save_best, runtime, every=loop.eval_every),
        CheckpointHook(save, runtime, every=loop.save_every),
        MemoryHook(memory_path, runtime, level=run.execution.mem_debug, every=loop.log_every),
    ]


def _record(run: QatRun | RecoveryRun, loaded: models.Loaded) -> dict[str, Any]:
    return {
        "command": run.command,
        "config": to_json(run),
        "model": dataclasses.asdict(loaded.identity),
        "versions": versions(),
        "git_commit": git_commit(),
    }
