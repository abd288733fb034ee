"""What must not change a result does not: accumulation, resumption, logging, the cache itself, packing, adapters."""

from __future__ import annotations

import copy
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from qat_lora import adapters, models
from qat_lora.cache import KDCacheDataset
from qat_lora.cli import commands
from qat_lora.config import AdapterConfig, KDConfig, OptimConfig
from qat_lora.config.presets import scheme
from qat_lora.quant import freeze_codes, to_dense
from qat_lora.runtime import LocalRuntime
from qat_lora.train.anchor import build_anchor
from qat_lora.train.checkpoint import load_checkpoint
from qat_lora.train.loop import StepInfo, TrainState, accumulate_gradients, train_step
from qat_lora.train.objective import Anchor, KDObjective
from qat_lora.train.optim import build_optimizer
from qat_lora.train.run import run_qat, run_recovery
from qat_lora.train.student import round_to_nearest, trained_parameters
from tests.conftest import SEQ_LEN, VOCAB, cache_run, qat_run, recovery_run
from tests.tolerances import (
    REORDERED_FLOAT32,
    REORDERED_GRADIENT_SHARE,
    REWRITTEN_FLOAT32,
    REWRITTEN_GRADIENT_SHARE,
    assert_close_to_largest,
)


def fresh_state(teacher_dir: Path, preset: str = "q2_g32") -> TrainState:
    model = models.load(str(teacher_dir)).model
    round_to_nearest(model, scheme(preset))
    weights, scales = trained_parameters(model, ("weights", "scales", "luts"))
    optimizer = build_optimizer(weights.values(), scales.values(), OptimConfig())
    return TrainState(model, weights | scales, optimizer)


def gradients(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in state.trained.items()}


def anchor_of(teacher_dir: Path, dataset: KDCacheDataset, kd: KDConfig, runtime: LocalRuntime) -> Anchor | None:
    """The teacher's predictions on the anchor rows: those of a student's own start would have no gradient there."""
    if not kd.anchor_kl_weight:
        return None
    teacher, samples = models.load(str(teacher_dir)).model, kd.anchor_samples
    return build_anchor(
        teacher, dataset, samples=samples, batch_size=4, chunk_tokens=kd.chunk_tokens, runtime=runtime
    )  # fmt: skip


@pytest.mark.parametrize(
    "kd",
    [
        KDConfig(),
        KDConfig(ce_alpha=0.3, hard_weight=0.2, temperature=2.0),
        KDConfig(chunk_tokens=7),
        KDConfig(support="candidates", top_k=9),
        KDConfig(hard_weight=0.7, hard_anneal="linear"),
        KDConfig(anchor_kl_weight=0.5, anchor_samples=6),
    ],
    ids=["kd", "mixed", "small chunks", "candidates", "annealed", "anchor"],
)
def test_four_batches_of_two_have_the_gradient_of_one_batch_of_eight(kd, teacher_dir, cache_dir, runtime) -> None:
    dataset = KDCacheDataset(cache_dir, preload=True)
    anchor = anchor_of(teacher_dir, dataset, kd, runtime)
    if anchor is not None:
        anchor.batch["length"][1] = 3
    found = {}
    for size, parts in ((8, 1), (2, 4)):
        stream = dataset.batches(size)
        micro_batches = [next(stream) for _ in range(parts)]
        micro_batches[0]["length"][0] = 5  # a short row: a mean of means would differ
        state = fresh_state(teacher_dir)
        state.step = 3  # what is annealed goes by steps, not by micro-batches
        objective = KDObjective(kd, dataset.manifest.target_spec, runtime, total_steps=10, anchor=anchor)
        loss = accumulate_gradients(state, micro_batches, objective, runtime, first_position=state.step * parts)
        found[parts] = (loss, gradients(state))
    torch.testing.assert_close(found[4][0], found[1][0], **REORDERED_FLOAT32._asdict())
    for name, grad in found[1][1].items():
        assert_close_to_largest(found[4][1][name], grad, share=REORDERED_GRADIENT_SHARE, name=name)


