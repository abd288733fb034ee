"""The five steps as functions of a run: the command line, the scripts and the demo all call these."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

from qat_lora import adapters, models
from qat_lora.cache import (
    CacheManifest,
    CacheWriter,
    Part,
    build_cache,
    differ_in_padding,
)
from qat_lora.cli.progress import BarHook, bar
from qat_lora.config import EvalRun, ExportRun, QatRun, RecoveryRun
from qat_lora.config.cache import CacheRun
from qat_lora.data import (
    Blocks,
    check_source,
    fetch_source,
    read_documents,
    rows_stay,
    source_words,
    token_blocks,
    tokenize_blocks,
)
from qat_lora.errors import CacheMismatch, ConfigError, ModelError, OutputError
from qat_lora.evaluate import (
    Fidelity,
    Windows,
    check_documents,
    hidden_states,
    measure,
    placed,
    size_of,
    strided_windows,
    whole_windows,
    write_fidelity,
)
from qat_lora.export import ADAPTER_FOLDER, export_adapter, export_dequantized, export_merged, verify_export
from qat_lora.files import check_writable
from qat_lora.kd import Head
from qat_lora.models.placement import Placement, memory_bytes, places_of
from qat_lora.runtime import Runtime, runtime_for
from qat_lora.train.checkpoint import load_checkpoint
from qat_lora.train.run import Launch, RunResult, run_qat, run_recovery
from qat_lora.train.student import load_student

log = logging.getLogger(__name__)


def cache(run: CacheRun) -> CacheManifest:
    """Build the KD cache of a text, or one part of it, or go on with one that was interrupted."""
    check_source(run.data, run.source)
    run.check_store()
    folder = run.output if isinstance(run.output, Path) else None  # compiled programs stay on this machine
    runtime = runtime_for(run.place, folder=folder, many=True)
    if runtime.rank == 0:  # another rank's would see, and remove, a folder that is made at this moment
        check_writable(run.output)
    placement = _placement(run, runtime)
    with runtime.first("model_download"):
        loaded = models.load(run.teacher, placement=placement)
    if placement is not None:
        log.info("teacher in %s: %s", placement.quantization or placement.dtype, places_of(loaded.model))
    models.check_context(loaded.model, run.seq_len)
    _check_teacher(loaded.model, placement)
    if run.packing == "documents":
        check_documents(loaded.model)
    with runtime.first("data_download"):
        fetch_source(run.data, run.source)
    blocks = _blocks(run, loaded, run.max_rows or None)
    manifest = _manifest(run, loaded.identity, blocks, runtime.precision.compute)
    if not runtime.agree(lambda: _build_digest(run, manifest, runtime)):
        raise CacheMismatch(
            f"the ranks would not build the same cache in {run.output}: their settings, texts or teachers differ; give "
            "all the same command."
        )
    with runtime.first("before_build"):
        writer = CacheWriter(
            run.output, manifest, part=Part(*run.part_of), rank=runtime.rank, world_size=runtime.world_size
        )
    model = placed(loaded.model, runtime) if placement is None else loaded.model
    head = Head(*models.head_parts(model, runtime.precision.compute))

    def hidden_fn(ids_BT: Tensor, position_ids_BT: Tensor | None = None) -> Tensor:
        hidden_SH = hidden_states(model, ids_BT, runtime, position_ids_BT=position_ids_BT)
        # a teacher over several devices may end on another than its head's
        return hidden_SH.to(head.weight_VH.device).unflatten(0, ids_BT.shape)

    whose = f" (rank 0 of {runtime.world_size})" if runtime.world_size > 1 else ""
    title = f"cache{f' {run.part}' if run.part else ''}{whose}"
    with bar(title, total=writer.rows, unit_per_second="tokens/s", units_each=run.seq_len) as update:
        build_cache(
            hidden_fn,
            lambda hidden_SH: head(hidden_SH),
            blocks,
            writer,
            batch_size=run.build_batch_size,
            device=runtime.device,
            mark_step=lambda: runtime.mark_step("cache"),
            meet=lambda: runtime.barrier("after_shard"),
            progress=lambda done, total: update(done),
        )
    with runtime.first("before_end"):  # every rank has met the others after its last shard
        return writer.finish()


def _blocks(run: CacheRun | EvalRun, loaded: models.Loaded, max_rows: int | None) -> Blocks:
    """The rows of a run's source: packed, or as they are where they are rows of this length already."""
    tokenizer, vocab_size = loaded.tokenizer, loaded.identity.vocab_size
    rows = token_blocks(
        run.data,
        run.source,
        run.seq_len,
        fill_id=tokenizer.eos_token_id or 0,
        vocab_size=vocab_size,
        max_rows=max_rows,
    )
    packing = run.packing if isinstance(run, CacheRun) else "stream"
    if rows is not None:
        return rows.one_document_each() if packing == "documents" else rows
    documents = read_documents(run.data, run.source, tokenizer, vocab_size=vocab_size)
    return tokenize_blocks(documents, tokenizer, run.seq_len, packing=packing, max_rows=max_rows, vocab_size=vocab_size)


