"""The fidelity table, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from qat_lora.evaluate.fidelity import Fidelity
from qat_lora.files import write_json

if TYPE_CHECKING:
    from rich.table import Table


def fidelity_table(rows: Sequence[Fidelity], title: str = "") -> Table:
    """A rich table: stage, bits/weight, ppl, KL in nats per token, top-1 agreement, size in MB (10^6 bytes)."""
    from rich.table import Table

    table = Table(title=title or None)
    table.add_column("stage", no_wrap=True)
    for name in ("bits/weight", "ppl", "KL(teacher||student)", "top-1 agreement", "size MB"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(
            row.stage,
            f"{row.bits_per_weight:.2f}",
            f"{row.perplexity:.2f}",
            "-" if row.kl is None else f"{row.kl:.4f}",
            "-" if row.top1 is None else f"{row.top1:.1%}",
            f"{row.size_bytes / 1e6:.2f}",
        )
    return table


def write_fidelity(path: Path, rows: Sequence[Fidelity]) -> None:
    """Write fidelity.json: a list of rows with the fields of `Fidelity`."""
    write_json(path, [asdict(row) for row in rows])
