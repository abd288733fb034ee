"""What torch_xla says about its compilations, read from the file that it writes them to; and where the graph is cut.

Knows torch_xla's words (``PT_XLA_DEBUG_LEVEL=1`` with ``PT_XLA_DEBUG_FILE``) and nothing else of it: one record per
compilation, at no cost to a step that compiles nothing.
"""

from __future__ import annotations

import atexit
import re
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from qat_lora.config import Sync
from qat_lora.runtime.base import CompiledGraph, Phase

# Phases within a training step, which `--sync` chooses from; all others are always cut.
_STEP_PHASES = frozenset(
    ("counts", "anchor forward", "forward", "anchor backward", "backward", "micro-batch", "optimizer")
)
_CUTS: dict[Sync, frozenset[str]] = {
    "phase": _STEP_PHASES - {"micro-batch"},
    "step": frozenset(("counts", "micro-batch", "optimizer")),
    "optimizer": frozenset(("optimizer",)),
}

_LEVEL, _FILE = "PT_XLA_DEBUG_LEVEL", "PT_XLA_DEBUG_FILE"
_BYTES = {
    "argument": "Graph input size",
    "output": "Graph output size",
    "alias": "Aliased Input size",
    "temporary": "Intermediate tensor size",
    "program": "Compiled program size",
}


def cuts(sync: Sync, phase: Phase) -> bool:
    """Whether the graph is cut after a phase."""
    return phase not in _STEP_PHASES or phase in _CUTS[sync]


def compile_log(environment: MutableMapping[str, str]) -> Path | None:
    """Ask torch_xla, before its first computation, to write down every compilation; return the file.

    None where the user has set ``PT_XLA_DEBUG`` to see the same on the terminal, or a level of 0 beside a file; a file
    that the user names is used otherwise.
    """
    if _FILE in environment:
        return Path(environment[_FILE]) if environment.setdefault(_LEVEL, "1") != "0" else None
    if environment.get("PT_XLA_DEBUG", "0") != "0" or environment.get(_LEVEL, "0") != "0":
        return None
    with tempfile.NamedTemporaryFile(prefix="qat_lora_compilations_", suffix=".txt", delete=False) as file:
        environment[_LEVEL], environment[_FILE] = "1", file.name
    path = Path(environment[_FILE])
    atexit.register(path.unlink, missing_ok=True)
    return path


def parse_compilations(text: str) -> list[CompiledGraph]:
    """The records of a compile log, in order; their phase is left empty."""
    return [_parsed(block) for block in re.split(r"(?=Compilation Analysis: Compilation Cause)", text)[1:]]


def _parsed(block: str) -> CompiledGraph:
    def number(label: str) -> int:
        found = re.search(rf"{label}: (\d+)", block)
        return int(found.group(1)) if found else 0

    def size(label: str) -> int:
        found = re.search(rf"{label}: ([\d.]+) GB", block)
        return round(float(found.group(1)) * 2**30) if found else 0

    graph_hash = re.search(r"Graph Hash: (\w+)", block)
    frames = re.search(r"Python Frame Triggered Execution: \n(.*?)Compilation Analysis: -----", block, re.DOTALL)
    lines = [line.split(":", 1)[1].strip() for line in (frames.group(1) if frames else "").splitlines() if ":" in line]
    return CompiledGraph(
        phase="",
        hash=graph_hash.group(1).zfill(32) if graph_hash else "",  # printed without leading zeros
        inputs=number("Number of Graph Inputs"),
        outputs=number("Number of Graph Outputs"),
        bytes_by_use={use: size(label) for use, label in _BYTES.items()},
        frames=tuple(line for line in lines if "site-packages" not in line),
    )
