"""From texts to token rows of one length.

Owns tokenisation, joining by eos, cutting, right padding, and the digest that says which rows these are. Does
not own the order in which rows are used: that is the reader's.

Legend: R rows, T positions of a row.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from qat_lora.errors import ConfigError, DataError

TEXTS_AT_ONCE = 64  # a fast tokenizer uses its threads on a list


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
        lengths_R: ``[R]`` int32, valid tokens per row; below T in the last row only.
    """

    input_ids_RT: Tensor
    lengths_R: Tensor

    def digest(self) -> str:
        """Return the sha256 of shape, ids and lengths: equal digest, equal rows."""
        digest = hashlib.sha256(repr(tuple(self.input_ids_RT.shape)).encode())
        for x in (self.input_ids_RT, self.lengths_R):
            digest.update(np.ascontiguousarray(x.numpy(), dtype="<i4").tobytes())
        return digest.hexdigest()


def tokenize_blocks(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    seq_len: int,
    *,
    vocab_size: int | None = None,
    max_rows: int | None = None,
) -> Blocks:
    """Tokenise texts, end each with eos, lay them end to end and cut the whole into rows of `seq_len` tokens.

    No text is truncated, one that gives no token is left out, and the last row is padded on the right with eos.
    With `max_rows`, texts are read only until these rows are full. An id that a vocabulary of `vocab_size` tokens
    lacks is a DataError, and so is no token at all: rows of nothing but eos would be trained on in silence.
    """
    for name, value in (("seq_len", seq_len), ("max_rows", max_rows)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be positive, but {name}={value}; use 1 or more.")
    eos = _eos(tokenizer)
    wanted = None if max_rows is None else max_rows * seq_len
    ids = _first_tokens(_token_arrays(texts, tokenizer, eos), wanted)
    if len(ids) == 0:
        raise DataError(
            f"The tokenizer {type(tokenizer).__name__} gives no tokens for this text; check the tokenizer files "
            "of the model, and that the source holds text."
        )
    _check_ids(ids, vocab_size)
    rows = -(-len(ids) // seq_len)
    padded = np.full(rows * seq_len, eos, dtype=np.int32)
    padded[: len(ids)] = ids
    lengths = np.full(rows, seq_len, dtype=np.int32)
    lengths[-1] = len(ids) - (rows - 1) * seq_len
    return Blocks(torch.from_numpy(padded.reshape(rows, seq_len)), torch.from_numpy(lengths))


def _eos(tokenizer: Tokenizer) -> int:
    eos = tokenizer.eos_token_id
    if eos is None:
        raise DataError(
            f"The tokenizer {type(tokenizer).__name__} has no eos token to set texts apart; set its eos_token."
        )
    return int(eos)


def _token_arrays(texts: Iterable[str], tokenizer: Tokenizer, eos: int) -> Iterator[np.ndarray[Any, Any]]:
    # Texts without a token would leave two eos in a row and teach nothing.
    source = (text for text in texts if text)
    while chunk := list(itertools.islice(source, TEXTS_AT_ONCE)):
        # verbose=False: no warning that a text is longer than the model's context, since it is cut here.
        for ids in tokenizer(chunk, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]:
            if len(ids):
                yield np.array([*ids, eos], dtype=np.int64)


def _first_tokens(arrays: Iterable[np.ndarray[Any, Any]], wanted: int | None) -> np.ndarray[Any, Any]:
    parts, count = [np.empty(0, dtype=np.int64)], 0
    for part in arrays:
        parts.append(part)
        count += len(part)
        if wanted is not None and count >= wanted:
            break
    return np.concatenate(parts)[:wanted]


def _check_ids(ids: np.ndarray[Any, Any], vocab_size: int | None) -> None:
    beyond = ids[(ids < 0) | (ids >= vocab_size)] if vocab_size is not None else ids[:0]
    if len(beyond):
        raise DataError(
            f"The tokenizer gives the id {beyond[0]}, but the model's vocabulary has {vocab_size} tokens; "
            "use the tokenizer that belongs to the model."
        )
