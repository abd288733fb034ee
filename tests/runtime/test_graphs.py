"""Where the graph is cut, what torch_xla writes of its compilations, and what a first run is told."""

from __future__ import annotations

import contextlib
import json
import logging
from types import SimpleNamespace
from typing import get_args

import pytest

from qat_lora.config import Sync
from qat_lora.runtime.base import CompiledGraph, Phase
from qat_lora.runtime.xla import graphs
from qat_lora.runtime.xla.graphs import _EXPECTATION, Compilations, compile_log, cuts, parse_compilations

ALWAYS = {"set-up", "anchor rows", "evaluation", "cache"}
ACTS = {"anchor forward", "forward", "anchor backward", "backward"}
CUTS = {
    "phase": ALWAYS | ACTS | {"counts", "optimizer"},
    "step": ALWAYS | {"counts", "micro-batch", "optimizer"},
    "optimizer": ALWAYS | {"optimizer"},
}


@pytest.mark.parametrize("sync", get_args(Sync))
def test_where_the_graph_is_cut(sync) -> None:
    assert {phase for phase in get_args(Phase) if cuts(sync, phase)} == CUTS[sync]


# What torch_xla 2.9 wrote on PJRT CPU, with other numbers and shorter paths; the third record is cut off, and _ is a
# blank at the end of a line.
LOG = """
Compilation Analysis: ================================================================================
Compilation Analysis: Compilation Cause
Compilation Analysis:   user torch_xla.sync
Compilation Analysis: Graph Info:_
Compilation Analysis:   Graph Hash: 4e0b183f220f11d155665917c1e6b7cd
Compilation Analysis:   Number of Graph Inputs: 117
Compilation Analysis:   Number of Graph Outputs: 2
Compilation Analysis: Python Frame Triggered Execution:_
Compilation Analysis:   sync (/env/lib/python3.11/site-packages/torch_xla/torch_xla.py:87)
Compilation Analysis:   mark_step (/work/qat_lora/runtime/xla.py:92)
Compilation Analysis:   train_step (/work/qat_lora/train/step.py:40)
Compilation Analysis: --------------------------------------------------------------------------------
Compilation Analysis: ================================================================================

Computation hash: f8ec1f3cc62cf4a18be9add6841f5332

Post Compilation Analysis: ================================================================================
Post Compilation Analysis: Graph input size: 1.250000 GB
Post Compilation Analysis: Graph output size: 0.500000 GB
Post Compilation Analysis: Aliased Input size: 0.250000 GB
Post Compilation Analysis: Intermediate tensor size: 16.400000 GB
Post Compilation Analysis: Compiled program size: 0.000000 GB
Post Compilation Analysis: --------------------------------------------------------------------------------
Post Compilation Analysis: ================================================================================

Compilation Analysis: ================================================================================
Compilation Analysis: Compilation Cause
Compilation Analysis:   most likely user code trying to access tensor value before torch_xla.sync
Compilation Analysis: Graph Info:_
Compilation Analysis:   Graph Hash: a4ac7b5178773bfbee490c1388d65824
Compilation Analysis:   Number of Graph Inputs: 2
Compilation Analysis:   Number of Graph Outputs: 1
Compilation Analysis: Python Frame Triggered Execution:_
Compilation Analysis:   <module> (/work/probe.py:8)
Compilation Analysis: --------------------------------------------------------------------------------
Compilation Analysis: ================================================================================

Computation hash: 2599f0fac6a532e8cbbc47431ec4ab38

Compilation Analysis: ================================================================================
Compilation Analysis: Compilation Cause
Compilation Analysis:   user torch_xla.sync
Compilation Analysis: Graph Info:_
Compilation Analysis:   Graph Ha""".replace("_\n", " \n")


def test_the_compile_log_is_read_record_by_record() -> None:
    first, second, cut_off = parse_compilations(LOG)
    gib = 2**30
    assert first == CompiledGraph(
        phase="",
        hash="4e0b183f220f11d155665917c1e6b7cd",
        inputs=117,
        outputs=2,
        bytes_by_use={
            "argument": 5 * gib // 4, "output": gib // 2, "alias": gib // 4, "temporary": round(16.4 * gib),
            "program": 0,
        },
        frames=("mark_step (/work/qat_lora/runtime/xla.py:92)", "train_step (/work/qat_lora/train/step.py:40)"),
    )  # fmt: skip
    assert (second.hash, second.inputs, second.outputs) == ("a4ac7b5178773bfbee490c1388d65824", 2, 1)
    assert second.frames == ("<module> (/work/probe.py:8)",)
    assert set(second.bytes_by_use.values()) == {0}, "sizes of the record before it are not its own"
    assert (cut_off.hash, cut_off.inputs, cut_off.frames) == ("", 0, ())
    json.dumps(first.__dict__)


@pytest.mark.parametrize("text", ["", "\n", "Computation hash: f8ec\n"])
def test_a_log_without_compilations_has_none(text) -> None:
    assert parse_compilations(text) == []


@pytest.fixture
def at_exit(monkeypatch) -> list:
    """What is to be done at the end of the process."""
    due: list = []
    register = lambda fn, **settings: due.append(lambda: fn(**settings))  # noqa: E731
    monkeypatch.setattr(graphs, "atexit", SimpleNamespace(register=register))
    return due


def test_a_log_of_its_own_is_asked_for_and_removed_at_the_end(at_exit) -> None:
    environment: dict[str, str] = {}
    path = compile_log(environment)
    assert path is not None and path.read_text() == ""
    assert environment == {"PT_XLA_DEBUG_LEVEL": "1", "PT_XLA_DEBUG_FILE": str(path)}
    assert compile_log(environment) == path, "a second runtime of the process reads the same"
    assert len(at_exit) == 1
    at_exit[0]()
    assert not path.exists()
    at_exit[0]()


