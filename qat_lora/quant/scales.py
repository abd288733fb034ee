"""The scale S of a quantised matrix as a module: one per group or row, or a product of two thin matrices.

Owns the parameters and their rounding to the dtype they are stored in. It does not know codes or grids, nor
how a good start is found (`search`, `factors`).

Shapes: O out features, I in features, G groups along I (1 for one scale per row), R rank.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from qat_lora.config import LinearQuant
from qat_lora.models.lean.static_graph import is_static
from qat_lora.quant.primitives import round_through


def group_count(in_features: int, config: LinearQuant) -> int:
    """Groups along a row: 1 for ``channel``, else enough for all columns, the last one maybe shorter."""
    return 1 if config.scales == "channel" else -(-in_features // config.group_size)


class GroupScale(nn.Module):
    """S[o, i] = scale_OG[o, i // group_size]; one column means one scale per row.

    Attributes:
        scale_OG: Parameter, float32.
        dtype: the values that `forward` gives are ones this dtype can hold.
    """

    def __init__(self, scale_OG: Tensor, dtype: torch.dtype) -> None:
        """Start from a searched scale."""
        super().__init__()
        self.scale_OG = nn.Parameter(scale_OG.float())
        self.dtype = dtype

    def forward(self) -> Tensor:
        """The scale as it will be stored, float32 [O, G]."""
        return round_through(self.scale_OG, self.dtype)

    def extra_repr(self) -> str:
        """Shape and dtype, for `print(model)`."""
        return f"{tuple(self.scale_OG.shape)}, stored as {self.dtype}"


class LowRankScale(nn.Module):
    """S = A @ B, rank R: one scale for each weight from (O + I) * R numbers.

    Attributes:
        a_OR: Parameter, float32.
        b_RI: Parameter, float32.
        dtype: A and B are rounded to it, and multiplied in float32.
    """

    def __init__(self, a_OR: Tensor, b_RI: Tensor, dtype: torch.dtype) -> None:
        """Start from searched factors."""
        super().__init__()
        self.a_OR = nn.Parameter(a_OR.float())
        self.b_RI = nn.Parameter(b_RI.float())
        self.dtype = dtype

    def forward(self) -> Tensor:
        """The product of the factors as they will be stored, float32 [O, I]."""
        return multiply_factors(round_through(self.a_OR, self.dtype), round_through(self.b_RI, self.dtype))

    def extra_repr(self) -> str:
        """Shapes and dtype, for `print(model)`."""
        return f"{tuple(self.a_OR.shape)} @ {tuple(self.b_RI.shape)}, stored as {self.dtype}"


def multiply_factors(a_OR: Tensor, b_RI: Tensor) -> Tensor:
    """A @ B in float32, whatever autocast says: the trained layer and the frozen one must agree.

    On XLA as a sum of products: a TPU would multiply float32 matrices in bf16, and export, on a CPU, would not.
    """
    if is_static(a_OR):
        return (a_OR.float()[:, :, None] * b_RI.float()[None]).sum(1)
    kind = a_OR.device.type
    off = torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()
    with off:  # the meta device has no autocast
        return a_OR.float() @ b_RI.float()
