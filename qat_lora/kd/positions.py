"""Rows that hold several documents: the positions that begin anew with each.

From the positions alone all else follows: a query at position p of its document sees itself and the p keys before it
(`qat_lora.models.trunk_hidden`), and where the next position is 0 there is no next token (`kd.label_mask`).

Legend: R rows, T positions of a row.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"


def document_positions(starts_RT: Array) -> Array:
    """Return int64 [R, T]: how many tokens lie between a token and the last start at or before it.

    `starts_RT` is bool; a row begins a document, or continues one from position 0, whatever its first bit says.
    """
    place_T = np.arange(starts_RT.shape[1])
    return place_T - np.maximum.accumulate(np.where(starts_RT, place_T, 0), axis=1)
