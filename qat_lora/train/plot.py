"""Loss curves as a picture, drawn without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qat_lora.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, float]]


def draw_losses(axes: Axes, rows: Rows, *, title: str) -> None:
    """Training loss and held-out KL over optimizer steps, on a logarithmic axis where all values allow it."""
    train = [(row["step"], row["loss"]) for row in rows if not math.isnan(row["loss"])]
    held_out = [(row["step"], row["eval_kl"]) for row in rows if not math.isnan(row["eval_kl"])]
    if train:
        axes.plot(*zip(*train, strict=True), linewidth=1.0, label="training loss")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", markersize=4, label="held-out KL")
    if all(value > 0 for _, value in [*train, *held_out]):
        axes.set_yscale("log")
    axes.set(title=title, xlabel="optimizer step", ylabel="nats per token")
    axes.grid(visible=True, alpha=0.3)
    if train or held_out:
        axes.legend()


def write_loss_png(path: Path, rows: Rows, *, title: str) -> None:
    """Draw one run's curves into a PNG."""
    figure = blank_figure(width=7.0, height=4.0)
    draw_losses(figure.subplots(), rows, title=title)
    write_png(figure, path)


def blank_figure(*, width: float, height: float) -> Figure:
    """A figure of that many inches that belongs to no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure whole or not at all."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, lambda stream: stream.write(buffer.getvalue()))
