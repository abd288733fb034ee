"""Token rows of one length: the form in which text reaches a teacher, and how documents are laid into it.

Owns the three packings, right padding, and the digest that says which rows these are. Does not own tokens (`encode`),
which documents are held out (`split`), nor the order in which training uses rows: that is the cache reader's.

Legend: R rows, T positions of a row, N tokens of a document.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qat_lora.config import Packing
from qat_lora.data.encode import Array, Document, Tokens, bos_of, encoded, eos_of
from qat_lora.data.split import check_split, section_rows, sides, split_documents
from qat_lora.errors import ConfigError, DataError


@dataclass(frozen=True)
class TokenRows:
    """Token rows of one length.

    Attributes:
        input_ids_RT: ``[R, T]`` int32; what follows the end of a row is eos.
        length_R: ``[R]`` int32, valid tokens of each row.
        starts_RT: ``[R, T]`` bool, where positions and attention begin anew: at each document, and at each row, where
            one that was cut continues. None where they run through the whole row.
        held_out_R: ``[R]`` bool, rows for evaluation, which training never sees.
        answer_RT: ``[R, T]`` bool, tokens that an assistant wrote. None where the source holds no chats.
        bos: ids at the start of every document; None where rows were taken as they are.
    """

    input_ids_RT: Array
    length_R: Array
    starts_RT: Array | None
    held_out_R: Array
    answer_RT: Array | None = None
    bos: tuple[int, ...] | None = ()

    def digest(self) -> str:
        """Return the sha256 of all arrays: equal digest, equal rows."""
        digest = hashlib.sha256(repr(self.input_ids_RT.shape).encode())
        for x in (self.input_ids_RT, self.length_R):
            digest.update(np.ascontiguousarray(x, dtype="<i4").tobytes())
        for bits in (self.starts_RT, self.held_out_R if self.held_out_R.any() else None, self.answer_RT):
            digest.update(b"" if bits is None else np.packbits(bits, axis=-1, bitorder="little").tobytes())
        return digest.hexdigest()

    def split(self, *, packing: Packing, eval_fraction: float) -> TokenRows:
        """Return the same rows, each of which is a document of its own."""
        starts_RT = np.zeros(self.input_ids_RT.shape, dtype=bool)
        starts_RT[:, 0] = True
        documents = [ids_T[:n] for ids_T, n in zip(self.input_ids_RT, self.length_R, strict=True)]
        return dataclasses.replace(
            self,
            starts_RT=starts_RT if packing == "documents" else None,
            held_out_R=sides(documents, eval_fraction),
        )


def pack(
    documents: Iterable[Document],
    tokenizer: Any,
    seq_len: int,
    *,
    packing: Packing = "stream",
    eval_fraction: float = 0.0,
    max_rows: int | None = None,
    vocab_size: int | None = None,
) -> TokenRows:
    """Tokenise documents, put bos before and eos behind each, and lay them into rows of `seq_len` tokens.

    ``stream`` lays them end to end and cuts the whole. ``documents`` does the same and says where each begins. ``pad``
    begins a row with each document, which continues in further rows where it is longer. No document is truncated, one
    that gives no token is left out; what is left of a row is filled with eos.

    About `eval_fraction` of the documents are held out, at least one, and lie in rows of their own. With `max_rows`,
    only as many documents are read as these rows need.

    Raises:
        DataError: no tokens, an id beyond `vocab_size`, or no two documents or sections to split.
    """
    for name, value in (("seq_len", seq_len), ("max_rows", max_rows)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be positive, but {name}={value}; use 1 or more.")
    bos, eos = bos_of(tokenizer), eos_of(tokenizer)
    most = None
    if max_rows is not None:  # two sides end in two rows that are not full
        most = (max_rows + 2 * bool(eval_fraction)) * seq_len
    read: list[Tokens] = []
    count = 0
    for document in encoded(documents, tokenizer, vocab_size=vocab_size, most_tokens=most):
        read.append(document)
        length = len(bos) + len(document) + 1
        count += -(-length // seq_len) * seq_len if packing == "pad" else length
        if most is not None and count >= most:
            break
    if not read:
        raise DataError(
            f"The tokenizer {type(tokenizer).__name__} gives no tokens for this text; check the tokenizer files "
            "of the model, and that the source holds text."
        )
    rows = min(-(-count // seq_len), max_rows or count)
    pieces = split_documents(read, section_rows(rows) * seq_len, eval_fraction)
    whole = [(_with_ends(tokens, bos, eos), held_out) for tokens, held_out in pieces]
    laid = _laid_out(whole, seq_len, eos, is_padded=packing == "pad", max_rows=max_rows)
    check_split(laid.held_out_R, eval_fraction)
    if packing != "documents":
        laid = dataclasses.replace(laid, starts_RT=None)
    if laid.answer_RT is not None and not laid.answer_RT.any():
        laid = dataclasses.replace(laid, answer_RT=None)
    return dataclasses.replace(laid, bos=bos)


def _with_ends(tokens: Tokens, bos: tuple[int, ...], eos: int) -> Tokens:
    ids_N = np.concatenate([np.array(bos, np.int32), tokens.ids_N, np.array([eos], np.int32)])
    answer_N = np.zeros(len(ids_N), dtype=bool)
    if tokens.answer_N is not None:
        answer_N[len(bos) : -1] = tokens.answer_N
        answer_N[-1] = tokens.eos_is_answer
    return Tokens(ids_N, answer_N)


def _laid_out(
    documents: Sequence[tuple[Tokens, bool]], seq_len: int, eos: int, *, is_padded: bool, max_rows: int | None
) -> TokenRows:
    """Both sides laid into rows, in the order in which the rows became full; those that never did come last."""
    groups = [[i] for i in range(len(documents))] if is_padded else []
    if not is_padded:
        groups = [[i for i, (_, held_out) in enumerate(documents) if held_out == side] for side in (False, True)]
    laid, order = [], []
    for group in filter(None, groups):
        tokens = [documents[i][0] for i in group]
        rows = _rows_of(tokens, seq_len, eos, held_out=documents[group[0]][1])
        last_R = np.arange(1, len(rows.length_R) + 1) * seq_len - 1  # the token that fills each row
        ends = np.cumsum([len(x.ids_N) for x in tokens])
        order.append(
            np.append(group, group[0] if is_padded else len(documents))[np.searchsorted(ends, last_R, "right")]
        )
        laid.append(rows)
    # stable: rows of one side keep their order
    chosen = np.argsort(np.concatenate(order), kind="stable")
    held_out_R = np.concatenate([rows.held_out_R for rows in laid])[chosen]
    kept = np.arange(len(chosen))[:max_rows]
    for side in (True, False):
        if len(kept) > 1 and (there := np.flatnonzero(held_out_R == side)).size and not np.isin(kept, there).any():
            kept[-1] = there[0]  # a side that only has rows behind the last one gets the last place
    chosen = chosen[kept]
    names = ("input_ids_RT", "length_R", "starts_RT", "held_out_R", "answer_RT")
    joined: dict[str, Any] = {name: np.concatenate([getattr(rows, name) for rows in laid])[chosen] for name in names}
    return TokenRows(**joined)


def _rows_of(documents: Sequence[Tokens], seq_len: int, eos: int, *, held_out: bool) -> TokenRows:
    """Documents laid end to end and cut into rows."""
    ids = np.concatenate([tokens.ids_N for tokens in documents])
    rows = -(-len(ids) // seq_len)
    starts = np.zeros(len(ids), dtype=bool)
    starts[np.cumsum([0, *(len(tokens.ids_N) for tokens in documents[:-1])])] = True
    answer = np.concatenate([np.asarray(tokens.answer_N) for tokens in documents])

    def cut(x: Array, fill: int) -> Array:
        return np.append(x, np.full(rows * seq_len - len(x), fill, x.dtype)).reshape(rows, seq_len)

    starts_RT = cut(starts, False)
    starts_RT[:, 0] = True
    length_R = np.full(rows, seq_len, dtype=np.int32)
    length_R[-1] = len(ids) - (rows - 1) * seq_len
    return TokenRows(cut(ids, eos), length_R, starts_RT, np.full(rows, held_out), cut(answer, False))
