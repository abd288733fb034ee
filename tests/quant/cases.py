"""Every config of quantisation and the awkward shapes it is tried on, shared by the tests of this folder."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from qat_lora.config import LinearQuant
from qat_lora.quant import Form
from qat_lora.quant.grids import Grid

GRIDS = [
    *[(levels, bits) for levels in ("balanced", "int", "affine", "lut") for bits in (2, 3, 4, 8)],
    ("ternary", 2),
    ("nf4", 4),
    ("iq4_nl", 4),
]
SCALES = ("channel", "group", "lowrank")
SHAPES = [  # O, I, g
    (7, 172, 32),  # a short last group, as in stories260k
    (5, 33, 32),  # a last group of one
    (3, 1, 32),  # one input
    (6, 20, 32),  # a group wider than the row
    (4, 64, 32),  # whole groups
    (3, 10, 1),  # a scale for every weight
]


def configs(group_size: int = 32, rank: int = 3) -> list[LinearQuant]:
    """All combinations of grid, width and scale."""
    return [
        LinearQuant(bits=bits, levels=levels, scales=scales, group_size=group_size, rank=rank)
        for (levels, bits), scales in itertools.product(GRIDS, SCALES)
    ]


def config_name(config: LinearQuant) -> str:
    """Short test id."""
    return f"{config.levels}{config.bits}-{config.scales}"


def form_of(
    config: LinearQuant, scale_OC: Tensor, offset_OG: Tensor | None = None, levels_N: Tensor | None = None
) -> Form:
    """A form of one scale, with the levels of its config if none are given."""
    return Form((scale_OC,), Grid.of(config, levels_N).levels_N, offset_OG, config)


def weight_of(out_features: int, in_features: int, seed: int = 0) -> Tensor:
    """A weight with rows and columns of different size and a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    weight_OI = torch.randn(out_features, in_features, generator=generator)
    weight_OI *= torch.exp(0.5 * torch.randn(out_features, 1, generator=generator))
    weight_OI[:, :: max(1, in_features // 2)] *= 3
    return weight_OI * 0.05


def linear_of(weight_OI: Tensor, bias: bool = True) -> nn.Linear:
    """A Linear that holds a given weight."""
    linear = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias)
    linear.weight = nn.Parameter(weight_OI.clone())
    return linear
