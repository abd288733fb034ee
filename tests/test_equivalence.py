"""What must not change a result does not: accumulation, resumption, logging, the cache itself, packing, adapters."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from qat_lora import adapters, models
from qat_lora.config import AdapterConfig, KDConfig, OptimConfig
from qat_lora.kd import KDCacheDataset
from qat_lora.presets import scheme
from qat_lora.quant import freeze_codes, to_dense
from qat_lora.runtime import LocalRuntime
from qat_lora.train.checkpoint import load_checkpoint
from qat_lora.train.objective import KDObjective
from qat_lora.train.optim import build_optimizer
from qat_lora.train.run import run_qat, run_recovery
from qat_lora.train.state import TrainState
from qat_lora.train.step import accumulate_gradients, train_step
from qat_lora.train.student import round_to_nearest, trained_parameters
from tests.conftest import SEQ_LEN, VOCAB, qat_run, recovery_run
from tests.tolerances import REORDERED_FLOAT32, REWRITTEN_GRADIENT


def fresh_state(teacher_dir: Path, preset: str = "q2_g32") -> TrainState:
    model = models.load(str(teacher_dir)).model
    round_to_nearest(model, scheme(preset))
    weights, scales = trained_parameters(model, ("weights", "scales", "luts"))
    optimizer = build_optimizer(weights.values(), scales.values(), OptimConfig())
    return TrainState(model, weights | scales, optimizer)


def gradients(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in state.trained.items()}


@pytest.mark.parametrize(
    "kd",
    [KDConfig(), KDConfig(ce_alpha=0.3, hard_weight=0.2, temperature=2.0), KDConfig(chunk_tokens=7)],
    ids=["kd", "mixed", "small chunks"],
)
def test_four_batches_of_two_have_the_gradient_of_one_batch_of_eight(kd, teacher_dir, cache_dir, runtime) -> None:
    dataset = KDCacheDataset(cache_dir, preload=True)
    found = {}
    for size, parts in ((8, 1), (2, 4)):
        stream = dataset.batches(size)
        micro_batches = [next(stream) for _ in range(parts)]
        micro_batches[0]["length"][0] = 5  # a short row: a mean of means would differ
        state = fresh_state(teacher_dir)
        objective = KDObjective(kd, dataset.manifest, runtime, total_steps=10)
        loss = accumulate_gradients(state, micro_batches, objective, runtime, first_position=0)
        found[parts] = (loss, gradients(state))
    torch.testing.assert_close(found[4][0], found[1][0], **REORDERED_FLOAT32._asdict())
    for name, grad in found[1][1].items():
        scale = grad.abs().max().item()
        torch.testing.assert_close(
            found[4][1][name], grad, rtol=2e-5, atol=2e-6 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_cache_of_the_whole_vocabulary_is_the_live_teacher(teacher_dir, cache_dir, runtime) -> None:
    """Value and gradient of the objective against plain torch on the teacher's own logits, at two temperatures."""
    dataset = KDCacheDataset(cache_dir, preload=True)
    teacher = models.load(str(teacher_dir)).model
    for temperature in (1.0, 2.0):
        batch = next(dataset.batches(3))
        batch["length"][1] = 9
        cached, live = fresh_state(teacher_dir), fresh_state(teacher_dir)
        objective = KDObjective(KDConfig(temperature=temperature), dataset.manifest, runtime, total_steps=1)
        loss = accumulate_gradients(cached, [batch], objective, runtime, first_position=0)

        mask = torch.arange(SEQ_LEN) < batch["length"][:, None]
        with torch.no_grad():
            p = (teacher(input_ids=batch["input_ids"]).logits[mask] / temperature).log_softmax(-1)
        q = (live.model(input_ids=batch["input_ids"]).logits[mask] / temperature).log_softmax(-1)
        expected = F.kl_div(q, p, log_target=True, reduction="batchmean") * temperature**2
        expected.backward()

        torch.testing.assert_close(loss, expected.detach(), **REWRITTEN_GRADIENT._asdict())
        for name, grad in gradients(live).items():
            atol = 1e-5 * grad.abs().max().item()
            torch.testing.assert_close(
                cached.trained[name].grad, grad, rtol=1e-3, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )


STOCHASTIC = {"adapter": AdapterConfig(recovery_dropout=0.2), "kd": KDConfig(anchor_kl_weight=0.5, anchor_samples=6)}
WITH_EMA = OptimConfig(lr=2e-3, warmup_steps=2, ema_decay=0.9)


