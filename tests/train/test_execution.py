"""How steps are run: layers recomputed or not without a bit of difference, and what `--tpu-autoscale` changes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch

from qat_lora import models
from qat_lora.cache import KDCacheDataset
from qat_lora.config import AdapterConfig, ExecutionConfig, KDConfig, LoopConfig, OptimConfig, QatRun, RecoveryRun
from qat_lora.config.presets import scheme
from qat_lora.errors import ConfigError, ModelError
from qat_lora.models.lean.mlps import use_lean_mlps
from qat_lora.models.lean.norms import use_lean_norms
from qat_lora.quant import freeze_codes
from qat_lora.runtime import LocalRuntime, MemoryUse
from qat_lora.settings import to_json
from qat_lora.train import run as run_module
from qat_lora.train.execution import autoscaled, lower_layers, state_bytes
from qat_lora.train.loop import TrainState, accumulate_gradients
from qat_lora.train.objective import KDObjective
from qat_lora.train.run import run_qat, run_recovery
from qat_lora.train.student import round_to_nearest, trained_parameters
from tests.conftest import SEQ_LEN, qat_run, recovery_run


class Static(LocalRuntime):
    """The CPU, said to compile whole graphs."""

    static_graph = True


class Full(LocalRuntime):
    """The CPU with next to no memory left, or with as much as one says."""

    def __init__(self, free: int | None = 100) -> None:
        super().__init__("cpu")
        self.free = free

    def memory(self) -> MemoryUse:
        return MemoryUse(900, 950, 1000, self.free)


ASKED = ExecutionConfig(tpu_autoscale=True)
RUNS = [
    QatRun(loop=LoopConfig(batch_size=3), optim=OptimConfig(lr=0.01), execution=ASKED),
    RecoveryRun(loop=LoopConfig(batch_size=3), optim=OptimConfig(lr=0.01), execution=ASKED),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.command)
def test_autoscale_doubles_the_batch_raises_the_rate_and_says_so(run, caplog) -> None:
    with caplog.at_level(logging.INFO):
        found = autoscaled(run, Static("cpu"))
    assert found.loop.batch_size == 6
    assert found.optim.lr == pytest.approx(0.012, rel=1e-12)
    assert [r.getMessage() for r in caplog.records] == ["--tpu-autoscale: batch_size 3 -> 6, lr 0.01 -> 0.012"]
    rest = replace(found, loop=run.loop, optim=run.optim, execution=run.execution)
    assert rest == run, "nothing else is changed"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.command)
def test_autoscale_leaves_the_rate_where_the_rows_of_a_step_stay(run) -> None:
    found = autoscaled(replace(run, loop=replace(run.loop, global_batch_size=12)), Static("cpu"))
    assert (found.loop.batch_size, found.loop.global_batch_size, found.optim.lr) == (6, 12, run.optim.lr)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.command)
def test_autoscale_is_done_once_so_that_a_saved_run_is_what_was_run(run, caplog) -> None:
    once = autoscaled(run, Static("cpu"))
    assert autoscaled(once, Static("cpu")) == once
    assert not once.execution.tpu_autoscale
    assert to_json(once)["loop"]["batch_size"] == 6


def test_autoscale_is_off_by_default_and_only_warned_of_on_a_cpu(caplog, runtime) -> None:
    plain = replace(RUNS[0], execution=ExecutionConfig())
    assert autoscaled(plain, Static("cpu")) == plain
    assert not caplog.records
    assert autoscaled(RUNS[0], runtime) == RUNS[0]
    assert [r.getMessage() for r in caplog.records] == ["--tpu-autoscale does nothing on cpu"]


def test_a_run_that_is_autoscaled_reads_the_larger_batches(tmp_path, cache_dir) -> None:
    run = qat_run(cache_dir, tmp_path / "qat", loop={"max_steps": 2}, execution=ASKED)
    run_qat(run, Static("cpu"))
    summary = json.loads((run.output / "summary.json").read_text())
    assert summary["tokens"] == 2 * 2 * 4 * SEQ_LEN
    record = json.loads((run.output / "run.json").read_text())["config"]
    assert (record["loop"]["batch_size"], record["optim"]["lr"]) == (8, pytest.approx(2.4e-3))
    # resumed by the same command; the batch must not be doubled anew
    run_qat(replace(run, loop=replace(run.loop, max_steps=3)), Static("cpu"), launch="resume")
    record = json.loads((run.output / "run.json").read_text())["config"]
    assert (record["loop"]["batch_size"], record["loop"]["max_steps"]) == (8, 3)


def student(teacher_dir, stage: str) -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]:
    from qat_lora import adapters

    torch.manual_seed(0)
    model = models.load(str(teacher_dir)).model
    round_to_nearest(model, scheme("q2_g32"))
    if stage == "qat":
        weights, scales = trained_parameters(model, ("weights", "scales"))
        return model, weights | scales
    freeze_codes(model)
    model = adapters.attach(model, models.target_linears(model), AdapterConfig(), base_name="")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for p in trained.values():  # B starts at zero, which would hide A's gradient
        p.data.add_(0.02 * torch.randn_like(p))
    return model, trained


def gradients(teacher_dir, cache_dir, stage: str, mode: str, runtime: LocalRuntime):
    """Gradients of two micro-batches, the loss, and how often an MLP was begun."""
    model, trained = student(teacher_dir, stage)
    lower_layers(model, ExecutionConfig(gradient_checkpointing=mode), runtime, tokens=4 * SEQ_LEN)
    dataset = KDCacheDataset(cache_dir, preload=True)
    objective = KDObjective(
        KDConfig(temperature=2.0, ce_alpha=0.2), dataset.manifest.target_spec, runtime, total_steps=4
    )
    batches = dataset.batches(2)
    state = TrainState(model.train(), trained, torch.optim.SGD(trained.values()))
    calls = []
    for layer in models.causal_lm(model).model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    loss = accumulate_gradients(state, [next(batches), next(batches)], objective, runtime, first_position=0)
    return {name: p.grad for name, p in trained.items()}, loss.item(), len(calls)


@pytest.mark.parametrize("stage", ["qat", "recover"])
def test_checkpointing_recomputes_every_layer_and_changes_no_bit(stage, teacher_dir, cache_dir, runtime) -> None:
    plain, loss, once = gradients(teacher_dir, cache_dir, stage, "off", runtime)
    again, same_loss, twice = gradients(teacher_dir, cache_dir, stage, "on", runtime)
    assert (once, twice) == (4, 8), "two layers, two micro-batches, and each once more in backward"
    assert loss == same_loss
    for name, grad in plain.items():
        assert grad.any(), name
        assert torch.equal(again[name], grad), name


def test_auto_keeps_what_fits_and_recomputes_what_does_not(teacher_dir, cache_dir, runtime, caplog) -> None:
    with caplog.at_level(logging.INFO):
        plain, _, kept = gradients(teacher_dir, cache_dir, "recover", "auto", runtime)
        assert "GiB free: kept" in caplog.text
        same, _, again = gradients(teacher_dir, cache_dir, "recover", "auto", Full())
        assert "recomputed in backward (--gradient-checkpointing off keeps them)" in caplog.text
        _, _, off = gradients(teacher_dir, cache_dir, "recover", "off", Full())
    assert (kept, again, off) == (4, 8, 4)
    assert all(torch.equal(same[name], plain[name]) for name in plain)


def test_auto_keeps_where_the_device_does_not_say_how_much_it_has(teacher_dir, cache_dir) -> None:
    assert gradients(teacher_dir, cache_dir, "recover", "auto", Full(free=None))[2] == 4


def test_half_of_what_is_free_may_be_activations(teacher_dir) -> None:
    model, _ = student(teacher_dir, "recover")
    tokens = 4 * SEQ_LEN
    needed = models.activation_bytes(model, tokens, torch.float32, lean=False)
    config = model.get_base_model().config
    # 2 layers, 96 tokens: 8 * 44 + 4 * 3 * 12 + 5 * 52 values of four bytes, and half as much again
    assert (config.num_hidden_layers, needed) == (2, int(2 * 96 * (8 * 44 + 4 * 36 + 5 * 52) * 4 * 1.5))
    # with lean norms and MLPs: 2 * 44 + 4 * 3 * 12 + 3 * 12 + 2 * 52 of them, one key-value head
    lean = models.activation_bytes(model, tokens, torch.float32, lean=True)
    assert lean == 2 * 96 * (2 * 44 + 4 * 36 + 3 * 12 * config.num_key_value_heads + 2 * 52) * 4
    checkpointing = []
    for free in (2 * needed - 2, 2 * needed + 2):
        model, _ = student(teacher_dir, "recover")
        lower_layers(model, ExecutionConfig(), Full(free=free), tokens=tokens)
        checkpointing.append(models.causal_lm(model).is_gradient_checkpointing)
    assert checkpointing == [True, False]


def test_auto_leaves_room_for_what_training_adds_to_the_weights(teacher_dir) -> None:
    """A gradient, two moments and, with ema_decay, a moving average: 12 or 16 bytes per trained parameter."""
    trained = [torch.zeros(30, 5), torch.zeros(7)]
    assert [state_bytes(trained, OptimConfig(ema_decay=decay)) for decay in (0.0, 0.9)] == [157 * 12, 157 * 16]
    tokens, to_come_bytes = 96, 5_000_000
    checkpointing = []
    for spare in (-2, 2):
        model, _ = student(teacher_dir, "recover")
        needed = models.activation_bytes(model, tokens, torch.float32, lean=False)
        runtime = Full(free=to_come_bytes + 2 * needed + spare)
        lower_layers(model, ExecutionConfig(), runtime, tokens=tokens, to_come_bytes=to_come_bytes)
        checkpointing.append(models.causal_lm(model).is_gradient_checkpointing)
    assert checkpointing == [True, False]


def test_a_run_tells_auto_what_it_will_add(tmp_path, cache_dir, monkeypatch) -> None:
    told = []
    monkeypatch.setattr(run_module, "lower_layers", lambda *_, to_come_bytes, **__: told.append(to_come_bytes))
    for decay in (0.0, 0.5):
        optim = OptimConfig(ema_decay=decay)
        run = qat_run(cache_dir, tmp_path / str(decay), loop={"max_steps": 1}, optim=optim)
        trained = run_qat(run, LocalRuntime("cpu")).state.trained
    count = sum(p.numel() for p in trained.values())
    assert told == [12 * count, 16 * count]


def test_layers_are_recomputed_on_every_rank_where_they_fit_on_some_only(teacher_dir) -> None:
    """Two ranks that trace different graphs would wait for each other's sums."""

    class OneOfTwo(Full):
        def all_equal(self, digest) -> bool:
            return digest() == bytes([self.others_fit])

    def is_recomputed(free: int, others_fit: bool) -> bool:
        (fresh, _), runtime = student(teacher_dir, "recover"), OneOfTwo(free)
        runtime.others_fit = others_fit
        lower_layers(fresh, ExecutionConfig(), runtime, tokens=96)
        return models.causal_lm(fresh).is_gradient_checkpointing

    plenty = 2**40
    assert [is_recomputed(free, fit) for free in (plenty, 0) for fit in (True, False)] == [False, True, True, True]