def _placement(run: CacheRun, runtime: Runtime) -> Placement | None:
    """Where the run's teacher is to lie, if not whole on the runtime's device; ConfigError where that cannot be."""
    spread = run.device_map == "auto"
    if not spread and run.quantize_teacher == "none":
        return None
    if spread and runtime.world_size > 1:
        raise ConfigError(
            f"device_map=auto spreads one teacher over all devices, but {runtime.world_size} ranks would each do so; "
            "run one process, or build a --part on each machine."
        )
    if spread and runtime.static_graph:
        raise ConfigError(
            f"device_map=auto moves weights between the layers' forwards, but {runtime.device} runs whole compiled "
            "graphs; drop --device-map, or use --device cuda or cpu."
        )
    quantization = "" if run.quantize_teacher == "none" else run.quantize_teacher
    return Placement(runtime.device, runtime.precision.compute, spread, memory_bytes(run.max_memory), quantization)


def _check_teacher(model: nn.Module, placement: Placement | None) -> None:
    """`models.check_head`, in which a quantised teacher runs for the first time: not every device has every product."""
    try:
        models.check_head(model)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        if placement is None or not placement.quantization:
            raise
        raise ModelError(
            f"bitsandbytes cannot run {type(model).__name__} in {placement.quantization} on {placement.device} "
            f"({type(error).__name__}: {error}); use --device cuda, another width, or drop --quantize-teacher."
        ) from error


def _manifest(run: CacheRun, identity: models.Identity, blocks: Blocks, compute: torch.dtype) -> CacheManifest:
    return CacheManifest(
        teacher=identity.name,
        teacher_digest=identity.weights,
        tokenizer_digest=identity.tokenizer,
        vocab_size=identity.vocab_size,
        tokenizer_size=identity.tokenizer_size,
        teacher_dtype=str(compute).removeprefix("torch."),
        seq_len=run.seq_len,
        rows=len(blocks.input_ids_RT),
        source=source_words(run.data, run.source),
        source_digest=blocks.digest(),
        store=run.store,
        temperatures=run.temperatures,
        top_k=run.top_k,
        logprob_bits=run.logprob_bits,
        samples=run.samples,
        proposal_temperature=run.proposal_temperature,
        sampling_seed=run.sampling_seed,
        rows_per_shard=run.rows_per_shard,
        packing=run.packing,
    )


def _build_digest(run: CacheRun, manifest: CacheManifest, runtime: Runtime) -> bytes:
    """Of all on which the bytes of a shard, and which rank writes it, depend."""
    how = [manifest.identity(), run.part_of, run.build_batch_size, str(runtime.precision.compute)]
    return hashlib.sha256(json.dumps(how, sort_keys=True).encode()).digest()


def qat(run: QatRun, *, launch: Launch = "new") -> RunResult:
    """Train the quantised student."""
    with bar("qat", total=run.loop.max_steps, unit_per_second="steps/s") as update:
        return run_qat(run, _runtime(run), launch=launch, hooks=[BarHook(update)])


def recover(run: RecoveryRun, *, launch: Launch = "new") -> RunResult:
    """Train recovery adapters on the frozen student."""
    with bar("recover", total=run.loop.max_steps, unit_per_second="steps/s") as update:
        return run_recovery(run, _runtime(run), launch=launch, hooks=[BarHook(update)])


def _runtime(run: QatRun | RecoveryRun) -> Runtime:
    execution = run.execution
    return runtime_for(run.place, sync=execution.sync, shard=execution.shard, folder=run.output, many=True)


def evaluate(run: EvalRun) -> Fidelity:
    """Measure one model, student or export against its teacher, and write fidelity.json."""
    check_source(run.data, run.source)
    runtime = runtime_for(run.place)
    if run.output.is_dir() or not run.output.name:
        raise OutputError(f"--output {run.output} is a folder; give the name of a JSON file.")
    check_writable(run.output.parent)
    loaded, student = _evaluated(run)
    teacher = _teacher(run, loaded)
    row = evaluate_model(run, runtime, student, teacher, loaded)
    write_fidelity(run.output, [row])
    return row


def evaluate_model(
    run: EvalRun, runtime: Runtime, student: nn.Module, teacher: nn.Module | None, loaded: models.Loaded
) -> Fidelity:
    """Measure a model in memory on the run's text."""
    windows = eval_windows(run, loaded)
    size = size_of(student, stored_bits=loaded.stored_bits)  # before a device changes dtypes
    for model in (student,) if teacher is None else (student, teacher):
        placed(model, runtime)
    done = 0
    with bar(f"eval {run.stage}", total=windows.input_ids_RT.shape[0]) as update:

        def on_batch(rows: int) -> None:
            nonlocal done
            done += rows
            update(done)

        scores = measure(student, teacher, windows, batch_size=run.eval_batch_size, runtime=runtime, on_batch=on_batch)
    return Fidelity(
        run.stage, size.bits_per_weight, scores.perplexity, scores.kl, scores.top1, size.size_bytes, scores.tokens
    )


