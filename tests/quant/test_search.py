"""No group ends worse than abs-max, no learned table worse than an even one, and all is deterministic."""

from __future__ import annotations

import itertools

import pytest
import torch

from qat_lora.config import LinearQuant
from qat_lora.quant import (
    dequantize,
    level_values,
    quantize,
    search_initial_state,
    search_scales,
)
from qat_lora.quant.factors import factorise
from tests.quant.forms import GRIDS, SHAPES, linear_of, weight_of

FIXED = [grid for grid in GRIDS if grid[0] != "lut"]


@pytest.mark.parametrize(("levels", "bits"), FIXED)
@pytest.mark.parametrize("scales", ["channel", "group"])
def test_no_group_is_worse_than_abs_max(levels, bits, scales):
    for out_features, in_features, group_size in SHAPES:
        form = LinearQuant(bits, levels, scales, group_size)
        weight_OI = weight_of(out_features, in_features)
        weight_OI[0, 0] = 40.0  # an outlier
        found = search_scales(weight_OI, form)
        error_OG = _errors(weight_OI, found.scale_OG, found.offset_OG, form)
        for scale_OG, offset_OG in _abs_max(weight_OI, form):
            assert (error_OG <= _errors(weight_OI, scale_OG, offset_OG, form) * (1 + 1e-6) + 1e-12).all()


@pytest.mark.parametrize(("levels", "bits"), [("int", 2), ("int", 4), ("balanced", 2), ("ternary", 2), ("nf4", 4)])
def test_the_search_beats_abs_max_clearly_on_normal_weights(levels, bits):
    form = LinearQuant(bits, levels, "group", 64)
    weight_OI = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    found = search_scales(weight_OI, form)
    rivals = [_errors(weight_OI, *rival, form).sum() for rival in _abs_max(weight_OI, form)]
    assert _errors(weight_OI, found.scale_OG, found.offset_OG, form).sum() < 0.9 * min(rivals)


@pytest.mark.parametrize("levels", ["int", "balanced", "nf4"])
def test_most_scales_are_the_least_squares_answer_to_their_own_codes(levels):
    form = LinearQuant(4, levels, "group", 16, scale_dtype="float32")
    weight_OI = weight_of(16, 64)
    scale_OG = search_scales(weight_OI, form).scale_OG
    level_OGg = level_values(form)[quantize(weight_OI, scale_OG, level_values(form), None, form).long()]
    level_OGg, weight_OGg = level_OGg.view(16, 4, 16), weight_OI.view(16, 4, 16)
    best_OG = (weight_OGg * level_OGg).sum(2) / level_OGg.square().sum(2)
    assert torch.isclose(scale_OG, best_OG, rtol=1e-5).float().mean() > 0.7


@pytest.mark.parametrize("rank", [1, 3])
def test_factors_are_the_best_approximation_of_their_rank_with_a_short_last_group(rank):
    form = LinearQuant(4, "balanced", "lowrank", 16, rank=rank, scale_dtype="float32")
    scale_OG = torch.rand(12, 6, generator=torch.Generator().manual_seed(0)) + 0.1
    a_OR, b_RI = factorise(scale_OG, 83, form)
    spread_OI = scale_OG.repeat_interleave(16, 1)[:, :83]
    u, sigma, v = torch.linalg.svd(spread_OI, full_matrices=False)
    best_OI = (u[:, :rank] * sigma[:rank]) @ v[:rank]
    assert torch.allclose(a_OR @ b_RI, best_OI, atol=1e-5)


@pytest.mark.parametrize("levels", ["int", "nf4", "iq4_nl"])
def test_asymmetric_grids_use_both_signs(levels):
    found = search_scales(weight_of(32, 64), LinearQuant(4, levels, "group", 16))
    assert (found.scale_OG > 0).any()
    assert (found.scale_OG < 0).any()


@pytest.mark.parametrize("levels", ["balanced", "ternary", "affine"])
def test_symmetric_and_affine_grids_use_positive_scales(levels):
    found = search_scales(weight_of(32, 64), LinearQuant(2, levels, "group", 16))
    assert (found.scale_OG >= 0).all()


