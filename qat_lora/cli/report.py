"""The demo's picture: loss curves of both stages, and fidelity per stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from qat_lora.evaluate import Fidelity
from qat_lora.train.plot import Rows, blank_figure, draw_losses, write_png


def write_report(path: Path, stages: Sequence[Fidelity], curves: Mapping[str, Rows]) -> None:
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
