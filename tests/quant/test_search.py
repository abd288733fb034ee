"""No group ends worse than abs-max, no learned table worse than an even one, and all is deterministic."""

from __future__ import annotations

import itertools

import pytest
import torch

from qat_lora.config import LinearQuant
from qat_lora.quant import dequantize, quantize
from qat_lora.quant.grids import Grid
from qat_lora.quant.start import factorise, search_form, search_scales
from tests.quant.cases import GRIDS, SHAPES, form_of, linear_of, weight_of
from tests.reference import quant as oracle

FIXED = [grid for grid in GRIDS if grid[0] != "lut"]


@pytest.mark.parametrize(("levels", "bits"), FIXED)
@pytest.mark.parametrize("scales", ["channel", "group"])
def test_no_group_is_worse_than_abs_max(levels, bits, scales):
    for out_features, in_features, group_size in SHAPES:
        config = LinearQuant(bits, levels, scales, group_size)
        weight_OI = weight_of(out_features, in_features)
        weight_OI[0, 0] = 40.0  # an outlier
        found = search_scales(weight_OI, config)
        for rival in _abs_max(weight_OI, config):
            assert (_errors(weight_OI, found) <= _errors(weight_OI, rival) * (1 + 1e-6) + 1e-12).all()


@pytest.mark.parametrize(("levels", "bits"), [("int", 2), ("int", 4), ("balanced", 2), ("ternary", 2), ("nf4", 4)])
def test_the_search_beats_abs_max_clearly_on_normal_weights(levels, bits):
    config = LinearQuant(bits, levels, "group", 64)
    weight_OI = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    found = search_scales(weight_OI, config)
    rivals = [_errors(weight_OI, rival).sum() for rival in _abs_max(weight_OI, config)]
    assert _errors(weight_OI, found).sum() < 0.9 * min(rivals)


@pytest.mark.parametrize("levels", ["int", "balanced", "nf4"])
def test_most_scales_are_the_least_squares_answer_to_their_own_codes(levels):
    config = LinearQuant(4, levels, "group", 16, scale_dtype="float32")
    weight_OI = weight_of(16, 64)
    form = search_scales(weight_OI, config)
    level_OGg = form.levels_N[quantize(weight_OI, form).long()]
    level_OGg, weight_OGg = level_OGg.view(16, 4, 16), weight_OI.view(16, 4, 16)
    best_OG = (weight_OGg * level_OGg).sum(2) / level_OGg.square().sum(2)
    assert torch.isclose(form.scale_OC(), best_OG, rtol=1e-5).float().mean() > 0.7


@pytest.mark.parametrize(("levels", "bits"), [("balanced", 2), ("int", 2), ("int", 3), ("ternary", 2)])
def test_groups_come_within_two_thousandths_of_the_least_error_that_any_scale_has(levels, bits):
    weight_OI = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    config = LinearQuant(bits, levels, "group", 16, scale_dtype="float32")
    assert _error(weight_OI, search_scales(weight_OI, config)) <= 1.002 * _least_error(weight_OI, config)


def test_rows_with_one_far_outlier_come_as_near_though_most_of_the_range_is_clipped():
    weight_OI = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    weight_OI[:, 0] = torch.tensor([12.0, 20.0, 30.0, 40.0])
    config = LinearQuant(2, "ternary", "channel", scale_dtype="float32")
    assert _error(weight_OI, search_scales(weight_OI, config)) <= 1.002 * _least_error(weight_OI, config)


def test_most_scales_and_offsets_are_the_least_squares_answer_to_their_own_codes():
    """What is left over is then orthogonal to the levels and to a constant."""
    config = LinearQuant(3, "affine", "group", 16, scale_dtype="float32")
    weight_OI = weight_of(16, 64)
    form = search_scales(weight_OI, config)
    codes_OI = quantize(weight_OI, form)
    left_Mg = (weight_OI - dequantize(codes_OI, form)).view(-1, 16)
    for direction_Mg in (torch.ones_like(left_Mg), form.levels_N[codes_OI.long()].view(-1, 16)):
        cosine_M = torch.nn.functional.cosine_similarity(left_Mg, direction_Mg)
        assert (cosine_M.abs() < 1e-3).float().mean() > 0.7


