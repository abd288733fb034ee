"""The k largest of each row, by whatever selects fastest where the numbers are.

Legend: S rows, V columns, K of them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

# torch's topk keeps a heap of K; NumPy's selection has none. On one core (AVX-512), K = 64 of 4,096: 5 microseconds a
# row against 16. Of much larger rows torch is the faster one.
MOST_COLUMNS = 16_384
ROWS_AT_ONCE = 32
COLUMN_MASK = 2**29 - 1


def largest(x_SV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ``[S, k]`` values in descending order and their columns, int64; which of equal ones comes is not said."""
    if x_SV.device.type != "cpu" or x_SV.dtype != torch.float32 or not k < x_SV.shape[-1] <= MOST_COLUMNS:
        values_SK, columns_SK = x_SV.topk(k, dim=-1, sorted=True)
        return values_SK, columns_SK
    parts = x_SV.detach().tensor_split(max(1, min(torch.get_num_threads(), len(x_SV))))
    with ThreadPoolExecutor(len(parts)) as pool:  # NumPy leaves the other threads alone while it selects
        chosen = list(pool.map(_columns, parts, [k] * len(parts))) if len(parts) > 1 else [_columns(x_SV.detach(), k)]
    columns_SK = torch.from_numpy(np.concatenate(chosen))
    return x_SV.gather(-1, columns_SK), columns_SK


def _columns(x_SV: Tensor, k: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Columns of the k largest, found by selecting among numbers that carry their columns.

    A float32 leaves 29 bits of a float64 empty: with the column in them, numbers are still in order, and selecting
    values is less than half the work of selecting indices. Some rows at a time, which stay near the processor.
    """
    x, width = x_SV.numpy(), x_SV.shape[-1]
    column_bits = np.arange(width, dtype=np.int64)
    columns_SK = np.empty((len(x), k), np.int64)
    numbers = np.empty((min(ROWS_AT_ONCE, len(x)), width), np.float64)
    for first in range(0, len(x), ROWS_AT_ONCE):
        rows = x[first : first + ROWS_AT_ONCE]
        part = numbers[: len(rows)]
        part[:] = rows
        bits = part.view(np.int64)
        bits |= column_bits
        part.partition(width - k, axis=-1)
        top = -np.sort(-part[:, width - k :], axis=-1)
        if np.isnan(top).any():  # what an infinity becomes
            columns = np.argpartition(rows, width - k, axis=-1)[:, width - k :]
            order = np.argsort(-np.take_along_axis(rows, columns, -1), axis=-1, kind="stable")
            columns_SK[first : first + len(rows)] = np.take_along_axis(columns, order, -1)
        else:
            columns_SK[first : first + len(rows)] = top.view(np.int64) & COLUMN_MASK
    return columns_SK