@pytest.mark.parametrize("asked", [{"PT_XLA_DEBUG": "1"}, {"PT_XLA_DEBUG_LEVEL": "2"}, {"PT_XLA_DEBUG": "true"}])
def test_a_user_who_wants_the_log_on_the_terminal_gets_it_there(asked, at_exit) -> None:
    environment = dict(asked)
    assert compile_log(environment) is None
    assert environment == asked and not at_exit


@pytest.mark.parametrize("off", [{"PT_XLA_DEBUG": "0"}, {"PT_XLA_DEBUG_LEVEL": "0"}])
def test_a_debug_variable_of_0_asks_for_nothing(off, at_exit) -> None:
    environment = dict(off)
    path = compile_log(environment)
    assert path is not None and environment["PT_XLA_DEBUG_LEVEL"] == "1"
    path.unlink()


@pytest.mark.parametrize("level", [None, "1", "2"])
def test_a_file_that_the_user_names_is_read_and_never_removed(level, at_exit, tmp_path) -> None:
    environment = {"PT_XLA_DEBUG_FILE": str(tmp_path / "log.txt")} | ({"PT_XLA_DEBUG_LEVEL": level} if level else {})
    assert compile_log(environment) == tmp_path / "log.txt"
    assert environment == {"PT_XLA_DEBUG_FILE": str(tmp_path / "log.txt"), "PT_XLA_DEBUG_LEVEL": level or "1"}
    assert not at_exit


def test_a_file_beside_a_level_of_0_is_never_written_and_so_never_read(at_exit) -> None:
    asked = {"PT_XLA_DEBUG_FILE": "log.txt", "PT_XLA_DEBUG_LEVEL": "0"}
    environment = dict(asked)
    assert compile_log(environment) is None
    assert environment == asked and not at_exit


def messages(caplog) -> list[str]:
    """What is said of graphs; what is to be expected of them has a test of its own."""
    return [record.getMessage() for record in caplog.records if record.getMessage() != _EXPECTATION]


def enter(phases: Compilations, phase: Phase, compiles=lambda: None) -> bool:
    with phases.at(phase) as first_time:
        compiles()
    return first_time


def test_each_phase_is_announced_once_and_its_compilations_are_counted(caplog) -> None:
    count = [3]

    def compiles(graphs: int):
        return lambda: count.__setitem__(0, count[0] + graphs)

    phases = Compilations(lambda: count[0], None)
    with caplog.at_level(logging.INFO):
        assert enter(phases, "forward", compiles(1))
        assert enter(phases, "backward", compiles(2))
        assert not enter(phases, "forward", compiles(5))
        assert not enter(phases, "backward")
    said = messages(caplog)
    assert len(said) == 4
    assert said[0] == "compiling the forward graph ..."
    assert said[1].startswith("forward: ") and said[1].endswith(" s, 1 graph compiled")
    assert said[2] == "compiling the backward graph ..."
    assert said[3].startswith("backward: ") and said[3].endswith(" s, 2 graphs compiled")


def test_the_announcement_comes_before_the_wait(caplog) -> None:
    phases = Compilations(lambda: 0, None)
    with caplog.at_level(logging.INFO), phases.at("optimizer"):
        assert messages(caplog) == ["compiling the optimizer graph ..."]


def test_what_to_expect_is_said_once_before_the_first_graph_of_a_step(caplog) -> None:
    phases = Compilations(lambda: 0, None)
    with caplog.at_level(logging.INFO):
        for phase in ("set-up", "anchor rows", "cache", "evaluation"):
            enter(phases, phase)
        assert _EXPECTATION not in caplog.text
        for phase in ("counts", "forward", "backward", "optimizer"):
            enter(phases, phase)
    said = [record.getMessage() for record in caplog.records]
    assert said.count(_EXPECTATION) == 1
    assert said.index(_EXPECTATION) + 1 == said.index("compiling the counts graph ...")


def test_a_phase_that_fails_is_not_announced_as_done(caplog) -> None:
    phases = Compilations(lambda: 0, None)
    with caplog.at_level(logging.INFO), contextlib.suppress(ZeroDivisionError):
        enter(phases, "forward", lambda: 1 / 0)
    assert messages(caplog) == ["compiling the forward graph ..."]


def test_a_hash_is_whole_where_torch_xla_leaves_out_its_leading_zeros() -> None:
    text = (
        "Compilation Analysis: Compilation Cause\nCompilation Analysis:   Graph Hash: e0b183f220f11d155665917c1e6b7cd\n"
    )
    assert parse_compilations(text)[0].hash == "0e0b183f220f11d155665917c1e6b7cd"


def test_what_was_compiled_is_told_by_phase_with_as_many_records_as_there_are(tmp_path) -> None:
    """Three compilations, of which the log has the last two: one before a cut, one at it, one by a host read after."""
    count, path = [1], tmp_path / "log.txt"
    graphs = Compilations(lambda: count[0], path)
    path.write_text("")
    assert [graph.phase for graph in graphs.all()] == [""], "before this runtime"
    enter(graphs, "forward", lambda: count.__setitem__(0, 2))
    count[0] = 3
    path.write_text("".join(f"Compilation Analysis: Compilation Cause\nGraph Hash: {name}\n" for name in "ab"))
    found = [(graph.phase, graph.hash[-1:]) for graph in graphs.all()]
    assert found == [("", ""), ("forward", "a"), ("a host read", "b")]
    path.write_text("")
    assert graphs.all()[1].hash, "it is not read again where nothing was compiled"