def eval_windows(run: EvalRun, loaded: models.Loaded) -> Windows:
    """The run's text as windows of its length and stride, in the model's tokens."""
    models.check_context(loaded.model, run.seq_len)
    # with a stride, W windows read this many rows of tokens
    rows = -(-((run.max_rows - 1) * run.stride) // run.seq_len) + 1 if run.stride else run.max_rows
    is_bounded = run.max_rows and not (run.stride and rows_stay(run.data, run.seq_len))  # which may be short ones
    blocks = _blocks(run, loaded, rows if is_bounded else None)
    if not run.stride:
        return whole_windows(blocks.input_ids_RT, blocks.lengths_R)
    is_valid_RT = torch.arange(run.seq_len) < blocks.lengths_R[:, None]
    stream = blocks.input_ids_RT[is_valid_RT]
    windows = strided_windows(stream, run.seq_len, run.stride)
    first = slice(run.max_rows or None)
    return Windows(windows.input_ids_RT[first], windows.counted_RT[first])


def export(run: ExportRun) -> Path:
    """Write a student in the asked-for format; what is there in the end has been reloaded and compared."""
    if not run.checkpoint:
        raise ConfigError("export needs a student, but checkpoint is empty; give --checkpoint runs/recovery/best.pt.")
    if run.output.exists() and any(run.output.iterdir() if run.output.is_dir() else [run.output]):
        raise OutputError(f"{run.output} exists and is not empty; give a new --output.")
    if run.output.resolve() == Path.cwd():
        raise OutputError(f"--output {run.output} is the current folder; give the name of a new one.")
    check_writable(run.output.parent)
    content = load_checkpoint(Path(run.checkpoint))
    loaded = models.load(run.model or content["identity"]["name"])
    student, _ = load_student(loaded, Path(run.checkpoint))
    partial = run.output.with_name(f".{run.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        verified = _write_export(run, student, loaded, partial)
        if run.output.exists():
            run.output.rmdir()
        os.replace(verified, run.output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return run.output


def _write_export(run: ExportRun, student: nn.Module, loaded: models.Loaded, folder: Path) -> Path:
    """Write and verify in a scratch folder; return what of it is the export."""
    if run.format == "merged":
        if not adapters.has_adapters(student):
            raise ConfigError(f"{run.checkpoint} holds no adapters to merge; use --format dequantized.")
        export_merged(student, loaded.tokenizer, folder)
        verify_export(student, folder, exact=False)
        return folder
    adapter = folder / ADAPTER_FOLDER if run.format == "adapter" or adapters.has_adapters(student) else None
    if adapter is not None:
        dequantized = (
            f"dequantized export of {run.checkpoint}" if run.format == "adapter" else str(run.output.resolve())
        )
        export_adapter(student, adapter, base_name=dequantized)
    export_dequantized(student, loaded.tokenizer, folder)
    verify_export(student, folder, adapter=adapter, exact=True)
    return folder / ADAPTER_FOLDER if run.format == "adapter" else folder


def _evaluated(run: EvalRun) -> tuple[models.Loaded, nn.Module]:
    """The model that is evaluated, and what it was loaded from."""
    if run.checkpoint and run.adapter_dir:
        raise ConfigError("--checkpoint and --adapter both name adapters or a student; give one of them.")
    if run.checkpoint:
        path = Path(run.checkpoint)
        loaded = models.load(run.model or load_checkpoint(path)["identity"]["name"])
        return loaded, load_student(loaded, path)[0]
    if not run.model:
        raise ConfigError("nothing to evaluate; give --model, or --checkpoint of a run.")
    loaded = models.load(run.model)
    student: nn.Module = loaded.model
    return loaded, adapters.load(student, Path(run.adapter_dir)) if run.adapter_dir else student


def _teacher(run: EvalRun, loaded: models.Loaded) -> nn.Module | None:
    """The teacher that was named; for a checkpoint, by default, the model that it was made from."""
    name = run.teacher or (loaded.identity.name if run.checkpoint else "")
    if not name:
        return None
    teacher = models.load(name)
    ours, theirs = loaded.identity, teacher.identity
    if ours.tokenizer != theirs.tokenizer:
        raise ModelError(
            f"teacher {name!r} has tokenizer {theirs.tokenizer}, the model {ours.name!r} has {ours.tokenizer}; give "
            "the teacher that the model comes from."
        )
    if ours.vocab_size != theirs.vocab_size:
        if not differ_in_padding(ours.vocab_size, theirs.vocab_size, ours.tokenizer_size):
            raise ModelError(
                f"teacher {name!r} has vocab_size {theirs.vocab_size}, the model {ours.name!r} has {ours.vocab_size}, "
                f"and their tokenizer has {ours.tokenizer_size} ids, so they differ in more than padding; give the "
                "teacher that the model comes from."
            )
        common = min(ours.vocab_size, theirs.vocab_size)
        log.info(
            "teacher %s has %s ids, the model %s; KL and top-1 are over the %s that both have, of which the tokenizer "
            "has %s", name, f"{theirs.vocab_size:,}", f"{ours.vocab_size:,}", f"{common:,}", f"{ours.tokenizer_size:,}"
        )  # fmt: skip
    return teacher.model