@pytest.mark.parametrize("rank", [1, 3])
def test_factors_are_the_best_approximation_of_their_rank_with_a_short_last_group(rank):
    config = LinearQuant(4, "balanced", "lowrank", 16, rank=rank, scale_dtype="float32")
    scale_OG = torch.rand(12, 6, generator=torch.Generator().manual_seed(0)) + 0.1
    a_OR, b_RI = factorise(scale_OG, 83, config)
    spread_OI = scale_OG.repeat_interleave(16, 1)[:, :83]
    u, sigma, v = torch.linalg.svd(spread_OI, full_matrices=False)
    best_OI = (u[:, :rank] * sigma[:rank]) @ v[:rank]
    assert torch.allclose(a_OR @ b_RI, best_OI, atol=1e-5)


@pytest.mark.parametrize("levels", ["int", "nf4", "iq4_nl"])
def test_asymmetric_grids_use_both_signs(levels):
    found = search_scales(weight_of(32, 64), LinearQuant(4, levels, "group", 16))
    assert (found.scale_OC() > 0).any()
    assert (found.scale_OC() < 0).any()


@pytest.mark.parametrize("levels", ["balanced", "ternary", "affine"])
def test_symmetric_and_affine_grids_use_positive_scales(levels):
    found = search_scales(weight_of(32, 64), LinearQuant(2, levels, "group", 16))
    assert (found.scale_OC() >= 0).all()


@pytest.mark.parametrize(("levels", "bits"), FIXED)
def test_weights_on_a_grid_are_recovered_exactly(levels, bits):
    config = LinearQuant(bits, levels, "group", 16)
    grid_N = Grid.of(config).levels_N
    generator = torch.Generator().manual_seed(0)
    codes_OI = torch.randint(0, len(grid_N), (8, 64), generator=generator)
    codes_OI[:, ::16], codes_OI[:, 1::16] = 0, len(grid_N) - 1  # each group spans the grid
    weight_OI = grid_N[codes_OI] * 0.125
    assert float(_errors(weight_OI, search_scales(weight_OI, config)).max()) < 1e-8


def test_found_values_are_ones_that_the_stored_dtype_holds():
    for dtype, levels in itertools.product(["float16", "bfloat16"], ["affine", "lut"]):
        form = search_form(weight_of(8, 40), LinearQuant(4, levels, "lowrank", 16, 2, dtype))
        for value in (form.levels_N, *form.side_values()):
            assert torch.equal(value.to(getattr(torch, dtype)).float(), value)


@pytest.mark.parametrize("scales", ["channel", "group", "lowrank"])
@pytest.mark.parametrize("bits", [2, 4])
def test_learned_levels_are_better_than_even_ones(bits, scales):
    weight_OI = weight_of(32, 96)
    total = {}
    for levels in ("balanced", "lut"):
        config = LinearQuant(bits, levels, scales, 32, rank=2)
        total[levels] = _error(weight_OI, search_form(weight_OI, config))
    assert total["lut"] < total["balanced"]


@pytest.mark.parametrize("values", [(-1.0, -0.9, 0.8, 1.0), (-0.9, -0.3, -0.2, -0.1, 0.0, 0.15, 0.3, 1.0)])
def test_uneven_levels_that_the_weights_were_made_of_are_found(values):
    """Even levels as the only start end in a worse answer."""
    weight_OI = _weight_on(values, groups_of=16)
    config = LinearQuant(len(values).bit_length() - 1, "lut", "group", 16, scale_dtype="float32")
    assert _error(weight_OI, search_form(weight_OI, config)) < 1e-9 * float(weight_OI.square().sum())


@pytest.mark.parametrize("scales", ["channel", "group"])
def test_scales_and_levels_found_in_turns_are_better_than_found_once(scales, monkeypatch):
    weight_OI, config = weight_of(32, 96), LinearQuant(4, "lut", scales, 32)
    error = _error(weight_OI, search_form(weight_OI, config))
    monkeypatch.setattr("qat_lora.quant.start.LUT_ROUNDS", 1)
    assert error < 0.98 * _error(weight_OI, search_form(weight_OI, config))