def test_the_cache_of_the_whole_vocabulary_is_the_live_teacher(teacher_dir, cache_dir, runtime) -> None:
    """Value and gradient of the objective against plain torch on the teacher's own logits, at two temperatures."""
    dataset = KDCacheDataset(cache_dir, preload=True)
    teacher = models.load(str(teacher_dir)).model
    for temperature in (1.0, 2.0):
        batch = next(dataset.batches(3))
        batch["length"][1] = 9
        cached, live = fresh_state(teacher_dir), fresh_state(teacher_dir)
        objective = KDObjective(KDConfig(temperature=temperature), dataset.manifest.target_spec, runtime, total_steps=1)
        loss = accumulate_gradients(cached, [batch], objective, runtime, first_position=0)

        mask = torch.arange(SEQ_LEN) < batch["length"][:, None]
        with torch.no_grad():
            p = (teacher(input_ids=batch["input_ids"]).logits[mask] / temperature).log_softmax(-1)
        q = (live.model(input_ids=batch["input_ids"]).logits[mask] / temperature).log_softmax(-1)
        expected = F.kl_div(q, p, log_target=True, reduction="batchmean") * temperature**2
        expected.backward()

        torch.testing.assert_close(loss, expected.detach(), **REWRITTEN_FLOAT32._asdict())
        for name, grad in gradients(live).items():
            assert_close_to_largest(cached.trained[name].grad, grad, share=REWRITTEN_GRADIENT_SHARE, name=name)


STOCHASTIC = {"adapter": AdapterConfig(recovery_dropout=0.2), "kd": KDConfig(anchor_kl_weight=0.5, anchor_samples=6)}
WITH_EMA = OptimConfig(lr=2e-3, warmup_steps=2, ema_decay=0.9)
GETTING_WORSE = OptimConfig(lr=0.5, warmup_steps=1)


class Interruptions:
    """Keeps the run's folder as it was after every step: what a run killed there would have left."""

    every = 1

    def __init__(self, output: Path, kept: Path) -> None:
        self._output, self._kept = output, kept

    def start(self, state: TrainState) -> None:
        """Nothing is there yet."""

    def after_step(self, state: TrainState, info: StepInfo) -> None:
        shutil.copytree(self._output, self._kept / str(info.step))

    def end(self, state: TrainState) -> None:
        """The run was not interrupted."""


SAVED_AT_ITS_EVALUATIONS = {"max_steps": 5, "accumulation_steps": 2, "eval_every": 2, "save_every": 1}
EVALUATED_AT_THE_END = {"max_steps": 6, "eval_every": 0, "save_every": 3}


@pytest.mark.parametrize(
    ("stage", "loop", "optim", "interrupted"),
    [
        ("qat", SAVED_AT_ITS_EVALUATIONS, WITH_EMA, (1, 2)),
        ("qat", EVALUATED_AT_THE_END, WITH_EMA, (3, 5)),
        ("qat", SAVED_AT_ITS_EVALUATIONS, GETTING_WORSE, (1, 3)),
        ("recover", SAVED_AT_ITS_EVALUATIONS, WITH_EMA, (1, 2)),
    ],
    ids=["qat", "qat evaluated at the end", "qat past its best", "recover"],
)
def test_a_run_resumed_at_any_step_is_the_uninterrupted_run_bit_for_bit(
    stage, loop, optim, interrupted, tmp_path, cache_dir, runtime
) -> None:
    loop = loop | {"batch_size": 3, "keep_last": 9}
    if stage == "qat":

        def launch(output, **how):
            run = qat_run(cache_dir, output, preset="q2a4", loop=loop, optim=optim, kd=STOCHASTIC["kd"])
            return run_qat(run, runtime, **how)
    else:
        best = run_qat(qat_run(cache_dir, tmp_path / "student", loop={"max_steps": 2}), runtime).best

        def launch(output, **how):
            return run_recovery(
                recovery_run(cache_dir, output, best, loop=loop, optim=optim, **STOCHASTIC), runtime, **how
            )

    whole = tmp_path / "whole"
    state = launch(whole, hooks=[Interruptions(whole, tmp_path / "killed")]).state
    assert (state.best_step == 0) == (optim is GETTING_WORSE), "each case needs its best where it says"
    for step in interrupted:
        part = tmp_path / "killed" / str(step)
        torch.manual_seed(12345)  # a resumed run must not depend on the state it is started in
        launch(part, launch="resume")
        for name in ("last.pt", "best.pt"):
            assert_same(load_checkpoint(part / name), load_checkpoint(whole / name), name, skip=("run",))
        assert steps_and_losses(part) == steps_and_losses(whole)


