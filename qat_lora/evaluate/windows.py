"""Which tokens an evaluation reads, and which predictions it counts.

Legend: R windows, T tokens per window, L tokens of a text, one document behind the other.

*Whole* windows do not overlap, and each predicts all tokens of the text in it but the first. *Strided* windows overlap,
and each counts only the tokens that no earlier window has predicted, so that every counted token but those of the first
window has at least T - stride tokens of context: slower, lower perplexity, the protocol of the transformers
documentation. Say which one a number comes from.

Where the tokenizer puts a bos before a text, every document has one, and every window begins with one: a window that
begins inside a document has an extra one in front. No prediction of a bos is counted, nor what an extra one predicts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qat_lora.config.source import SourceConfig
from qat_lora.data import bos_of, encoded, eos_of, given_rows, read_documents
from qat_lora.errors import ConfigError, DataError


@dataclass(frozen=True)
class Windows:
    """Token windows and the positions whose next-token prediction counts.

    Attributes:
        input_ids_RT: int64, padded on the right.
        counted_RT: bool; position t counts when the prediction of token t + 1 does.
    """

    input_ids_RT: Tensor
    counted_RT: Tensor


def text_windows(
    spec: str,
    config: SourceConfig,
    tokenizer: Any,
    row_length: int,
    *,
    stride: int = 0,
    max_rows: int | None = None,
    vocab_size: int | None = None,
) -> Windows:
    """Windows over the text of a source; with `stride` 0 whole ones, in which rows of ids stay as they are."""
    bos, eos = bos_of(tokenizer), tokenizer.eos_token_id or 0
    most_rows = None if stride else max_rows  # rows may be short, so a stream may need any number of them
    rows = given_rows(spec, config, row_length, fill_id=eos, vocab_size=vocab_size, max_rows=most_rows)
    if rows is not None and not stride:
        return whole_windows(torch.from_numpy(rows.input_ids_RT), torch.from_numpy(rows.length_R))
    documents: Iterable[list[int]]
    if rows is not None:
        documents = (ids_T[:n].tolist() for ids_T, n in zip(rows.input_ids_RT, rows.length_R, strict=True))
    else:
        eos = eos_of(tokenizer)
        most = None if max_rows is None else row_length + (max_rows - 1) * (stride or row_length)
        read = read_documents(spec, config, tokenizer, vocab_size=vocab_size)
        found = encoded(read, tokenizer, vocab_size=vocab_size, most_tokens=most)
        documents = ([*bos, *tokens.ids_N.tolist(), eos] for tokens in found)
    windows = stream_windows(documents, bos, row_length, stride, max_rows)
    if not len(windows.input_ids_RT):
        raise DataError(f"The tokenizer {type(tokenizer).__name__} gives no tokens for {spec!r}; check its files.")
    return windows


def whole_windows(input_ids_RT: Tensor, lengths_R: Tensor) -> Windows:
    """Windows that are the given rows, of which the first `lengths_R` tokens are real."""
    positions_T = torch.arange(input_ids_RT.shape[1])
    return Windows(input_ids_RT.long(), positions_T[None] + 1 < lengths_R[:, None])


def stream_windows(
    documents: Iterable[list[int]], bos: tuple[int, ...], row_length: int, stride: int = 0, max_rows: int | None = None
) -> Windows:
    """Windows of `row_length` tokens over joined documents: every `stride` tokens, or whole where it is 0.

    `bos` are the ids that the model expects before a text, often none. No more documents are read than are needed.
    """
    if row_length < len(bos) + 2:
        raise ConfigError(f"seq_len={row_length} leaves no prediction behind {len(bos)} ids of bos; use a larger one.")
    ids: list[int] = []
    predictable: list[bool] = []  # all but a bos
    starts: set[int] = set()  # of the documents that begin with bos
    rows: list[list[int]] = []
    counted: list[list[bool]] = []
    begin = end = 0
    coming = iter(documents)
    while len(rows) != max_rows:
        while len(ids) < begin + row_length and (document := next(coming, None)) is not None:
            own = len(bos) if tuple(document[: len(bos)]) == bos else 0
            if own:
                starts.add(len(ids))
            ids += document
            predictable += [False] * own + [True] * (len(document) - own)
        if end == len(ids):
            break
        front = 0 if begin in starts else len(bos)
        predicted, end = end, min(begin + row_length - front, len(ids))
        first = max(predicted, begin + 1)  # nothing in the window predicts its first token
        row, mask = [*bos[:front], *ids[begin:end]], [False] * (front + first - begin - 1) + predictable[first:end]
        rows.append(row + [0] * (row_length - len(row)))
        counted.append(mask + [False] * (row_length - len(mask)))
        # what an extra bos makes smaller may not leave a token that no window predicts
        begin = begin + min(stride, row_length - front - 1) if stride else end
    return Windows(torch.tensor(rows).view(-1, row_length).long(), torch.tensor(counted).view(-1, row_length).bool())
