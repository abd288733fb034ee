"""Codes of 2, 3, 4 or 8 bits in bytes, and back: exact inverses for any width and any number of columns.

Owns the byte layout and nothing else. A row is stored in planes: for 2 and 4 bits, byte p of a row holds the
codes of columns p, p + P, p + 2P, .. (P bytes per row), lowest bits first, so that unpacking writes runs
of columns and never interleaves. 3 bits are a plane of the two low bits followed by a plane of the high
bit. 8 bits are the codes.

Shapes: O rows, I codes in a row, P bytes in a row, F codes in a byte.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

PLANES: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
"""Widths in bits of the planes that make up a code, the lowest bits first; a plane is packed as a code is."""


def packed_bytes(in_features: int, bits: int) -> int:
    """Bytes that a row of `in_features` codes takes, the padding of its last bytes included."""
    return sum(-(-in_features * width // 8) for width in PLANES[bits])


def pack(codes_OI: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [O, I], each below 2^bits, into bytes uint8 [O, P]."""
    planes, shift = [], 0
    for width in PLANES[bits]:
        planes.append(_pack_plane((codes_OI >> shift) & ((1 << width) - 1), width))
        shift += width
    return torch.cat(planes, 1)


def unpack(packed_OP: Tensor, bits: int, in_features: int) -> Tensor:
    """The codes uint8 [O, I] that `pack` stored."""
    planes, start, shift = [], 0, 0
    for width in PLANES[bits]:
        length = packed_bytes(in_features, width)
        plane_OI = _unpack_plane(packed_OP[:, start : start + length], width, in_features)
        planes.append(plane_OI << shift if shift else plane_OI)
        start, shift = start + length, shift + width
    return functools.reduce(torch.bitwise_or, planes)


def _pack_plane(values_OI: Tensor, width: int) -> Tensor:
    rows, columns = values_OI.shape
    fields, length = 8 // width, packed_bytes(columns, width)
    padded_OFP = F.pad(values_OI, (0, fields * length - columns)).view(rows, fields, length)
    shifts_F1 = torch.arange(0, 8, width, dtype=torch.uint8, device=values_OI.device)[:, None]
    return (padded_OFP << shifts_F1).sum(1, dtype=torch.uint8)  # the fields do not overlap, so the sum is their union


def _unpack_plane(packed_OP: Tensor, width: int, columns: int) -> Tensor:
    if width == 8:
        return packed_OP
    # Shifts by numbers: a shift by a tensor of shifts is a loop that the TPU's compiler does not come back from.
    mask = (1 << width) - 1
    return torch.cat([(packed_OP >> shift) & mask for shift in range(0, 8, width)], 1)[:, :columns]