def test_the_last_checkpoint_knows_the_evaluation_of_its_own_step(tmp_path, cache_dir, runtime) -> None:
    """The last step is saved as one of every third, and evaluated as the end of the run."""
    state = run_qat(qat_run(cache_dir, tmp_path / "qat", loop=EVALUATED_AT_THE_END), runtime).state
    assert state.best_step == 6, "the case needs a run that is best at its end"
    best = load_checkpoint(tmp_path / "qat" / "best.pt")
    for name in ("last.pt", "step-000006.pt"):
        last = load_checkpoint(tmp_path / "qat" / name)
        assert last["progress"]["best_kl"] == last["progress"]["last_kl"] == best["metrics"]["held_out_kl"]
        assert last["progress"]["best_step"] == best["metrics"]["step"] == 6
        assert last["metrics"] == best["metrics"]


def test_logging_evaluating_and_saving_change_nothing_that_is_trained(tmp_path, cache_dir, runtime, caplog) -> None:
    often = {"log_every": 1, "eval_every": 1, "save_every": 2}
    seldom = {"log_every": 50, "eval_every": 0, "save_every": 0}
    contents, lines = [], []
    for name, loop, level in (("seldom", seldom, logging.WARNING), ("often aloud", often, logging.DEBUG)):
        caplog.clear()
        caplog.set_level(level)
        run_qat(qat_run(cache_dir, tmp_path / name, loop=loop, optim=WITH_EMA), runtime)
        contents.append(load_checkpoint(tmp_path / name / "last.pt"))
        lines.append(sum(record.levelno < logging.WARNING for record in caplog.records))
    assert lines[0] == 0 < lines[1], "the levels must make a difference to what is logged"
    for part in ("optimizer", "ema", "tensors"):
        assert_same(contents[1][part], contents[0][part], part)


def test_an_evaluation_leaves_dropout_on(tmp_path, cache_dir, runtime) -> None:
    """A model left in evaluation mode would train on without dropout."""
    best = run_qat(qat_run(cache_dir, tmp_path / "student", loop={"max_steps": 1}), runtime).best
    contents = []
    for name, every in (("often", 1), ("seldom", 0)):
        loop = {"eval_every": every, "max_steps": 3}
        run = recovery_run(cache_dir, tmp_path / name, best, loop=loop, adapter=STOCHASTIC["adapter"])
        run_recovery(run, runtime)
        contents.append(load_checkpoint(tmp_path / name / "last.pt"))
    assert_same(contents[0]["adapters"], contents[1]["adapters"])


def test_every_micro_batch_of_every_rank_and_run_draws_numbers_of_its_own(runtime) -> None:
    class Seeds(LocalRuntime):
        def __init__(self, rank: int) -> None:
            super().__init__("cpu")
            self.rank, self.world_size, self.drawn = rank, 3, []

        def seed(self, seed: int) -> None:
            super().seed(seed)
            self.drawn.append(float(torch.rand(())))

    class Nothing:
        def counts(self, batches, *, position):
            return None

        def losses(self, model, batch, counts, *, step, position):
            return iter(())

    drawn = []
    for rank in range(3):
        for seed in (0, 1):
            device = Seeds(rank)
            state = TrainState(None, {}, None, seed=seed)
            for position in (0, 2):
                accumulate_gradients(state, [{}, {}], Nothing(), device, first_position=position)
            drawn += device.drawn
    assert len(set(drawn)) == len(drawn) == 3 * 2 * 4


def test_streaming_and_preloading_train_the_same(tmp_path, cache_dir, runtime) -> None:
    contents = []
    for preload in (True, False):
        output = tmp_path / str(preload)
        run_qat(qat_run(cache_dir, output, loop={"preload": preload, "max_steps": 3}), runtime)
        contents.append(load_checkpoint(output / "last.pt")["tensors"])
    assert_same(*contents)


