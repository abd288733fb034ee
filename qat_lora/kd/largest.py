"""The k largest of each row, by whatever selects fastest where the numbers are.

Legend: S rows, V columns, K of them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

# torch's topk keeps a heap of K; NumPy's selection has none. On one core (AVX-512), K = 64 of 4,096: 4 microseconds a
# row against 20. Of much larger rows torch is the faster one.
MOST_COLUMNS = 16_384
ROWS_AT_ONCE = 128
COLUMN_MASK = 2**29 - 1
GROUP = 8

IntArray: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
FloatArray: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


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


def _columns(x_SV: Tensor, k: int) -> IntArray:
    """Columns of the k largest. Some rows at a time, which stay near the processor.

    Of groups of `GROUP` columns, the k with the largest maxima hold k numbers that no other exceeds: these are selected
    first, and then among their numbers.
    """
    width = x_SV.shape[-1]
    groups = width // GROUP
    if groups < 2 * k:
        return np.concatenate([_selected(rows.numpy(), k) for rows in x_SV.split(ROWS_AT_ONCE)])
    of_group = torch.arange(GROUP) * groups  # a group is columns j, j + groups, j + 2 * groups, ...
    behind = torch.arange(groups * GROUP, width)  # columns of no group
    found = []
    for rows in x_SV.split(ROWS_AT_ONCE):
        maxima = rows[:, : groups * GROUP].unflatten(1, (GROUP, groups)).amax(1)
        columns = torch.from_numpy(_selected(maxima.numpy(), k))[..., None] + of_group
        columns = torch.cat([columns.flatten(1), behind.expand(len(rows), -1)], dim=1)
        best = torch.from_numpy(_selected(rows.gather(1, columns).numpy(), k))
        found.append(columns.gather(1, best).numpy())
    return np.concatenate(found)


def _selected(rows: FloatArray, k: int) -> IntArray:
    """Columns of the k largest of each row, found by selecting among numbers that carry their columns.

    A float32 leaves 29 bits of a float64 empty: with the column in them, numbers are still in order, and selecting
    values is less than half the work of selecting indices.
    """
    width = rows.shape[-1]
    numbers = rows.astype(np.float64)
    bits = numbers.view(np.int64)
    bits |= np.arange(width)
    numbers.partition(width - k, axis=-1)
    top = -np.sort(-numbers[:, width - k :], axis=-1)
    if not np.isnan(top).any():
        columns: IntArray = top.view(np.int64) & COLUMN_MASK
        return columns
    columns = np.argpartition(rows, width - k, axis=-1)[:, width - k :]  # an infinity became a NaN
    order = np.argsort(-np.take_along_axis(rows, columns, -1), axis=-1, kind="stable")
    return np.take_along_axis(columns, order, -1)
