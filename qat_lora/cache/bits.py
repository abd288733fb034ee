"""Integers of a few bits each, packed into bytes, and draws as runs of equal ones; all ways are exact.

Legend: R rows, N values or draws, P bytes, G groups of eight values, B bytes of a group, T positions of a row, X draws
of a row (T * N).
"""

from __future__ import annotations

import numpy as np

from qat_lora.kd.positions import Array as Array


def pack(values_RN: Array, bits: int) -> Array:
    """Pack integers in 0..2^bits - 1 into bytes uint8 [R, P], 1 <= bits <= 32.

    Value n of a row has the bits n * bits up to (n + 1) * bits of the row, the lowest first. Eight values fill `bits`
    bytes exactly, so all groups of eight are shifted into place at once.
    """
    if bits == 1:
        return np.packbits(values_RN, axis=1, bitorder="little")
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
    """The `count` values of each row that `pack` was given, uint8 [R, count], of more than 8 bits uint64."""
    if bits == 1:
        return np.unpackbits(packed_RP, axis=1, count=count, bitorder="little")
    rows, groups = len(packed_RP), -(-count // 8)
    padded_RP = np.zeros((rows, groups * bits), np.uint8)
    padded_RP[:, : packed_RP.shape[1]] = packed_RP
    bytes_RGB = padded_RP.reshape(rows, groups, bits)
    values_RN = np.empty((rows, groups * 8), np.uint8 if bits <= 8 else np.uint64)
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


def run_ends(ids: Array) -> Array:
    """Where the next draw [..., N] is another token, or there is none: bool [..., N]."""
    return np.concatenate([ids[..., 1:] != ids[..., :-1], np.ones_like(ids[..., :1], dtype=bool)], axis=-1)


def to_runs(ids_RTN: Array, ends_RTN: Array, id_bits: int) -> list[Array]:
    """The token of each run, packed, for each row its own bytes; `ends_RTN` are `run_ends` of the ids."""
    return [pack(ids_TN[ends_TN][None], id_bits)[0] for ids_TN, ends_TN in zip(ids_RTN, ends_RTN, strict=True)]


def runs_of(ends: Array) -> Array:
    """Of each draw the number of its run, counted over its row: int64 [R, T * N]."""
    ends_RX = ends.reshape(len(ends), -1).astype(np.int64)
    return np.cumsum(ends_RX, axis=1) - ends_RX


def from_runs(run_RX: Array, packed_RP: Array, id_bits: int) -> Array:
    """The draws' tokens int64 [R, T * N], from the bytes of each row's tokens, filled up to the longest."""
    count = int(run_RX[:, -1].max()) + 1
    if -(-count * id_bits // 8) != packed_RP.shape[1]:
        raise ValueError(f"{count} runs of {id_bits} bits in {packed_RP.shape[1]} bytes")
    return np.take_along_axis(unpack(packed_RP, id_bits, count).astype(np.int64), run_RX, axis=1)