@pytest.mark.parametrize(("levels", "bits"), FIXED)
def test_weights_on_a_grid_are_recovered_exactly(levels, bits):
    form = LinearQuant(bits, levels, "group", 16)
    grid_N = level_values(form)
    generator = torch.Generator().manual_seed(0)
    codes_OI = torch.randint(0, len(grid_N), (8, 64), generator=generator)
    codes_OI[:, ::16], codes_OI[:, 1::16] = 0, len(grid_N) - 1  # each group spans the grid
    weight_OI = grid_N[codes_OI] * 0.125
    found = search_scales(weight_OI, form)
    assert float(_errors(weight_OI, found.scale_OG, found.offset_OG, form).max()) < 1e-8


def test_found_values_are_ones_that_the_stored_dtype_holds():
    for dtype, form in itertools.product(["float16", "bfloat16"], ["affine", "lut"]):
        state = search_initial_state(weight_of(8, 40), LinearQuant(4, form, "lowrank", 16, 2, dtype))
        for value in (*state.factors, state.levels_N, state.offset_OG):
            if value is not None:
                assert torch.equal(value.to(getattr(torch, dtype)).float(), value)


@pytest.mark.parametrize("scales", ["channel", "group", "lowrank"])
@pytest.mark.parametrize("bits", [2, 4])
def test_learned_levels_are_better_than_even_ones(bits, scales):
    weight_OI = weight_of(32, 96)
    total = {}
    for levels in ("balanced", "lut"):
        form = LinearQuant(bits, levels, scales, 32, rank=2)
        state = search_initial_state(weight_OI, form)
        total[levels] = float(_rounding(weight_OI, state.scale(), state.levels_N, None, form).square().sum())
    assert total["lut"] < total["balanced"]


def test_the_search_is_deterministic():
    form = LinearQuant(4, "lut", "lowrank", 32, rank=8)
    first, second = (search_initial_state(weight_of(16, 100), form) for _ in range(2))
    assert torch.equal(first.levels_N, second.levels_N)
    assert all(torch.equal(a, b) for a, b in zip(first.factors, second.factors, strict=True))


def test_low_rank_factors_of_full_rank_hold_the_group_scales():
    form = LinearQuant(4, "int", "lowrank", 32, rank=6, scale_dtype="float32")
    weight_OI = weight_of(16, 172)
    lowrank = search_initial_state(weight_OI, form)
    grouped = search_scales(weight_OI, LinearQuant(4, "int", "group", 32, scale_dtype="float32"))
    group_error = _rounding(weight_OI, grouped.scale_OG, level_values(form), None, form).square().sum()
    assert _rounding(weight_OI, lowrank.scale(), level_values(form), None, form).square().sum() <= group_error


def test_a_weight_of_zeros_gives_zeros():
    for levels, bits in GRIDS:
        for scales in ("channel", "group", "lowrank"):
            form = LinearQuant(bits, levels, scales, 8, rank=2)
            state = search_initial_state(linear_of(torch.zeros(3, 20)).weight, form)
            rest = (state.scale(), state.levels_N, state.offset_OG, form)
            assert _rounding(torch.zeros(3, 20), *rest).abs().max() == 0


def _abs_max(weight_OI, form):
    """Plain scales: the largest weight meets either end; for affine, min and max meet the ends."""
    size = weight_OI.shape[1] if form.scales == "channel" else form.group_size
    groups = list(weight_OI.split(size, dim=1))
    grid_N = level_values(form)
    if form.levels == "affine":
        low_OG = torch.stack([g.amin(1) for g in groups], 1)
        scale_OG = (torch.stack([g.amax(1) for g in groups], 1) - low_OG) / grid_N[-1]
        return [(scale_OG.half().float(), low_OG.half().float())]
    high_OG = torch.stack([g.abs().amax(1) for g in groups], 1)
    return [((high_OG / level.abs()).half().float(), None) for level in (grid_N[0], grid_N[-1])]


def _rounding(weight_OI, scale_OC, levels_N, offset_OG, form):
    codes_OI = quantize(weight_OI, scale_OC, levels_N, offset_OG, form)
    return dequantize(codes_OI, scale_OC, levels_N, offset_OG, form) - weight_OI


def _errors(weight_OI, scale_OG, offset_OG, form):
    squared_OI = _rounding(weight_OI, scale_OG, level_values(form), offset_OG, form).double().square()
    size = weight_OI.shape[1] if form.scales == "channel" else form.group_size
    return torch.stack([group.sum(1) for group in squared_OI.split(size, dim=1)], 1)
