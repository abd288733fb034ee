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


@dataclass(frozen=True)
class Stream:
    """Documents one behind the other.

    Attributes:
        ids_L: int64.
        starts_L: bool, the first token of each document that begins with `bos`.
        bos: ids that the model expects before a text; often none.
    """

    ids_L: Tensor
    starts_L: Tensor
    bos: tuple[int, ...] = ()

    @classmethod
    def of(cls, documents: Iterable[list[int]], bos: tuple[int, ...], *, tokens: int | None = None) -> Stream:
        """Join documents, and read no more of them than hold so many tokens."""
        ids: list[int] = []
        starts: list[int] = []
        for document in documents:
            if bos and tuple(document[: len(bos)]) == bos:
                starts.append(len(ids))
            ids += document
            if tokens is not None and len(ids) >= tokens:
                break
        starts_L = torch.zeros(len(ids), dtype=torch.bool)
        starts_L[starts] = True
        return cls(torch.tensor(ids[:tokens]), starts_L[:tokens], bos)

    @property
    def is_bos_L(self) -> Tensor:
        """The tokens of the documents' own bos."""
        found_L = torch.zeros_like(self.starts_L)
        for place in range(len(self.bos)):
            found_L[place:] |= self.starts_L[: len(found_L) - place]
        return found_L


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
    most = None if max_rows is None else row_length + (max_rows - 1) * (stride or row_length)
    documents: Iterable[list[int]]
    if rows is not None:
        documents = (ids_T[:n].tolist() for ids_T, n in zip(rows.input_ids_RT, rows.length_R, strict=True))
    else:
        eos = eos_of(tokenizer)
        read = read_documents(spec, config, tokenizer, vocab_size=vocab_size)
        found = encoded(read, tokenizer, vocab_size=vocab_size, most_tokens=most)
        documents = ([*bos, *tokens.ids_N.tolist(), eos] for tokens in found)
    stream = Stream.of(documents, bos, tokens=most)
    if not len(stream.ids_L):
        raise DataError(f"The tokenizer {type(tokenizer).__name__} gives no tokens for {spec!r}; check its files.")
    return stream_windows(stream, row_length, stride, max_rows)


def whole_windows(input_ids_RT: Tensor, lengths_R: Tensor) -> Windows:
    """Windows that are the given rows, of which the first `lengths_R` tokens are real."""
    positions_T = torch.arange(input_ids_RT.shape[1])
    return Windows(input_ids_RT.long(), positions_T[None] + 1 < lengths_R[:, None])


def stream_windows(stream: Stream, row_length: int, stride: int = 0, max_rows: int | None = None) -> Windows:
    """Windows of `row_length` tokens over a stream: every `stride` tokens, or whole where it is 0."""
    total, bos = len(stream.ids_L), torch.tensor(stream.bos, dtype=torch.long)
    if row_length < len(bos) + 2:
        raise ConfigError(f"seq_len={row_length} leaves no prediction behind {len(bos)} ids of bos; use a larger one.")
    predictable_L = ~stream.is_bos_L
    rows: list[Tensor] = []
    counted: list[Tensor] = []
    begin = end = 0
    while end < total and len(rows) != max_rows:
        front = 0 if stream.starts_L[begin] else len(bos)
        predicted, end = end, min(begin + row_length - front, total)
        row, mask = torch.zeros(row_length, dtype=torch.long), torch.zeros(row_length, dtype=torch.bool)
        row[:front] = bos[:front]
        row[front : front + end - begin] = stream.ids_L[begin:end]
        first = max(predicted, begin + 1)  # nothing in the window predicts its first token
        mask[front + first - begin - 1 : front + end - begin - 1] = predictable_L[first:end]
        # what an extra bos makes smaller may not leave a token that no window predicts
        begin = begin + min(stride, row_length - front - 1) if stride else end
        rows.append(row)
        counted.append(mask)
    return Windows(torch.stack(rows), torch.stack(counted))
