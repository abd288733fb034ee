"""Rows in random order through a buffer, so that no source must fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

from qat_lora.config.source import SourceConfig

T = TypeVar("T")


def shuffled(rows: Iterable[T], config: SourceConfig) -> Iterator[T]:
    """Yield all rows, each drawn at random from a buffer of `shuffle_buffer` rows; in their own order where that is 0.

    The order is a function of the number of rows, `shuffle_buffer` and `data_seed`. No row comes earlier than
    `shuffle_buffer` - 1 places before its own.
    """
    if not config.shuffle_buffer:
        yield from rows
        return
    random = np.random.RandomState(config.data_seed)  # a stream that NumPy has frozen
    buffer: list[T] = []
    for row in rows:
        if len(buffer) < config.shuffle_buffer:
            buffer.append(row)
            continue
        place = random.randint(config.shuffle_buffer)
        yield buffer[place]
        buffer[place] = row
    yield from (buffer[place] for place in random.permutation(len(buffer)))
