"""The demo: all five steps on the embedded teacher, one table and one picture at the end.

The numbers of steps are chosen so that the whole takes less than five minutes on two cores. Everything it does is
what the commands do; the one thing of its own is the report.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich import print as rich_print

from qat_lora import models
from qat_lora.cli import commands
from qat_lora.cli.evaluation import evaluate
from qat_lora.cli.exporting import export
from qat_lora.config import EvalRun, ExportRun, LoopConfig, PlaceConfig, RecoveryRun, presets
from qat_lora.config.cache import CacheRun
from qat_lora.errors import ConfigError, OutputError
from qat_lora.evaluate import Fidelity, fidelity_table, write_fidelity
from qat_lora.files import check_writable, write_json
from qat_lora.runtime import runtime_for
from qat_lora.settings import override
from qat_lora.train.plot import Rows, blank_figure, draw_losses, write_png

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
    runtime_for(place)  # a device that is not there is refused before anything is removed
    folder, max_rows = output / "cache", max(64, round(CACHE_ROWS * rows_factor))
    loops = [LoopConfig(max_steps=max(1, round(n * steps_factor)), save_every=0) for n in (QAT_STEPS, RECOVERY_STEPS)]
    qat_run = presets.qat_run(preset, cache_dir=folder, output=output / "qat", loop=loops[0], place=place)
    check_writable(output)
    _clear(output)
    write_json(output / MARKER, {"preset": preset, "steps_factor": steps_factor, "rows_factor": rows_factor})
    commands.cache(
        CacheRun(data="embedded:train", output=folder, seq_len=SEQ_LEN, max_rows=max_rows, top_k=64, place=place)
    )
    qat = commands.qat(qat_run)
    recovery = commands.recover(
        RecoveryRun(checkpoint=str(qat.best), cache_dir=folder, output=output / "recovery", loop=loops[1], place=place)
    )
    exported = export(ExportRun(checkpoint=str(recovery.best), format="dequantized", output=output / "export"))
    table = output / "fidelity.json"
    windows = max(8, round(EVAL_ROWS * min(1.0, rows_factor)))
    text = EvalRun(data="embedded:eval", seq_len=SEQ_LEN, max_rows=windows, output=str(table), place=place)
    of_qat, _ = evaluate(replace(text, checkpoint=str(qat.best)))  # with the teacher and the rounded start
    of_recovery, _ = evaluate(replace(text, checkpoint=str(recovery.best), rtn=False))
    of_export, _ = evaluate(replace(text, model=str(exported), teacher=models.EMBEDDED, stage="exported (reloaded)"))
    rows = [*of_qat, of_recovery[-1], of_export[-1]]
    write_fidelity(table, rows)
    _draw(output / "report.png", rows, {"qat": qat.losses.rows, "recovery": recovery.losses.rows})
    rich_print(fidelity_table(rows, title=f"embedded teacher, {preset}, held-out text"))
    minutes = (time.perf_counter() - started) / 60
    print(f"{table}, {output}/report.png, {exported}  ({minutes:.1f} min)")  # a path is never wrapped
    return rows


def _clear(output: Path) -> None:
    """Remove what an earlier demo wrote, and nothing else."""
    if output.exists() and any(output.iterdir()) and not (output / MARKER).is_file():
        raise OutputError(f"{output} holds something that is no demo; give another --output.")
    for name in OWN_FOLDERS:
        shutil.rmtree(output / name, ignore_errors=True)
    for name in OWN_FILES:
        (output / name).unlink(missing_ok=True)


def _draw(path: Path, stages: Sequence[Fidelity], curves: Mapping[str, Rows]) -> None:
    """Draw the curves side by side, and below them KL and top-1 agreement of every stage."""
    figure = blank_figure(width=5.5 * len(curves), height=7.5)
    top, bottom = figure.subfigures(2, 1, squeeze=False)[:, 0]
    for axes, (name, rows) in zip(top.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        draw_losses(axes, rows, title=name)
    kl_axes, top1_axes = bottom.subplots(1, 2)
    stages = [row for row in stages if row.kl is not None]
    names = [f"{row.stage}\n{row.bits_per_weight:.2f} bits" for row in stages]
    bars = kl_axes.bar(names, [row.kl for row in stages], color="tab:red")
    kl_axes.bar_label(bars, [f"{row.kl:.3f}" for row in stages])
    kl_axes.set(title="KL(teacher || student), nats per token", ylabel="lower is better")
    bars = top1_axes.bar(names, [100 * (row.top1 or 0.0) for row in stages], color="tab:blue")
    top1_axes.bar_label(bars, [f"{row.top1:.1%}" for row in stages])
    top1_axes.set(title="top-1 agreement with the teacher", ylabel="%", ylim=(0, 110))
    kl_axes.margins(y=0.12)  # room for the numbers above the bars
    for axes in (kl_axes, top1_axes):
        axes.tick_params(axis="x", labelsize=7)
    write_png(figure, path)