def test_the_search_is_deterministic():
    config = LinearQuant(4, "lut", "lowrank", 32, rank=8)
    first, second = (search_form(weight_of(16, 100), config) for _ in range(2))
    assert torch.equal(first.levels_N, second.levels_N)
    assert all(torch.equal(a, b) for a, b in zip(first.side_values(), second.side_values(), strict=True))


def test_low_rank_factors_of_full_rank_hold_the_group_scales():
    config = LinearQuant(4, "int", "lowrank", 32, rank=6, scale_dtype="float32")
    weight_OI = weight_of(16, 172)
    grouped = search_scales(weight_OI, LinearQuant(4, "int", "group", 32, scale_dtype="float32"))
    assert _error(weight_OI, search_form(weight_OI, config)) <= _error(weight_OI, grouped)


def test_low_rank_scales_have_both_signs_where_their_rank_can_hold_them():
    """Groups that lie on {-2 .. 1}, or on {-1 .. 2}, which a scale below 0 gives: all are recovered."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = _weight_on((-2.0, -1.0, 0.0, 1.0), groups_of=8, shape=(4, 32))
    weight_OI *= (torch.randint(0, 2, (4, 4), generator=generator) * 2.0 - 1).repeat_interleave(8, 1)
    config = LinearQuant(2, "int", "lowrank", 8, rank=4, scale_dtype="float32")
    assert _error(weight_OI, search_form(weight_OI, config)) < 1e-9


def test_a_weight_of_zeros_gives_zeros():
    for levels, bits in GRIDS:
        for scales in ("channel", "group", "lowrank"):
            config = LinearQuant(bits, levels, scales, 8, rank=2)
            form = search_form(linear_of(torch.zeros(3, 20)).weight, config)
            assert not dequantize(quantize(torch.zeros(3, 20), form), form).any()


def _weight_on(values, groups_of, shape=(16, 64)):
    """Weights that are levels times a scale for each group; every group has the last level."""
    generator = torch.Generator().manual_seed(0)
    codes_OI = torch.randint(0, len(values), shape, generator=generator)
    codes_OI[:, ::groups_of] = len(values) - 1
    codes_OI[:, 1::groups_of] = 0
    scale_OG = torch.exp(0.5 * torch.randn(shape[0], shape[1] // groups_of, generator=generator))
    return torch.tensor(values)[codes_OI] * scale_OG.repeat_interleave(groups_of, 1)


def _least_error(weight_OI, config):
    size = weight_OI.shape[1] if config.scales == "channel" else config.group_size
    grid_N = oracle.levels(config.levels, config.bits)
    both_signs = config.levels == "int"
    return sum(oracle.least_error(group.numpy(), grid_N, both_signs) for group in weight_OI.reshape(-1, size))


def _abs_max(weight_OI, config):
    """Plain scales: the largest weight meets either end; for affine, min and max meet the ends."""
    size = weight_OI.shape[1] if config.scales == "channel" else config.group_size
    groups = list(weight_OI.split(size, dim=1))
    grid_N = Grid.of(config).levels_N
    if config.levels == "affine":
        low_OG = torch.stack([g.amin(1) for g in groups], 1)
        scale_OG = (torch.stack([g.amax(1) for g in groups], 1) - low_OG) / grid_N[-1]
        return [form_of(config, scale_OG, low_OG).stored()]
    high_OG = torch.stack([g.abs().amax(1) for g in groups], 1)
    return [form_of(config, high_OG / level.abs()).stored() for level in (grid_N[0], grid_N[-1])]


def _errors(weight_OI, form):
    """Squared error of each group, float64."""
    squared_OI = (dequantize(quantize(weight_OI, form), form) - weight_OI).double().square()
    size = weight_OI.shape[1] if form.config.scales == "channel" else form.config.group_size
    return torch.stack([group.sum(1) for group in squared_OI.split(size, dim=1)], 1)


def _error(weight_OI, form):
    return float(_errors(weight_OI, form).sum())
