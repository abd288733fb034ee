"""The fidelity table for people, and fidelity.json for programs: a list of rows that grows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qat_lora.errors import OutputError
from qat_lora.evaluate.fidelity import Fidelity
from qat_lora.files import write_json

if TYPE_CHECKING:
    from rich.table import Table

CONTEXT = ("stage", "model", "checkpoint", "adapter", "teacher", "data", "seq_len", "stride", "max_rows")


def fidelity_table(rows: Sequence[Fidelity], title: str = "") -> Table:
    """A rich table: stage, bits per weight with adapters apart, perplexity, KL in nats per token, top-1, size."""
    from rich.table import Table

    table = Table(title=title or None, pad_edge=False)  # fits 80 columns
    table.add_column("stage", overflow="fold")
    adapted = any(row.adapter_bits for row in rows)
    for name in ("bits + adapters" if adapted else "bits", "ppl", "KL", "top-1", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.stage,
            f"{row.bits_per_weight - row.adapter_bits:.2f}" + f" + {row.adapter_bits:.2f}" * bool(row.adapter_bits),
            f"{row.perplexity:.2f}",
            "-" if row.kl is None else f"{row.kl:.4f}",
            "-" if row.top1 is None else f"{row.top1:.1%}",
            f"{row.size_bytes / 1e6:.2f}",
        )
    return table


def context(row: dict[str, Any]) -> list[Any]:
    """What was measured: rows that agree in it are one measurement, of which the later replaces the earlier."""
    return [row.get(name) for name in CONTEXT]


def read_fidelity(path: Path) -> list[dict[str, Any]]:
    """The rows of a fidelity.json; none where there is no file. Raises OutputError where it is something else."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except (ValueError, OSError) as error:
        raise OutputError(f"{path} cannot be read ({error}); give another --output.") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "stage" in row for row in rows):
        raise OutputError(f"{path} holds something else than rows of fidelity; give another --output.")
    return rows


def write_fidelity(path: Path, rows: Sequence[Fidelity]) -> list[str]:
    """Add rows to fidelity.json; return the stages whose earlier row, of the same context, was replaced."""
    added = [asdict(row) for row in rows]
    contexts = [context(row) for row in added]
    before = read_fidelity(path)
    write_json(path, [*(row for row in before if context(row) not in contexts), *added])
    return [row["stage"] for row in before if context(row) in contexts]
