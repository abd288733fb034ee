"""Documents, which are texts, chats or token ids, as tokens.

Owns what a tokenizer adds to a text by itself, which tokens of a chat are an assistant's, and the check against the
vocabulary. Does not own rows (`rows`).

Legend: N tokens of a document.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from qat_lora.data.chat import ChatText
from qat_lora.errors import DataError

Array: TypeAlias = "np.ndarray[Any, Any]"

logger = logging.getLogger(__name__)

TEXTS_AT_ONCE = 64  # a fast tokenizer uses its threads on a list
_PROBES = ("a", "The", "1")


class TokenIds(Protocol):
    """The ids of a document; a slice is ``[N]`` int64, and only what is sliced need be read."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Array: ...


Document: TypeAlias = "str | TokenIds"  # a text (a `ChatText` knows its answers), or its token ids


@dataclass(frozen=True)
class Tokens:
    """The tokens of one document, or of a part of one.

    Attributes:
        ids_N: ``[N]`` integers.
        answer_N: ``[N]`` bool, tokens that an assistant wrote; None where the document is no chat.
        eos_is_answer: the eos that will stand behind the document is an assistant's end of turn.
        chat: equal for the texts that are written of one chat; else empty.
    """

    ids_N: Array
    answer_N: Array | None = None
    eos_is_answer: bool = False
    chat: bytes = b""

    def __len__(self) -> int:
        return len(self.ids_N)

    def __getitem__(self, part: slice) -> Tokens:
        is_end = part.stop is None or part.stop >= len(self)
        answer_N = None if self.answer_N is None else self.answer_N[part]
        return Tokens(self.ids_N[part], answer_N, self.eos_is_answer and is_end, self.chat)


def bos_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that a tokenizer puts before a text by itself: found by encoding one, not by a name."""
    for probe in _PROBES:
        bare, whole = (list(tokenizer([probe], add_special_tokens=added)["input_ids"][0]) for added in (False, True))
        for begin in range(len(whole) - len(bare) + 1):
            if bare and whole[begin : begin + len(bare)] == bare:
                return tuple(whole[:begin])
    return ()


def eos_of(tokenizer: Any) -> int:
    """Return the id that ends a text."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"The tokenizer {type(tokenizer).__name__} has no eos token to set texts apart; set its eos_token."
        )
    return int(tokenizer.eos_token_id)


def encoded(
    documents: Iterable[Document], tokenizer: Any, *, vocab_size: int | None = None, most_tokens: int | None = None
) -> Iterator[Tokens]:
    """Yield the tokens of each document that has some, as int32, without the bos before and the eos behind them.

    Of a document that is token ids already, only about `most_tokens` are read.

    Raises:
        DataError: an id that a vocabulary of `vocab_size` tokens lacks; while iterating, not on the call.
    """
    bos, eos = bos_of(tokenizer), eos_of(tokenizer)
    _check_vocabulary(np.array([*bos, eos]), vocab_size)
    # One more than is wanted, so that what is wanted stays where the last is an eos and taken off.
    needed = slice(None if most_tokens is None else most_tokens + len(bos) + 1)
    source = (document for document in documents if len(document))
    while chunk := list(itertools.islice(source, TEXTS_AT_ONCE)):
        texts = iter(_encoded_texts([document for document in chunk if isinstance(document, str)], tokenizer))
        for document in chunk:
            tokens = next(texts) if isinstance(document, str) else Tokens(np.asarray(document[needed], dtype=np.int64))
            tokens = _without_ends(tokens, bos, eos)
            _check_vocabulary(tokens.ids_N, vocab_size)
            if len(tokens):
                chat = getattr(document, "chat", b"")
                yield Tokens(tokens.ids_N.astype(np.int32), tokens.answer_N, tokens.eos_is_answer, chat)


def _without_ends(tokens: Tokens, bos: tuple[int, ...], eos: int) -> Tokens:
    """Without the bos and one eos, where a chat template, or whoever made the ids, has written them already."""
    first = len(bos) if bos and tuple(tokens.ids_N[: len(bos)]) == bos else 0
    tokens = tokens[first:]
    if not len(tokens) or tokens.ids_N[-1] != eos:
        return tokens
    return replace(tokens[:-1], eos_is_answer=tokens.answer_N is not None and bool(tokens.answer_N[-1]))


def _encoded_texts(texts: list[str], tokenizer: Any) -> list[Tokens]:
    if not texts:
        return []
    with_offsets = getattr(tokenizer, "is_fast", False) and any(isinstance(text, ChatText) for text in texts)
    # verbose=False: no warning that a text is longer than the model's context, since it is cut here.
    settings = {"add_special_tokens": False, "truncation": False, "verbose": False}
    found = tokenizer(texts, **settings, **({"return_offsets_mapping": True} if with_offsets else {}))
    tokens = [Tokens(np.array(ids, dtype=np.int64)) for ids in found["input_ids"]]
    if not with_offsets:
        return tokens
    return [
        Tokens(x.ids_N, _answers(text, offsets), text.ends_with_answer) if isinstance(text, ChatText) else x
        for x, text, offsets in zip(tokens, texts, found["offset_mapping"], strict=True)
    ]


def _answers(text: ChatText, offsets: list[tuple[int, int]]) -> Array:
    """Which tokens hold a character of an answer, ``[N]`` bool."""
    begins_N, ends_N = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    is_answer_N = np.zeros(len(begins_N), dtype=bool)
    for begin, end in text.answers:
        is_answer_N |= (begins_N < end) & (ends_N > begin)
    return is_answer_N


def _check_vocabulary(ids_N: Array, vocab_size: int | None) -> None:
    beyond = ids_N[(ids_N < 0) | (ids_N >= vocab_size)] if vocab_size is not None else ids_N[:0]
    if len(beyond):
        raise DataError(
            f"The tokenizer gives the id {beyond[0]}, but the model's vocabulary has {vocab_size} tokens; "
            "use the tokenizer that belongs to the model."
        )
