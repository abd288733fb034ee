"""The demo: all five steps on the embedded teacher, one table and one picture at the end.

The numbers of steps are chosen so that the whole takes less than five minutes on two cores. Everything it does is
what the commands do; the one thing of its own is the report.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import print as rich_print
from torch import nn

from qat_lora import adapters, models
from qat_lora.cli import commands
from qat_lora.cli.evaluation import eval_windows, measure_rows
from qat_lora.cli.exporting import export
from qat_lora.cli.report import write_report
from qat_lora.config import EvalRun, ExportRun, LoopConfig, PlaceConfig, QatRun, RecoveryRun, presets
from qat_lora.config.cache import CacheRun
from qat_lora.errors import ConfigError, OutputError
from qat_lora.evaluate import Fidelity, fidelity_table, write_fidelity
from qat_lora.export import ADAPTER_FOLDER, BASE_FOLDER
from qat_lora.files import check_writable, write_json
from qat_lora.runtime import Runtime, runtime_for
from qat_lora.settings import override
from qat_lora.train.run import RunResult
from qat_lora.train.student import load_student, round_to_nearest

MARKER = "demo.json"  # says that a folder is a demo's, to be made anew
OWN_FOLDERS = ("cache", "qat", "recovery", "export")
OWN_FILES = ("fidelity.json", "report.png", MARKER)
SEQ_LEN = 128
CACHE_ROWS = 4096
EVAL_ROWS = 128
QAT_STEPS = 350
RECOVERY_STEPS = 450


def demo(
    output: Path, *, preset: str, device: str, steps_factor: float = 1.0, rows_factor: float = 1.0
) -> list[Fidelity]:
    """Run the demo into a folder of its own, which is made anew, and return the rows of its table."""
    started = time.perf_counter()
    for name, factor in (("steps", steps_factor), ("rows", rows_factor)):
        if not 0 < factor <= 1000:
            raise ConfigError(f"{name}_factor must lie in 0..1000, but --{name}-factor={factor}; use 1.")
    place = override(PlaceConfig(), "device", device)
    qat_run = _qat_run(output, preset, place, steps_factor)
    runtime = runtime_for(place)
    check_writable(output)
    _clear(output)
    write_json(output / MARKER, {"preset": preset, "steps_factor": steps_factor, "rows_factor": rows_factor})
    commands.cache(_cache_run(output, place, rows_factor))
    qat = commands.qat(qat_run)
    recovery = commands.recover(_recovery_run(output, qat, place, steps_factor))
    exported = export(ExportRun(checkpoint=str(recovery.best), format="dequantized", output=output / "export"))
    max_rows = max(8, round(EVAL_ROWS * min(1.0, rows_factor)))
    rows = _fidelity(qat_run, qat, recovery, exported, runtime, max_rows)
    write_fidelity(output / "fidelity.json", rows)
    write_report(output / "report.png", rows, {"qat": qat.losses.rows, "recovery": recovery.losses.rows})
    rich_print(fidelity_table(rows, title=f"embedded teacher, {preset}, held-out text"))
    minutes = (time.perf_counter() - started) / 60
    print(f"{output}/fidelity.json, {output}/report.png, {exported}  ({minutes:.1f} min)")  # a path is never wrapped
    return rows


def _clear(output: Path) -> None:
    """Remove what an earlier demo wrote, and nothing else."""
    if output.exists() and any(output.iterdir()) and not (output / MARKER).is_file():
        raise OutputError(f"{output} holds something that is no demo; give another --output.")
    for name in OWN_FOLDERS:
        shutil.rmtree(output / name, ignore_errors=True)
    for name in OWN_FILES:
        (output / name).unlink(missing_ok=True)


def _cache_run(output: Path, place: PlaceConfig, rows_factor: float) -> CacheRun:
    return CacheRun(
        data="embedded:train",
        output=output / "cache",
        seq_len=SEQ_LEN,
        max_rows=max(64, round(CACHE_ROWS * rows_factor)),
        top_k=64,
        place=place,
    )


def _qat_run(output: Path, preset: str, place: PlaceConfig, steps_factor: float) -> QatRun:
    loop = LoopConfig(max_steps=max(1, round(QAT_STEPS * steps_factor)), save_every=0)
    return presets.qat_run(preset, cache_dir=output / "cache", output=output / "qat", loop=loop, place=place)


def _recovery_run(output: Path, qat: RunResult, place: PlaceConfig, steps_factor: float) -> RecoveryRun:
    return RecoveryRun(
        checkpoint=str(qat.best),
        cache_dir=output / "cache",
        output=output / "recovery",
        loop=LoopConfig(max_steps=max(1, round(RECOVERY_STEPS * steps_factor)), save_every=0),
        place=place,
    )


def _fidelity(
    qat_run: QatRun, qat: RunResult, recovery: RunResult, exported: Path, runtime: Runtime, max_rows: int
) -> list[Fidelity]:
    """Every stage on the same held-out text against the same teacher; students are read back from their files."""
    run = EvalRun(model=models.EMBEDDED, data="embedded:eval", seq_len=SEQ_LEN, max_rows=max_rows)
    teacher = models.load(models.EMBEDDED)
    windows = eval_windows(run, teacher)

    def measured(stage: str, student: nn.Module, loaded: models.Loaded, **of: Any) -> list[Fidelity]:
        return measure_rows(replace(run, stage=stage, **of), runtime, student, teacher, loaded, windows)

    def checkpoint(stage: str, path: Path) -> Fidelity:
        fresh = models.load(models.EMBEDDED)
        return measured(stage, load_student(fresh, path)[0], fresh, checkpoint=str(path))[-1]

    rounded = models.load(models.EMBEDDED)
    round_to_nearest(rounded.model, qat_run.scheme)
    reloaded, adapter = models.load(str(exported / BASE_FOLDER)), exported / ADAPTER_FOLDER
    return [
        *measured("rtn", rounded.model, rounded),  # the teacher's row comes with it
        checkpoint("qat", qat.best),
        checkpoint("qat+lora", recovery.best),
        measured(
            "exported (reloaded)", adapters.load(reloaded.model, adapter), reloaded,
            model=str(exported / BASE_FOLDER), adapter_dir=str(adapter),
        )[-1],
    ]  # fmt: skip
