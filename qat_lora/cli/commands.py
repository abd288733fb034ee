"""`qat-lora cache`, `qat` and `recover` as functions of a run: the command line and the demo both call these."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat_lora import models
from qat_lora.cache import (
    CacheIndex,
    CacheManifest,
    CacheWriter,
    Part,
    build_cache,
    row_keys,
    source_digest,
    token_arrays,
)
from qat_lora.cli.progress import BarHook, bar
from qat_lora.config import QatRun, RecoveryRun
from qat_lora.config.cache import CacheRun
from qat_lora.data import TokenRows, check_source, fetch_source, read_rows, source_words
from qat_lora.data.saved import SavedRows
from qat_lora.errors import CacheMismatch, ConfigError, ModelError
from qat_lora.models.placement import Placement, memory_bytes, places_of
from qat_lora.runtime import Runtime, runtime_for
from qat_lora.train.opening import Launch
from qat_lora.train.run import RunResult, run_qat, run_recovery
from qat_lora.urls import check_writable, location

log = logging.getLogger(__name__)

# Settings of a build that its manifest records as they are.
_OF_MANIFEST = (
    *("seq_len", "packing", "eval_fraction", "store", "temperatures", "top_k", "logprob_bits", "tail_draws"),
    *("samples", "proposal_temperature", "sampling_seed", "rows_per_shard"),
)


def cache(run: CacheRun) -> CacheIndex:
    """Build the KD cache of a text, or one part of it, or continue one that was interrupted."""
    run.check_store()
    run = dataclasses.replace(run, data=text_for(run.teacher, run.data, "embedded:train"))
    check_source(run.data, run.source)
    folder = run.output if isinstance(run.output, Path) else None  # compiled programs stay on this machine
    runtime = runtime_for(run.place, folder=folder, many=True)
    if runtime.rank == 0:  # another rank's would see, and remove, a folder that is made at this moment
        check_writable(location(run.output))
    placement = _placement(run, runtime)
    with runtime.rank_zero_first("model_download"):
        loaded = models.load(run.teacher, dtype=runtime.precision.compute, placement=placement)
    if placement is not None:
        log.info("teacher in %s: %s", placement.quantization or placement.dtype, places_of(loaded.model))
    _check_teacher(loaded, run, placement)
    with runtime.rank_zero_first("data_download"):
        fetch_source(run.data, run.source)
    saved = _saved_rows(run, loaded)
    rows = saved.get(lambda: _rows(run, loaded))
    manifest = _manifest(run, loaded.identity, rows, runtime.precision.compute)
    if not runtime.all_equal(lambda: _build_digest(run, manifest, runtime)):
        raise CacheMismatch(
            f"the ranks would not build the same cache in {run.output}: their settings, texts or teachers differ; give "
            "all the same command."
        )
    with runtime.rank_zero_first("before_build"):
        writer = CacheWriter(
            run.output, manifest, part=Part(*run.part_of), rank=runtime.rank, world_size=runtime.world_size
        )
    model = models.place(loaded.model, runtime) if placement is None else loaded.model
    head = models.head_parts(model, runtime.precision.compute)

    def hidden_fn(ids_BT: Tensor, position_ids_BT: Tensor | None = None) -> Tensor:
        hidden_SH = models.hidden_states(model, ids_BT, runtime, position_ids_BT=position_ids_BT)
        # a teacher over several devices may end on another than its head's
        return hidden_SH.to(head.weight_VH.device).unflatten(0, ids_BT.shape)

    whose = f" (rank 0 of {runtime.world_size})" if runtime.world_size > 1 else ""
    title = f"cache{f' {run.part}' if run.part else ''}{whose}"
    with bar(title, total=writer.rows, unit_per_second="tokens/s", units_each=run.seq_len) as update:
        build_cache(
            hidden_fn,
            lambda hidden_SH: head(hidden_SH),
            rows,
            writer,
            batch_size=run.build_batch_size,
            device=runtime.device,
            mark_step=lambda: runtime.mark_step("cache"),
            barrier=lambda: runtime.barrier("after_shard"),
            progress=lambda done, total: update(done),
        )
    with runtime.rank_zero_first("before_end"):  # build_cache has waited for all ranks
        index = writer.finish()
    if index.complete:
        saved.forget()
    return index


def text_for(model: str, given: str, own: str) -> str:
    """The text that was given, or `own` for the embedded model; another model's text is never guessed."""
    if not given and model != models.EMBEDDED:
        raise ConfigError(f"no text is given for model {model!r}; add --data path/to/text ({own} is Python's manual).")
    return given or own


def _rows(run: CacheRun, loaded: models.Loaded) -> TokenRows:
    return read_rows(
        run.data,
        run.source,
        loaded.tokenizer,
        run.seq_len,
        packing=run.packing,
        eval_fraction=run.eval_fraction,
        max_rows=run.max_rows or None,
        vocab_size=loaded.identity.vocab_size,
    )


def _saved_rows(run: CacheRun, loaded: models.Loaded) -> SavedRows:
    template = getattr(loaded.tokenizer, "chat_template", None)
    of_model = (loaded.identity.tokenizer, loaded.identity.vocab_size, template)
    how = (run.seq_len, run.packing, run.eval_fraction, run.max_rows, dataclasses.asdict(run.source))
    return SavedRows(run.output, run.data, *of_model, *how)


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


def _check_teacher(loaded: models.Loaded, run: CacheRun, placement: Placement | None) -> None:
    """`Loaded.check`, in which a quantised teacher runs for the first time: not every device has every product."""
    try:
        loaded.check(seq_len=run.seq_len, documents=run.packing == "documents")
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        if placement is None or not placement.quantization:
            raise
        raise ModelError(
            f"bitsandbytes cannot run {type(loaded.model).__name__} in {placement.quantization} on {placement.device} "
            f"({type(error).__name__}: {error}); use --device cuda, another width, or drop --quantize-teacher."
        ) from error


def _manifest(run: CacheRun, identity: models.Identity, rows: TokenRows, compute: torch.dtype) -> CacheManifest:
    same: dict[str, Any] = {name: getattr(run, name) for name in _OF_MANIFEST}
    manifest = CacheManifest(
        teacher=identity.name,
        teacher_digest=identity.weights,
        tokenizer_digest=identity.tokenizer,
        vocab_size=identity.vocab_size,
        tokenizer_size=identity.tokenizer_size,
        teacher_dtype=str(compute).removeprefix("torch."),
        rows=len(rows.input_ids_RT),
        source=source_words(run.data, run.source),
        source_digest="",
        bos=rows.bos,
        answers=rows.answer_RT is not None,
        **same,
    )
    keys = row_keys(token_arrays(rows, manifest))
    return dataclasses.replace(manifest, source_digest=source_digest(keys, run.seq_len))


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