def test_whole_runs_end_in_the_same_bits(tmp_path, cache_dir, runtime) -> None:
    last = []
    for mode in ("off", "on"):
        execution = ExecutionConfig(gradient_checkpointing=mode)
        how = {"execution": execution, "loop": {"max_steps": 2}}
        qat = run_qat(qat_run(cache_dir, tmp_path / mode / "qat", **how), runtime)
        result = run_recovery(recovery_run(cache_dir, tmp_path / mode / "rec", qat.best, **how), runtime)
        last.append((qat.state.last_kl, result.state.last_kl, result.state.trained))
    assert last[0][:2] == last[1][:2]
    assert all(torch.equal(last[0][2][name], last[1][2][name]) for name in last[0][2])


def test_a_model_without_checkpointing_is_refused_only_where_it_is_needed(teacher_dir, monkeypatch, runtime) -> None:
    model, _ = student(teacher_dir, "qat")
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    lower_layers(model, ExecutionConfig(gradient_checkpointing="auto"), runtime, tokens=96)
    with pytest.raises(ModelError, match="has no gradient checkpointing; use --gradient-checkpointing off"):
        lower_layers(model, ExecutionConfig(gradient_checkpointing="on"), runtime, tokens=96)


def test_what_one_program_lets_pile_up_and_what_lean_layers_spare_is_reckoned_with(teacher_dir) -> None:
    tokens = 4 * SEQ_LEN
    model, _ = student(teacher_dir, "recover")
    full, lean = (models.activation_bytes(model, tokens, torch.float32, lean=lean) for lean in (False, True))
    for leaned, sync, needed in ((False, "phase", full), (False, "step", 3 * full), (True, "phase", lean)):
        found = []
        for free in (2 * needed - 2, 2 * needed + 2):
            model, _ = student(teacher_dir, "recover")
            if leaned:
                use_lean_norms(model)
                use_lean_mlps(model)
            runtime = Full(free=free)
            runtime.static_graph = True
            lower_layers(model, ExecutionConfig(sync=sync), runtime, tokens=tokens)
            found.append(models.causal_lm(model).is_gradient_checkpointing)
        assert found == [True, False], (leaned, sync)


