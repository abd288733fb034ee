"""Integers of a few bits each, packed into bytes; both ways are exact.

Legend: R rows, N values, P bytes, G groups of eight values, B bytes of a group.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"


def pack(values_RN: Array, bits: int) -> Array:
    """Pack integers in 0..2^bits - 1 into bytes uint8 [R, P], 1 <= bits <= 32.

    Value n of a row has the bits n * bits up to (n + 1) * bits of the row, the lowest first. Eight values fill `bits`
    bytes exactly, so all groups of eight are shifted into place at once.
    """
    rows, count = values_RN.shape
    groups = -(-count // 8)
    padded = np.zeros((rows, groups * 8), np.uint64)
    padded[:, :count] = values_RN
    bytes_RGB = np.zeros((rows, groups, bits), np.uint8)
    for place in range(8):
        first, shift = divmod(place * bits, 8)
        value_RG = padded[:, place::8] << np.uint64(shift)
        for offset in range(_bytes_over(shift, bits)):
            bytes_RGB[:, :, first + offset] |= (value_RG >> np.uint64(8 * offset)).astype(np.uint8)
    return bytes_RGB.reshape(rows, -1)[:, : -(-count * bits // 8)].copy()


def unpack(packed_RP: Array, bits: int, count: int) -> Array:
    """The `count` values of each row that `pack` was given, uint64 [R, count]."""
    rows, groups = len(packed_RP), -(-count // 8)
    padded_RP = np.zeros((rows, groups * bits), np.uint8)
    padded_RP[:, : packed_RP.shape[1]] = packed_RP
    bytes_RGB = padded_RP.reshape(rows, groups, bits)
    values_RN = np.empty((rows, groups * 8), np.uint64)
    mask = np.uint64((1 << bits) - 1)
    for place in range(8):
        first, shift = divmod(place * bits, 8)
        value_RG = np.zeros((rows, groups), np.uint64)
        for offset in range(_bytes_over(shift, bits)):
            value_RG |= bytes_RGB[:, :, first + offset].astype(np.uint64) << np.uint64(8 * offset)
        values_RN[:, place::8] = (value_RG >> np.uint64(shift)) & mask
    return values_RN[:, :count]


def _bytes_over(shift: int, bits: int) -> int:
    """Over how many bytes a value lies that begins at a bit `shift` of the first."""
    return -(-(shift + bits) // 8)
