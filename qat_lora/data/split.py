"""Which documents are held out for evaluation, decided before rows are packed.

The split is by document: a held-out row never shares a document with a training row. The side of a document follows
from its tokens alone. A long document is cut into sections, each of which counts as a document here: one long book has
rows on both sides, and shares no section between them. Texts that are written of one chat are on one side.

Legend: N tokens of a document.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np

from qat_lora.data.encode import Array, Tokens
from qat_lora.errors import DataError

SECTION_ROWS = 64  # a longer document is cut, so that one long book has rows on both sides
FEWEST_SECTIONS = 8  # of a source of fewer than 8 * 64 rows, in which sections are shorter


def section_rows(rows: int) -> int:
    """How many rows a section of a source of `rows` rows has."""
    return min(SECTION_ROWS, max(1, rows // FEWEST_SECTIONS))


def split_documents(documents: Sequence[Tokens], section: int, eval_fraction: float) -> list[tuple[Tokens, bool]]:
    """Documents in their order, each with its side; one is cut where the side of its sections changes."""
    if not eval_fraction:
        return [(tokens, False) for tokens in documents]
    parts = [[tokens[i : i + section] for i in range(0, len(tokens), section)] for tokens in documents]
    flat = [part for cut in parts for part in cut]
    held_out = iter(sides([part.ids_N for part in flat], eval_fraction, chats=[part.chat for part in flat]).tolist())
    found: list[tuple[Tokens, bool]] = []
    for tokens, cut in zip(documents, parts, strict=True):
        of_parts = [next(held_out) for _ in cut]
        turns = [i for i in range(len(cut)) if i == 0 or of_parts[i] != of_parts[i - 1]]
        for first, stop in zip(turns, [*turns[1:], len(cut)], strict=True):
            found.append((tokens[first * section : stop * section], of_parts[first]))
    return found


def sides(documents: Sequence[Array], eval_fraction: float, *, chats: Sequence[bytes] = ()) -> Array:
    """Return ``[documents]`` bool, which are held out: those whose sha256, as a share of 2^256, is small.

    At least one is, and at least one is not. Equal documents are on the same side, and so are those of one chat.
    """
    digests = [hashlib.sha256(np.ascontiguousarray(ids_N, dtype="<i4").tobytes()).digest() for ids_N in documents]
    digests = [chat or digest for chat, digest in itertools.zip_longest(chats, digests)]
    shares = np.array([int.from_bytes(digest[:8], "big") / 2**64 for digest in digests])
    held_out = shares < eval_fraction
    if not eval_fraction:
        return held_out
    if not held_out.any():
        held_out = shares == shares.min()
    elif held_out.all():
        held_out = shares < shares.max()
    check_split(held_out, eval_fraction)
    return held_out


def check_split(held_out: Array, eval_fraction: float) -> None:
    """Raise DataError where one side has nothing."""
    if eval_fraction and (held_out.all() or not held_out.any()):
        raise DataError(
            f"The source has no two rows of different documents, so eval_fraction={eval_fraction:g} can hold out none; "
            "give more text, a smaller --seq-len or more --max-rows, or --eval-fraction 0 to let runs hold out rows."
        )
