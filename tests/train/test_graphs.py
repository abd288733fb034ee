"""The sentinel: what is compiled after the first step is found, explained, and stops the run where that is asked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from qat_lora.config import LoopConfig, OptimConfig
from qat_lora.errors import TrainingError
from qat_lora.runtime import CompiledGraph, LocalRuntime
from qat_lora.train.graphs import RecompileHook, difference, signature
from qat_lora.train.loop import StepInfo, TrainState, train
from qat_lora.train.objective import Counts, Term
from qat_lora.train.optim import build_optimizer

BACKWARD = CompiledGraph("backward", hash="b1", inputs=40, outputs=9, frames=("train_step (step.py:40)",))


class Lazy(LocalRuntime):
    """A device that compiles a graph per phase and per shape of batch that it has not seen."""

    static_graph = True

    def __init__(self) -> None:
        super().__init__("cpu")
        self.graphs: list[CompiledGraph] = []
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self.shape: tuple[int, ...] = ()

    def mark_step(self, phase) -> None:
        if (phase, self.shape) not in self._seen:
            self._seen.add((phase, self.shape))
            inputs = 10 + len(self.shape) + (self.shape[0] if self.shape else 0)
            self.graphs.append(CompiledGraph(phase, hash=str(len(self.graphs)), inputs=inputs))

    def to_device(self, batch):
        self.shape = tuple(batch["input_ids"].shape)
        return batch

    def compilations(self):
        return list(self.graphs)


class Objective:
    """A loss of the ids, so that a step is a whole step."""

    total_steps = 30

    def counts(self, batches, *, position) -> Counts:
        return Counts(*torch.ones(3).unbind())

    def losses(self, model, batch, counts, *, step, position) -> Iterator[Term]:
        yield Term((model.weight * batch["input_ids"].float().mean()).sum(), anchor=False)


def state_of() -> TrainState:
    model = nn.Linear(3, 2, bias=False)
    return TrainState(model, {"weight": model.weight}, build_optimizer([model.weight], [], OptimConfig()))


def batches(odd_step: int | None, rows: int = 3) -> Iterator[dict[str, torch.Tensor]]:
    step = 0
    while True:
        step += 1
        yield {"input_ids": torch.ones(rows if step == odd_step else 4, 7, dtype=torch.int64)}


def run(odd_step: int | None, *, max_recompiles: int, steps: int = 20) -> RecompileHook:
    runtime = Lazy()
    hook = RecompileHook(runtime, max_recompiles=max_recompiles)
    train(
        state_of(), batches(odd_step), Objective(), loop=LoopConfig(max_steps=steps), optim=OptimConfig(),
        runtime=runtime, hooks=[hook],
    )  # fmt: skip
    return hook


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_run_of_equal_steps_warns_of_nothing(caplog) -> None:
    hook = run(None, max_recompiles=0)
    assert warnings(caplog) == []
    assert hook.after_first_step == 0
    # set-up before any batch; then counts, forward, backward, micro-batch and optimizer
    assert hook.summary() == {"graphs": 6, "compilations": 6, "compilations_after_first_step": 0}


def test_another_shape_at_step_17_is_told_with_shapes_and_inputs_and_the_run_goes_on(caplog) -> None:
    hook = run(17, max_recompiles=-1)
    (said,) = warnings(caplog)
    assert said.startswith("step 17 compiled 5 graph(s) again: ")
    assert "batch input_ids: [4, 7] torch.int64 -> batch input_ids: [3, 7] torch.int64" in said
    for phase in ("counts", "forward", "backward", "micro-batch", "optimizer"):
        assert f"{phase} graph, 16 -> 15 inputs" in said
    assert hook.after_first_step == 5
    assert hook.summary() == {"graphs": 11, "compilations": 11, "compilations_after_first_step": 5}


def test_max_recompiles_of_0_stops_the_run_at_that_step(caplog) -> None:
    with pytest.raises(TrainingError) as error:
        run(17, max_recompiles=0)
    assert "5 compilations after the first step, --max-recompiles allows 0; at step 17: " in str(error.value)
    assert "[4, 7] torch.int64 -> batch input_ids: [3, 7]" in str(error.value)


@pytest.mark.parametrize(("allowed", "stops"), [(4, True), (5, False), (6, False)])
def test_as_many_as_are_allowed_are_allowed(allowed, stops, caplog) -> None:
    if stops:
        with pytest.raises(TrainingError, match=f"allows {allowed};"):
            run(17, max_recompiles=allowed)
    else:
        run(17, max_recompiles=allowed)
        assert len(warnings(caplog)) == 1


def test_the_first_step_of_a_launch_may_compile_whatever_its_number(caplog) -> None:
    """A resumed run begins at another step."""
    hook = RecompileHook(Lazy(), max_recompiles=0)
    hook._runtime.graphs.append(BACKWARD)
    state = state_of()
    hook.start(state)
    assert hook.after_first_step == 0
    hook.after_step(state, info(8))
    hook.after_step(state, info(9))
    assert warnings(caplog) == [] and hook.after_first_step == 0


def test_what_is_compiled_after_the_last_step_is_told_at_the_end(caplog) -> None:
    """By the last evaluation or the last checkpoint; the run is done, so it is not stopped."""
    hook, state = RecompileHook(Lazy(), max_recompiles=0), state_of()
    hook.after_step(state, info(1))
    hook.after_step(state, info(2))
    hook._runtime.graphs.append(BACKWARD)
    hook.end(state)
    (said,) = warnings(caplog)
    assert said.startswith("step 2 compiled 1 graph(s) again: ")
    assert hook.after_first_step == 1


def test_graphs_of_earlier_runs_of_the_process_are_not_counted() -> None:
    runtime = Lazy()
    runtime.graphs += [BACKWARD, BACKWARD]
    assert RecompileHook(runtime, max_recompiles=0).summary() == {
        "graphs": 0, "compilations": 0, "compilations_after_first_step": 0,
    }  # fmt: skip


def info(step: int, **shapes: tuple[int, ...]) -> StepInfo:
    found = tuple((name, shape, torch.int64) for name, shape in shapes.items())
    return StepInfo(step, torch.tensor(0.0), torch.tensor(0.0), 0.1, 1, found)


def test_a_compilation_is_told_at_its_own_step_and_once(caplog) -> None:
    runtime = Lazy()
    hook, state = RecompileHook(runtime, max_recompiles=-1), state_of()
    for step in range(1, 6):
        if step == 3:
            runtime.graphs.append(BACKWARD)
        hook.after_step(state, info(step, ids=(4, 7)))
    (said,) = warnings(caplog)
    assert said.startswith("step 3 compiled 1 graph(s) again: the same tensors by shape and dtype, hence another")
    assert said.endswith("backward graph, 40 inputs, not seen before, at train_step (step.py:40)")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s.trained["weight"].__setattr__("grad", torch.zeros(2, 3)), "gradient weight: none"),
        (lambda s: s.optimizer.state.clear(), "optimizer exp_avg of weight: [2, 3] torch.float32 on cpu"),
        (lambda s: s.trained["weight"].data.__class__, ""),
        (
            lambda s: s.trained.update(weight=nn.Parameter(s.trained["weight"].detach().bfloat16())),
            "weight weight: [2, 3] torch.float32",
        ),
    ],
    ids=["gradient", "optimizer state", "nothing", "dtype"],
)
def test_a_signature_sees_gradients_optimizer_state_and_dtypes(change, told) -> None:
    state = state_of()
    before = signature(state, info(1, ids=(4, 7)))
    change(state)
    after = signature(state, info(2, ids=(4, 7)))
    said = difference(before, after, [], [])
    assert (told in said) if told else said.startswith("the same tensors")


def test_another_number_of_micro_batches_is_seen() -> None:
    state, one = state_of(), info(1, ids=(4, 7), length=(4,))
    two = replace(one, shapes=one.shapes * 2)
    said = difference(signature(state, one), signature(state, two), [], [])
    assert said == "micro-batches: 1 -> micro-batches: 2"


def test_inputs_are_compared_with_those_of_the_same_phase() -> None:
    early = [BACKWARD, replace(BACKWARD, inputs=44), CompiledGraph("forward", inputs=3)]
    said = difference(frozenset("a"), frozenset("b"), early, [replace(BACKWARD, inputs=45, frames=())])
    assert said == "a -> b; backward graph, 44 -> 45 inputs"


def test_graphs_that_are_one_program_are_counted_once() -> None:
    runtime = Lazy()
    hook = RecompileHook(runtime, max_recompiles=-1)
    runtime.graphs = [BACKWARD, BACKWARD, CompiledGraph("forward"), CompiledGraph("forward")]
    summary = hook.summary()
    assert (summary["graphs"], summary["compilations"]) == (3, 4), "a graph without a hash is not known to be another's"


def test_a_device_that_compiles_nothing_has_no_summary() -> None:
    assert RecompileHook(LocalRuntime("cpu"), max_recompiles=0).summary() == {}