@pytest.mark.parametrize("stage", ["qat", "recover"])
def test_a_run_resumed_at_any_step_is_the_uninterrupted_run_bit_for_bit(stage, tmp_path, cache_dir, runtime) -> None:
    if stage == "qat":

        def launch(output, launch="new", **loop):
            run = qat_run(cache_dir, output, preset="q2a4", loop=loop, optim=WITH_EMA, kd=STOCHASTIC["kd"])
            return run_qat(run, runtime, launch=launch)
    else:
        best = run_qat(qat_run(cache_dir, tmp_path / "student", loop={"max_steps": 2}), runtime).best

        def launch(output, launch="new", **loop):
            run = recovery_run(cache_dir, output, best, loop=loop, optim=WITH_EMA, **STOCHASTIC)
            return run_recovery(run, runtime, launch=launch)

    loop = {"max_steps": 5, "accumulation_steps": 2, "batch_size": 3, "eval_every": 2, "save_every": 1, "keep_last": 9}
    launch(tmp_path / "whole", **loop)
    whole = load_checkpoint(tmp_path / "whole" / "last.pt")
    for step in (1, 2, 4):
        part = tmp_path / f"part{step}"
        shutil.copytree(tmp_path / "whole", part)
        for later in range(step + 1, 6):
            (part / f"step-{later:06d}.pt").unlink()
        (part / "last.pt").unlink()
        shutil.copyfile(part / f"step-{step:06d}.pt", part / "last.pt")
        torch.manual_seed(12345)  # a resumed run must not depend on the state it is started in
        launch(part, launch="resume", **loop)
        assert_same(load_checkpoint(part / "last.pt"), whole, skip=("run",))
        assert steps_and_losses(part) == steps_and_losses(tmp_path / "whole")


def test_logging_evaluating_and_saving_change_nothing_that_is_trained(tmp_path, cache_dir, runtime) -> None:
    often = {"log_every": 1, "eval_every": 1, "save_every": 2}
    seldom = {"log_every": 50, "eval_every": 0, "save_every": 0}
    contents = []
    for name, loop in (("often", often), ("seldom", seldom)):
        run = qat_run(cache_dir, tmp_path / name, loop=loop, optim=WITH_EMA)
        run_qat(run, runtime)
        contents.append(load_checkpoint(tmp_path / name / "last.pt"))
    for part in ("trained", "optimizer", "ema", "tensors", "rng"):
        assert_same(contents[0][part], contents[1][part])


def test_streaming_and_preloading_train_the_same(tmp_path, cache_dir, runtime) -> None:
    contents = []
    for preload in (True, False):
        output = tmp_path / str(preload)
        run_qat(qat_run(cache_dir, output, loop={"preload": preload, "max_steps": 3}), runtime)
        contents.append(load_checkpoint(output / "last.pt")["trained"])
    assert_same(*contents)


@pytest.mark.parametrize("preset", ["q2_g32", "q4_g32", "q2a4"])
def test_a_recovery_gradient_goes_through_every_frozen_layer(preset, teacher_dir, cache_dir, runtime) -> None:
    """Every adapter's gradient, the first layer's too, equals autograd through the dequantised model, bit for bit."""
    dataset = KDCacheDataset(cache_dir, preload=True)
    batch = next(dataset.batches(3))
    found = []
    for convert in (freeze_codes, to_dense):
        model = models.load(str(teacher_dir)).model
        round_to_nearest(model, scheme(preset))
        convert(model)
        torch.manual_seed(3)
        adapted = adapters.attach(model, models.target_linears(model), AdapterConfig(recovery_r=4), base_name="tiny")
        trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
        for p in trained.values():  # B starts at zero, and a zero B hides the gradient of A
            p.data.add_(0.02 * torch.randn_like(p))
        state = TrainState(adapted, trained, build_optimizer(trained.values(), (), OptimConfig()))
        objective = KDObjective(KDConfig(), dataset.manifest, runtime, total_steps=1)
        accumulate_gradients(state, [batch], objective, runtime, first_position=0)
        found.append(gradients(state))
    coded, dense = found
    first_layer = [name for name in coded if "layers.0." in name]
    assert first_layer and all(coded[name].abs().max() > 0 for name in first_layer)
    assert_same(coded, dense)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of a tensor that has the vocabulary among its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and VOCAB in x.shape:
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("kd", [KDConfig(chunk_tokens=8), KDConfig(chunk_tokens=8, ce_alpha=0.5, hard_weight=0.1)])
def test_a_training_step_holds_the_logits_of_one_chunk_at_most(kd, teacher_dir, tmp_path, text_file, runtime) -> None:
    from qat_lora.cli import commands
    from tests.conftest import cache_run

    cache = tmp_path / "top8"
    commands.cache(cache_run(teacher_dir, text_file, cache))
    dataset = KDCacheDataset(cache, preload=True)
    state = fresh_state(teacher_dir)
    objective = KDObjective(kd, dataset.manifest, runtime, total_steps=1)
    batch = next(dataset.batches(16))
    embedding = VOCAB * state.model.config.hidden_size
    with LargestTensor() as largest:
        train_step(state, [batch], objective, OptimConfig(), runtime)
    assert largest.elements == max(8 * VOCAB, embedding) < 16 * SEQ_LEN * VOCAB


def test_two_launches_of_a_run_are_equal(tmp_path, cache_dir) -> None:
    contents = []
    for name in ("one", "two"):
        torch.manual_seed(hash(name) % 1000)
        run_qat(replace(qat_run(cache_dir, tmp_path / name), preset="q2_g32"), LocalRuntime("cpu"))
        contents.append(load_checkpoint(tmp_path / name / "last.pt")["trained"])
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
