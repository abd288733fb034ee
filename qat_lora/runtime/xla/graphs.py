"""Where the lazy graph is cut, and what is compiled there.

Knows torch_xla's words (``PT_XLA_DEBUG_LEVEL=1`` with ``PT_XLA_DEBUG_FILE``) and nothing else of it: one record per
compilation, at no cost to a step that compiles nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import replace
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

log = logging.getLogger(__name__)

_EXPECTATION = (
    "the first step compiles its graphs, minutes for a large model, and prints nothing meanwhile; later steps, and "
    "later launches where the compilation cache is on, do not"
)
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


class Compilations:
    """Every compilation of a process: at which cut it was, and what torch_xla wrote about it.

    A first run is told which graph is being compiled, how long it took, and what to expect of the first training step.

    Args:
        count: how many compilations there were so far.
        log_path: the compile log; without one the number and the phases are known, but no more.
    """

    def __init__(self, count: Callable[[], int], log_path: Path | None) -> None:
        self._count, self._log_path = count, log_path
        self._phases = [""] * count()
        self._graphs: list[CompiledGraph] = []
        self._cut: set[str] = set()

    @contextlib.contextmanager
    def at(self, phase: Phase) -> Iterator[bool]:
        """Cut a phase in the block; yield whether this is its first time, when the device should be waited for."""
        self._note("a host read")
        is_first = phase not in self._cut
        if is_first:
            if phase in _STEP_PHASES and not self._cut & _STEP_PHASES:
                log.info(_EXPECTATION)
            self._cut.add(phase)
            before, started = self._count(), time.perf_counter()
            log.info("compiling the %s graph ...", phase)
        yield is_first
        if is_first:
            compiled, seconds = self._count() - before, time.perf_counter() - started
            log.info("%s: %.1f s, %d graph%s compiled", phase, seconds, compiled, "" if compiled == 1 else "s")
        self._note(phase)

    def _note(self, phase: str) -> None:
        """Say that what was compiled since the last note was compiled at this phase."""
        self._phases += [phase] * (self._count() - len(self._phases))

    def all(self) -> list[CompiledGraph]:
        """All so far, in order. The log is read where something was compiled since it was read last."""
        self._note("a host read")
        if len(self._graphs) != len(self._phases):
            records = parse_compilations(self._log_path.read_text(errors="replace")) if self._log_path else []
            blank = [CompiledGraph("")] * len(self._phases)
            known = [*blank, *records][-len(blank) :]
            self._graphs = [replace(graph, phase=phase) for graph, phase in zip(known, self._phases, strict=True)]
        return self._graphs


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
    def first(pattern: str) -> str:
        found = re.search(pattern, block, re.DOTALL)
        return found.group(1) if found else ""

    graph_hash = first(r"Graph Hash: (\w+)")
    frames = first(r"Python Frame Triggered Execution: \n(.*?)Compilation Analysis: -----").splitlines()
    lines = [line.split(":", 1)[1].strip() for line in frames if ":" in line]
    return CompiledGraph(
        phase="",
        hash=graph_hash and graph_hash.zfill(32),  # printed without leading zeros
        inputs=int(first(r"Number of Graph Inputs: (\d+)") or 0),
        outputs=int(first(r"Number of Graph Outputs: (\d+)") or 0),
        bytes_by_use={use: round(float(first(rf"{label}: ([\d.]+) GB") or 0) * 2**30) for use, label in _BYTES.items()},
        frames=tuple(line for line in lines if "site-packages" not in line),
    )
