"""The scale S of a matrix: its shapes, and how its columns are spread over the weights that they scale.

S is one column for a row (``channel``), one for each group of inputs (``group``), or a product A @ B (``lowrank``).
Knows nothing of levels or codes.

Shapes: O out features, I in features, G groups along I (1 for one scale per row), C columns of a scale or an offset
(1, G or I), R rank.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.nn import functional as F

from qat_lora.config import LinearQuant
from qat_lora.models.lean.static_graph import is_static


def group_count(in_features: int, config: LinearQuant) -> int:
    """Groups along a row: 1 for ``channel``, else enough for all columns, the last one maybe shorter."""
    return 1 if config.scales == "channel" else -(-in_features // config.group_size)


def scale_names(config: LinearQuant) -> tuple[str, ...]:
    """The tensors that S is made of, under the names that they have in a state dict: one scale, or two factors."""
    return ("a_OR", "b_RI") if config.scales == "lowrank" else ("scale_OG",)


def scale_shapes(out_features: int, in_features: int, config: LinearQuant) -> list[tuple[int, int]]:
    """The shapes of these tensors."""
    if config.scales == "lowrank":
        return [(out_features, config.rank), (config.rank, in_features)]
    return [(out_features, group_count(in_features, config))]


def multiply_factors(a_OR: Tensor, b_RI: Tensor) -> Tensor:
    """A @ B in float32, whatever autocast says: the trained layer and the frozen one must agree.

    Where graphs are compiled, as a sum of products: a TPU would multiply float32 matrices in bf16, and export, on a
    CPU, would not.
    """
    if is_static(a_OR):
        return (a_OR.float()[:, :, None] * b_RI.float()[None]).sum(1)
    kind = a_OR.device.type  # the meta device has no autocast
    off = torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()
    with off:
        return a_OR.float() @ b_RI.float()


def spread_columns(scale_OC: Tensor, in_features: int, group_size: int) -> Tensor:
    """Spread a scale or offset [O, C] over its columns: a tensor that broadcasts with [O, I]."""
    columns = scale_OC.shape[1]
    if columns in (1, in_features):
        return scale_OC
    spread_OGg = scale_OC.unsqueeze(2).expand(-1, -1, group_size)
    return spread_OGg.reshape(scale_OC.shape[0], columns * group_size)[:, :in_features]


def times_columns(values_OI: Tensor, scale_OC: Tensor, group_size: int) -> Tensor:
    """Product with a spread scale; groups that divide the row broadcast, which is faster and the same."""
    out_features, in_features = values_OI.shape
    columns = scale_OC.shape[1]
    if columns not in (1, in_features) and columns * group_size == in_features:
        grouped_OGg = values_OI.reshape(out_features, columns, group_size)
        return (grouped_OGg * scale_OC.unsqueeze(2)).view(out_features, in_features)
    return values_OI * spread_columns(scale_OC, in_features, group_size)


def sum_columns(values_OI: Tensor, columns: int, group_size: int) -> Tensor:
    """Sum over the columns that share one scale: [O, I] -> [O, C]."""
    out_features, in_features = values_OI.shape
    if columns == in_features:
        return values_OI
    if columns == 1:
        return values_OI.sum(1, keepdim=True)
    padded_OI = F.pad(values_OI, (0, columns * group_size - in_features))
    return padded_OI.view(out_features, columns, group_size).sum(2)