def test_auto_keeps_with_a_warning_where_a_model_cannot_recompute(teacher_dir, monkeypatch, caplog) -> None:
    model, _ = student(teacher_dir, "qat")
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    lower_layers(model, ExecutionConfig(gradient_checkpointing="auto"), Full(), tokens=96)
    assert "the model cannot recompute its layers" in caplog.text
    assert not model.is_gradient_checkpointing


def test_dropout_of_attention_is_refused_before_the_first_step(teacher_dir, runtime) -> None:
    model, _ = student(teacher_dir, "qat")
    model.config.attention_dropout = 0.25
    lower_layers(model, ExecutionConfig(), runtime, tokens=96)
    with pytest.raises(ModelError, match="drops out attention with p=0.25, which is not known on XLA; set"):
        lower_layers(model, ExecutionConfig(), Static("cpu"), tokens=96)


def test_scanning_and_keeping_activations_exclude_each_other(teacher_dir) -> None:
    model, _ = student(teacher_dir, "qat")
    execution = ExecutionConfig(scan_layers=True, gradient_checkpointing="off")
    with pytest.raises(ConfigError, match="scan_layers=True recomputes .* gradient_checkpointing=off; drop one of"):
        lower_layers(model, execution, Static("cpu"), tokens=96)


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_scanned_layers_are_not_checkpointed_as_well(mode, teacher_dir, caplog) -> None:
    from qat_lora.models.lean.layers import ScannedLayers

    model, _ = student(teacher_dir, "qat")
    with caplog.at_level(logging.INFO):
        lower_layers(model, ExecutionConfig(scan_layers=True, gradient_checkpointing=mode), Static("cpu"), tokens=96)
    assert isinstance(model.model.layers, ScannedLayers)
    assert not model.is_gradient_checkpointing
    assert "2 layers: expect up to " in caplog.text