@pytest.mark.parametrize("preset", ["q2_g32", "q4_g32", "q2a4"])
def test_a_recovery_gradient_goes_through_every_frozen_layer(preset, teacher_dir, cache_dir, runtime) -> None:
    """Every adapter's gradient, the first layer's too, equals autograd through the dequantised model, bit for bit."""
    dataset = KDCacheDataset(cache_dir, preload=True)
    batch = next(dataset.batches(3))
    found, rounded = [], models.load(str(teacher_dir)).model
    round_to_nearest(rounded, scheme(preset))
    for convert in (freeze_codes, to_dense):
        model = copy.deepcopy(rounded)
        convert(model)
        torch.manual_seed(3)
        adapted = adapters.attach(model, models.target_linears(model), AdapterConfig(recovery_r=4), base_name="tiny")
        trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
        for p in trained.values():  # B starts at zero, and a zero B hides the gradient of A
            p.data.add_(0.02 * torch.randn_like(p))
        state = TrainState(adapted, trained, build_optimizer(trained.values(), (), OptimConfig()))
        objective = KDObjective(KDConfig(), dataset.manifest.target_spec, runtime, total_steps=1)
        accumulate_gradients(state, [batch], objective, runtime, first_position=0)
        found.append(gradients(state))
    coded, dense = found
    first_layer = [name for name in coded if "layers.0." in name]
    assert first_layer and all(coded[name].abs().max() > 0 for name in first_layer)
    assert_same(coded, dense)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of a tensor with the vocabulary among its dimensions, the head's own aside."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.elements = 0
        self._head = {(VOCAB, hidden_size), (hidden_size, VOCAB)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and VOCAB in x.shape and tuple(x.shape) not in self._head:
                self.elements = max(self.elements, x.numel())
        return out


@pytest.fixture(scope="module")
def top8_dataset(teacher_dir, text_file, tmp_path_factory) -> KDCacheDataset:
    """A cache of eight candidates: no field of it is as wide as the vocabulary."""
    cache = tmp_path_factory.mktemp("top8") / "cache"
    commands.cache(cache_run(teacher_dir, text_file, cache))
    return KDCacheDataset(cache, preload=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "terms",
    [{}, {"support": "candidates"}, {"ce_alpha": 0.5, "hard_weight": 0.1}, {"anchor_kl_weight": 0.5}],
    ids=["kd", "candidates", "mixed", "anchor"],
)
def test_a_training_step_holds_the_logits_of_one_chunk_at_most(terms, dtype, teacher_dir, top8_dataset) -> None:
    runtime = LocalRuntime("cpu", dtype=dtype)
    kd = KDConfig(chunk_tokens=8, anchor_samples=6, **terms)
    state = fresh_state(teacher_dir)
    batch = next(top8_dataset.batches(16))
    with LargestTensor(state.model.config.hidden_size) as of_anchor:
        anchor = anchor_of(teacher_dir, top8_dataset, kd, runtime)
    objective = KDObjective(kd, top8_dataset.manifest.target_spec, runtime, total_steps=1, anchor=anchor)
    with LargestTensor(state.model.config.hidden_size) as of_step:
        train_step(state, [batch], objective, OptimConfig(), runtime)
    assert of_anchor.elements == (8 * VOCAB if anchor else 0)
    assert of_step.elements == 8 * VOCAB


def test_two_launches_of_a_run_are_equal(tmp_path, cache_dir) -> None:
    contents = []
    for name in ("one", "two"):
        torch.manual_seed(hash(name) % 1000)
        run_qat(replace(qat_run(cache_dir, tmp_path / name), preset="q2_g32"), LocalRuntime("cpu"))
        contents.append(load_checkpoint(tmp_path / name / "last.pt")["tensors"])
    assert_same(*contents)


def steps_and_losses(folder: Path) -> list[list[str]]:
    """loss.csv without the column that holds seconds."""
    return [line.split(",")[:-1] for line in (folder / "loss.csv").read_text().splitlines()]


def assert_same(ours, theirs, path: str = "", skip: tuple[str, ...] = ()) -> None:
    """Equal in every bit, however deep."""
    assert type(ours) is type(theirs), path
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), path
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), path
        for key in ours:
            if key not in skip:
                assert_same(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), path
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{path}[{i}]")
    else:
        assert ours == theirs or (ours != ours and theirs != theirs), path
