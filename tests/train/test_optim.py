"""Schedule, groups, clipping and the moving average."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from qat_lora.config import OptimConfig
from qat_lora.errors import ConfigError
from qat_lora.runtime import LocalRuntime
from qat_lora.train.loop import TrainState, accumulate_gradients, train_step
from qat_lora.train.objective import Term
from qat_lora.train.optim import averages_of, build_optimizer, clip_gradients, lr_at, set_lr, swapped_in, update_ema
from tests.tolerances import ONE_STEP_FLOAT32


def test_the_schedule_warms_up_from_above_zero_and_ends_at_its_floor() -> None:
    optim = OptimConfig(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [lr_at(step, 20, optim) for step in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[12] == pytest.approx(0.55)
    assert rates[20] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[4:], rates[5:], strict=False))
    assert min(rates) > 0


def test_a_run_shorter_than_its_warm_up_and_no_warm_up_have_a_rate() -> None:
    assert lr_at(2, 3, OptimConfig(lr=1.0, warmup_steps=20)) == pytest.approx(3 / 20)
    assert lr_at(0, 1, OptimConfig(lr=1.0, warmup_steps=0)) == 1.0


def test_scales_learn_at_their_share_and_are_never_decayed() -> None:
    weight, scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optim = OptimConfig(lr=0.1, scale_lr_ratio=0.5, weight_decay=0.2)
    optimizer = build_optimizer([weight], [scale], optim)
    set_lr(optimizer, 0.1, LocalRuntime("cpu"))
    weight.grad, scale.grad = torch.zeros(3), torch.zeros(3)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), 1 - 0.1 * 0.2))
    assert torch.equal(scale.detach(), torch.ones(3))
    weight.grad, scale.grad = torch.full((3,), 0.5), torch.full((3,), 0.5)
    before = weight.detach().clone()
    optimizer.step()
    # The second step, the first gradient having been 0: both means hold (1 - beta) of it, corrected by 1 - beta^2.
    mean, square = 0.5 / (1 + optim.beta1), 0.25 / (1 + optim.beta2)
    direction = mean / (math.sqrt(square) + optim.eps)
    decayed = before * (1 - 0.1 * 0.2)
    torch.testing.assert_close(weight.detach(), decayed - 0.1 * direction, **ONE_STEP_FLOAT32._asdict())
    torch.testing.assert_close(scale.detach(), torch.ones(3) - 0.05 * direction, **ONE_STEP_FLOAT32._asdict())


def test_the_optimizers_state_exists_before_the_first_step() -> None:
    p = nn.Parameter(torch.ones(2, 3))
    optimizer = build_optimizer([p], [], OptimConfig())
    assert {name: x.shape for name, x in optimizer.state[p].items()} == {
        "step": torch.Size([]),
        "exp_avg": p.shape,
        "exp_avg_sq": p.shape,
    }


def test_a_state_made_beforehand_steps_like_one_made_lazily() -> None:
    ours, lazy = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    optim = OptimConfig(lr=0.01)
    optimizers = [
        build_optimizer([ours], [], optim),
        torch.optim.AdamW(
            [lazy], lr=0.01, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=0.0, fused=True
        ),
    ]
    for step in range(5):
        for p, optimizer in zip((ours, lazy), optimizers, strict=True):
            p.grad = torch.sin(torch.arange(7.0) + step)
            optimizer.step()
    assert torch.equal(ours, lazy)


def test_clipping_bounds_the_joint_norm_and_reports_the_one_before(runtime) -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_gradients([a, b], 0, runtime).item() == 5.0
    assert torch.equal(b.grad, torch.tensor([4.0]))
    assert clip_gradients([a, b], 1.0, runtime).item() == 5.0
    assert torch.cat([a.grad, b.grad]).norm().item() == pytest.approx(1.0, rel=1e-4)


def test_the_moving_average_follows_its_formula_and_swapping_is_undone_even_after_an_error() -> None:
    p = nn.Parameter(torch.tensor([1.0]))
    ema = {"p": torch.tensor([0.0])}
    update_ema(ema, {"p": p}, 0.75)
    assert ema["p"].item() == 0.25
    with pytest.raises(RuntimeError), swapped_in(ema, {"p": p}, LocalRuntime("cpu")):
        assert p.item() == 0.25
        raise RuntimeError
    assert (p.item(), ema["p"].item()) == (1.0, 0.25)


def test_scales_without_a_learning_rate_are_refused() -> None:
    """Where the learning rate is a tensor, as on XLA, AdamW divides 0 by it: not a number where a gradient is 0."""
    with pytest.raises(ConfigError, match="scale_lr_ratio=0"):
        OptimConfig(scale_lr_ratio=0.0)


class Sum:
    """An objective: the sum of the weights times that of the batch."""

    total_steps = 4

    def counts(self, batches, *, position):
        return None

    def losses(self, model, batch, counts, *, step, position):
        yield Term(model.weight.sum() * batch["input_ids"].sum(), anchor=False)


def linear(optim: OptimConfig) -> TrainState:
    model = nn.Linear(3, 2, bias=False)
    return TrainState(model, {"w": model.weight}, build_optimizer([model.weight], [], optim))


def test_the_moving_average_follows_the_weights_that_a_step_has_made() -> None:
    optim = OptimConfig(lr=0.1, warmup_steps=0, ema_decay=0.75)
    state = linear(optim)
    state.ema = averages_of(state.trained)
    start = state.trained["w"].detach().clone()
    train_step(state, [{"input_ids": torch.ones(1, 1)}], Sum(), optim, LocalRuntime("cpu"))
    made = state.trained["w"].detach()
    assert (made - start).abs().min() > 0.05
    torch.testing.assert_close(state.ema["w"], start.lerp(made, 0.25))


def test_the_loss_is_multiplied_by_the_ranks_whose_mean_is_taken() -> None:
    state, runtime = linear(OptimConfig()), LocalRuntime("cpu")
    runtime.world_size = 3
    accumulate_gradients(state, [{"input_ids": torch.full((1, 2), 5)}] * 2, Sum(), runtime, first_position=0)
    assert torch.equal(state.trained["w"].grad, torch.full((2, 3), 3.0 * 2 * 10))
