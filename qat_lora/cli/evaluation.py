"""`qat-lora eval`: one model, student or export on a text, beside its teacher and the rounded start."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import nn

from qat_lora import adapters, models
from qat_lora.cli.commands import text_for
from qat_lora.cli.progress import bar
from qat_lora.config import EvalRun, QuantScheme
from qat_lora.data import check_source, source_words
from qat_lora.errors import ConfigError, ModelError, OutputError
from qat_lora.evaluate import Fidelity, Windows, measure, read_fidelity, size_of, text_windows
from qat_lora.evaluate.table import context
from qat_lora.export import ADAPTER_FOLDER, BASE_FOLDER
from qat_lora.files import check_writable
from qat_lora.kd.vocabulary import differ_in_padding
from qat_lora.runtime import Runtime, runtime_for
from qat_lora.settings import from_json
from qat_lora.train.checkpoint import load_checkpoint
from qat_lora.train.folder import versions
from qat_lora.train.student import load_student, round_to_nearest
from qat_lora.urls import is_remote

log = logging.getLogger(__name__)


def evaluate(run: EvalRun) -> tuple[list[Fidelity], Path]:
    """Measure on the run's text; return rows for teacher, rounded start and model, and the file that they belong in.

    The teacher is there where it is known, the rounded start for a checkpoint, unless the file has its row already.
    """
    run, content = _completed(run)
    check_source(run.data, run.source)
    runtime = runtime_for(run.place)
    path = Path(run.output)
    if path.is_dir() or is_remote(run.output):
        raise OutputError(f"--output {run.output} is a folder or a URL; give the name of a JSON file.")
    before = read_fidelity(path)
    check_writable(path.parent)
    loaded = models.load(run.model)
    student: nn.Module = loaded.model
    if run.checkpoint:
        student = load_student(loaded, Path(run.checkpoint))[0]
    elif run.adapter_dir:
        student = adapters.load(student, Path(run.adapter_dir))
    teacher = _teacher(run, loaded)
    windows = eval_windows(run, loaded)
    log.info(
        "eval: %s against %s on %s, %d windows of %d tokens",
        run.checkpoint or run.adapter_dir or run.model, run.teacher or "no teacher", run.data,
        len(windows.input_ids_RT), run.seq_len,
    )  # fmt: skip
    rows = measure_rows(run, runtime, student, teacher, loaded, windows, step=content.get("metrics", {}).get("step"))
    if run.rtn and content and teacher is not None:
        start = replace(run, stage="rtn")
        if context(asdict(_row(start, teacher))) not in map(context, before):
            rounded = models.load(run.model)
            round_to_nearest(rounded.model, from_json(QuantScheme, content["scheme"]))
            rows.insert(1, measure_rows(start, runtime, rounded.model, teacher, rounded, windows)[-1])
    return rows, path


def measure_rows(
    run: EvalRun,
    runtime: Runtime,
    student: nn.Module,
    teacher: models.Loaded | None,
    loaded: models.Loaded,
    windows: Windows | None = None,
    *,
    step: int | None = None,
) -> list[Fidelity]:
    """The row of the teacher, if there is one, and the row of a model in memory, which comes last."""
    windows = windows or eval_windows(run, loaded)
    against = None if teacher is None else teacher.model
    size = size_of(student, stored_bits=loaded.stored_bits)  # before a device changes dtypes
    teacher_size = None if teacher is None else size_of(teacher.model, stored_bits=teacher.stored_bits)
    for model in (student, against):
        if model is not None:
            models.place(model, runtime)
    with bar(f"eval {run.stage}", total=len(windows.input_ids_RT)) as update:
        scores, of_teacher = measure(
            student, against, windows, batch_size=run.eval_batch_size, runtime=runtime, on_rows=update
        )
    row = replace(_row(run, teacher), step=step, **vars(size), **vars(scores))
    if teacher is None or teacher_size is None or of_teacher is None:
        return [row]
    whole = replace(row, stage="teacher", model=teacher.identity.name, checkpoint="", adapter="", step=None)
    return [replace(whole, **vars(teacher_size), **vars(of_teacher)), row]


def _row(run: EvalRun, teacher: models.Loaded | None) -> Fidelity:
    """A row that says what is measured, and nothing yet of the result."""
    return Fidelity(
        stage=run.stage,
        model=run.model,
        checkpoint=run.checkpoint,
        adapter=run.adapter_dir,
        teacher="" if teacher is None else teacher.identity.name,
        data=source_words(run.data, run.source),
        seq_len=run.seq_len,
        stride=run.stride,
        max_rows=run.max_rows,
        versions=versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def eval_windows(run: EvalRun, loaded: models.Loaded) -> Windows:
    """The run's text as windows of its length and stride, in the model's tokens."""
    loaded.check(seq_len=run.seq_len)
    return text_windows(
        run.data,
        run.source,
        loaded.tokenizer,
        run.seq_len,
        stride=run.stride,
        max_rows=run.max_rows or None,
        vocab_size=loaded.identity.vocab_size,
    )


def _completed(run: EvalRun) -> tuple[EvalRun, dict[str, Any]]:
    """The run with what it leaves open filled in from its checkpoint or export, and the checkpoint, if any."""
    if run.checkpoint and run.adapter_dir:
        raise ConfigError("--checkpoint and --adapter both name adapters or a student; give one of them.")
    if not run.checkpoint and not run.model:
        raise ConfigError("nothing to evaluate; give --model, or --checkpoint of a run.")
    content = load_checkpoint(Path(run.checkpoint)) if run.checkpoint else {}
    model, adapter = run.model or content["identity"]["name"], run.adapter_dir
    if all((Path(model) / part).is_dir() for part in (BASE_FOLDER, ADAPTER_FOLDER)):  # an export of two folders
        model, adapter = str(Path(model) / BASE_FOLDER), adapter or str(Path(model) / ADAPTER_FOLDER)
    folder = Path(run.checkpoint).parent if run.checkpoint else Path()
    return replace(
        run,
        model=model,
        adapter_dir=adapter,
        teacher=run.teacher or (model if run.checkpoint else ""),
        data=text_for(model, run.data, "embedded:eval"),
        seq_len=run.seq_len or content.get("cache", {}).get("seq_len", 128),
        stage=run.stage or {"qat": "qat", "recover": "qat+lora"}.get(content.get("kind", ""), "model"),
        output=run.output or str(folder / "fidelity.json"),
    ), content


def _teacher(run: EvalRun, loaded: models.Loaded) -> models.Loaded | None:
    """The teacher that was named; for a checkpoint, by default, the model that it was made from."""
    if not run.teacher:
        return None
    teacher = models.load(run.teacher)
    ours, theirs = loaded.identity, teacher.identity
    if ours.tokenizer != theirs.tokenizer:
        raise ModelError(
            f"teacher {run.teacher!r} has tokenizer {theirs.tokenizer}, the model {ours.name!r} has {ours.tokenizer}; "
            "give the teacher that the model comes from."
        )
    if ours.vocab_size != theirs.vocab_size:
        if not differ_in_padding(ours.vocab_size, theirs.vocab_size, ours.tokenizer_size):
            raise ModelError(
                f"teacher {run.teacher!r} has vocab_size {theirs.vocab_size}, the model {ours.name!r} has "
                f"{ours.vocab_size}, and their tokenizer has {ours.tokenizer_size} ids, so they differ in more than "
                "padding; give the teacher that the model comes from."
            )
        common = min(ours.vocab_size, theirs.vocab_size)
        log.info(
            "teacher %s has %s ids, the model %s; KL and top-1 are over the %s that both have, of which the tokenizer "
            "has %s", run.teacher, f"{theirs.vocab_size:,}", f"{ours.vocab_size:,}", f"{common:,}",
            f"{ours.tokenizer_size:,}",
        )  # fmt: skip
    return teacher
