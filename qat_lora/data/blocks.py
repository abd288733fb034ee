"""From documents, texts or token ids, to token rows of one length.

Owns tokenisation, the eos that ends a document, the three ways to lay documents into rows, right padding, and the
digest that says which rows these are. Does not own the order in which rows are used: that is the reader's.

Legend: R rows, T positions of a row.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from qat_lora.config import Packing
from qat_lora.errors import ConfigError, DataError

Array: TypeAlias = "np.ndarray[Any, Any]"

TEXTS_AT_ONCE = 64  # a fast tokenizer uses its threads on a list


class TokenIds(Protocol):
    """The ids of a document, of which only those that are sliced need be read."""

    def __len__(self) -> int:
        """How many ids there are."""

    def __getitem__(self, part: slice, /) -> Array:
        """Return some of them, ``[N]`` int64."""


Document: TypeAlias = "str | TokenIds"  # a text, or its token ids


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers offer it."""

    @property
    def eos_token_id(self) -> Any:
        """Id of the token that ends a text."""

    @property
    def __call__(self) -> Callable[..., Any]:
        """Map a list of texts to {"input_ids": list of lists}."""


class Blocks(NamedTuple):
    """Token rows of one length.

    Attributes:
        input_ids_RT: ``[R, T]`` int32; what follows the end of a row is eos.
        lengths_R: ``[R]`` int32, valid tokens per row; below T in the last row only, unless documents were padded.
        starts_RT: ``[R, T]`` bool, where positions and attention begin anew: at each document, and at each row, where
            one that was cut goes on. None where they run through the whole row.
    """

    input_ids_RT: Tensor
    lengths_R: Tensor
    starts_RT: Tensor | None = None

    def one_document_each(self) -> Blocks:
        """Return the same rows, each one document."""
        starts_RT = torch.zeros(self.input_ids_RT.shape, dtype=torch.bool)
        starts_RT[:, 0] = True
        return self._replace(starts_RT=starts_RT)

    def digest(self) -> str:
        """Return the sha256 of shape, ids, lengths and starts: equal digest, equal rows."""
        digest = hashlib.sha256(repr(tuple(self.input_ids_RT.shape)).encode())
        for x in (self.input_ids_RT, self.lengths_R):
            digest.update(np.ascontiguousarray(x.numpy(), dtype="<i4").tobytes())
        if self.starts_RT is not None:
            digest.update(np.packbits(self.starts_RT.numpy(), axis=1, bitorder="little").tobytes())
        return digest.hexdigest()


def tokenize_blocks(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    seq_len: int,
    *,
    packing: Packing = "stream",
    vocab_size: int | None = None,
    max_rows: int | None = None,
) -> Blocks:
    """Tokenise documents, end each with eos, and lay them into rows of `seq_len` tokens.

    ``stream`` lays them end to end and cuts the whole. ``documents`` does the same and says where each begins. ``pad``
    begins a row with each document, which goes on in further rows where it is longer. No document is truncated, one
    that gives no token is left out, one that ends with eos gets no second; what is left of a row is filled with eos.

    With `max_rows`, documents are read only until these rows are full, and of one that is token ids already, which is
    not tokenised, no more than they hold.
    An id that a vocabulary of `vocab_size` tokens lacks is a DataError, and so is no token at all: rows of nothing but
    eos would be trained on in silence.
    """
    for name, value in (("seq_len", seq_len), ("max_rows", max_rows)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be positive, but {name}={value}; use 1 or more.")
    eos = _eos(tokenizer)
    arrays = _token_arrays(documents, tokenizer, eos, None if max_rows is None else max_rows * seq_len)
    first = next(arrays, None)
    if first is None:
        raise DataError(
            f"The tokenizer {type(tokenizer).__name__} gives no tokens for this text; check the tokenizer files "
            "of the model, and that the source holds text."
        )
    arrays = _within(itertools.chain([first], arrays), vocab_size)
    if packing == "pad":
        return _padded_rows(arrays, seq_len, eos=eos, max_rows=max_rows)
    blocks = _joined_rows(arrays, seq_len, eos=eos, max_rows=max_rows)
    return blocks if packing == "documents" else blocks._replace(starts_RT=None)


def _eos(tokenizer: Tokenizer) -> int:
    eos = tokenizer.eos_token_id
    if eos is None:
        raise DataError(
            f"The tokenizer {type(tokenizer).__name__} has no eos token to set texts apart; set its eos_token."
        )
    return int(eos)


def _token_arrays(documents: Iterable[Document], tokenizer: Tokenizer, eos: int, wanted: int | None) -> Iterator[Array]:
    # One more than is wanted, so that what is wanted stays where the last is an eos and taken off.
    needed = slice(None if wanted is None else wanted + 1)
    # Documents without a token would leave two eos in a row and teach nothing.
    source = (document for document in documents if len(document))
    while chunk := list(itertools.islice(source, TEXTS_AT_ONCE)):
        tokenized = iter(_tokenized([text for text in chunk if isinstance(text, str)], tokenizer))
        for document in chunk:
            ids = next(tokenized) if isinstance(document, str) else document[needed]
            ids_N = np.asarray(ids[:-1] if len(ids) and ids[-1] == eos else ids, dtype=np.int64)
            if len(ids_N):
                yield np.append(ids_N, eos)


def _tokenized(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    if not texts:
        return []
    # verbose=False: no warning that a text is longer than the model's context, since it is cut here.
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    return ids


def _joined_rows(documents: Iterable[Array], seq_len: int, *, eos: int, max_rows: int | None) -> Blocks:
    """Lay documents end to end and cut the whole into rows."""
    wanted = None if max_rows is None else max_rows * seq_len
    parts, begins, count = [], [], 0
    for part in documents:
        parts.append(part)
        begins.append(count)
        count += len(part)
        if wanted is not None and count >= wanted:
            break
    ids = np.concatenate(parts)[:wanted]
    rows = -(-len(ids) // seq_len)
    padded = np.full(rows * seq_len, eos, dtype=np.int32)
    padded[: len(ids)] = ids
    starts = np.zeros(rows * seq_len, dtype=bool)
    starts[begins] = starts[::seq_len] = True
    lengths = np.full(rows, seq_len, dtype=np.int32)
    lengths[-1] = len(ids) - (rows - 1) * seq_len
    ids_RT, starts_RT = (torch.from_numpy(x.reshape(rows, seq_len)) for x in (padded, starts))
    return Blocks(ids_RT, torch.from_numpy(lengths), starts_RT)


def _padded_rows(documents: Iterable[Array], seq_len: int, *, eos: int, max_rows: int | None) -> Blocks:
    """Begin a row with each document and cut the longer ones."""
    pieces: list[Array] = []
    for document in documents:
        pieces += [document[first : first + seq_len] for first in range(0, len(document), seq_len)]
        if max_rows is not None and len(pieces) >= max_rows:
            break
    pieces = pieces[:max_rows]
    padded = np.full((len(pieces), seq_len), eos, dtype=np.int32)
    for row, piece in enumerate(pieces):
        padded[row, : len(piece)] = piece
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int32)
    return Blocks(torch.from_numpy(padded), torch.from_numpy(lengths))


def _within(documents: Iterable[Array], vocab_size: int | None) -> Iterator[Array]:
    for ids in documents:
        beyond = ids[(ids < 0) | (ids >= vocab_size)] if vocab_size is not None else ids[:0]
        if len(beyond):
            raise DataError(
                f"The tokenizer gives the id {beyond[0]}, but the model's vocabulary has {vocab_size} tokens; "
                "use the tokenizer that belongs to the model."
            )
        yield ids
