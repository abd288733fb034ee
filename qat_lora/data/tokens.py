"""Sources that are token ids already: tensors in .pt, .npy and .safetensors files.

Owns how such files are read and checked, and which of them are rows of the wanted length that stay as they are. Does
not own the packing of all others (`rows`).

Legend: R rows, T positions of a row, N tokens.
"""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from qat_lora.config.source import SourceConfig
from qat_lora.data.encode import Array
from qat_lora.data.paths import find_files, has_tokens, shuffled
from qat_lora.data.rows import TokenRows
from qat_lora.errors import DataError, first_line

FIELDS = ("input_ids", "attention_mask", "lengths")
# What NumPy, safetensors and torch's reader of pickles raise at bytes that make no sense to them.
_UNREADABLE = (
    *(OSError, ValueError, RuntimeError, EOFError, LookupError, TypeError, AttributeError, AssertionError),
    *(OverflowError, struct.error, SafetensorError),
)
LARGEST_ID = 2**31 - 1  # rows are stored as int32


@dataclass(frozen=True)
class TokenFile:
    """The rows of one file.

    Attributes:
        path: the file.
        rows: R arrays ``[N]`` of any integer dtype, maybe mapped, without their padding.
        width: T, with the padding; None where rows differ or the file is one long row.
    """

    path: Path
    rows: list[Array]
    width: int | None


@dataclass(frozen=True)
class TokenDocument:
    """One document, read where it is sliced: a mapped file may be larger than memory.

    Attributes:
        place: file and row, for errors.
        ids_N: ``[N]`` of any integer dtype, maybe mapped.
        vocab_size: V that ids are held against; None for no bound but int32's.
    """

    place: str
    ids_N: Array
    vocab_size: int | None

    def __len__(self) -> int:
        return len(self.ids_N)

    def __getitem__(self, part: slice) -> Array:
        """Return some of the ids, ``[N]`` int64; raises DataError where one is outside the vocabulary."""
        ids_N = self.ids_N[part]
        _check_ids(ids_N, self.vocab_size, self.place)
        return ids_N.astype(np.int64)


def token_documents(spec: str, *, vocab_size: int | None = None) -> Iterator[TokenDocument]:
    """Yield the rows of a source as documents, without their padding.

    Raises:
        DataError: a file is missing, cannot be read, or is no table of token ids. Raised while iterating, not on the
            call; ids outside the vocabulary are found where a document is sliced.
    """
    for file in map(read_tokens, find_files(spec)):
        for number, ids_N in enumerate(file.rows, start=1):
            yield TokenDocument(f"{file.path} row {number}", ids_N, vocab_size)


def given_rows(
    spec: str,
    config: SourceConfig,
    seq_len: int,
    *,
    fill_id: int,
    vocab_size: int | None = None,
    max_rows: int | None = None,
) -> TokenRows | None:
    """Return the rows of a source as they are where all are `seq_len` tokens long, padding included; else None.

    Padding is on the right, and becomes `fill_id`, so that files that differ in their padding alone give equal rows.

    Raises:
        DataError: as for `token_documents`.
    """
    if not has_tokens(spec):
        return None
    files = [read_tokens(path) for path in find_files(spec)]
    if any(file.width != seq_len for file in files):
        return None
    rows = ((file.path, ids_N) for file in files for ids_N in file.rows)
    chosen = list(itertools.islice(shuffled(rows, config), max_rows))
    ids_RT = np.full((len(chosen), seq_len), fill_id, dtype=np.int32)
    for row_T, (path, ids_N) in zip(ids_RT, chosen, strict=True):
        _check_ids(ids_N, vocab_size, str(path))
        row_T[: len(ids_N)] = ids_N
    length_R = np.array([len(ids_N) for _, ids_N in chosen], dtype=np.int32)
    return TokenRows(ids_RT, length_R, None, np.zeros(len(chosen), dtype=bool), bos=None)


def read_tokens(path: Path) -> TokenFile:
    """Read one file: a tensor ``[R, T]`` or ``[N]``, a list of rows, or `input_ids` with attention_mask or lengths.

    Raises:
        DataError: the file cannot be read, holds something else, or is padded elsewhere than on the right.
    """
    fields = _fields(_loaded(path), path)
    ids = _table(fields["input_ids"], f"{path}: input_ids")
    given = _table(fields["lengths"], f"{path}: lengths") if fields.get("lengths") is not None else None
    if given is not None and (isinstance(given, list) or given.ndim != 1):
        raise DataError(f"{path}: lengths is no list of numbers; give one length per row.")
    length_R = None if given is None else np.asarray(given).astype(np.int64)
    width = ids.shape[1] if isinstance(ids, np.ndarray) and ids.ndim > 1 else None
    if isinstance(ids, np.ndarray) and ids.ndim == 1:
        ids, length_R = _cut(ids, length_R, path), None  # of one long row, lengths say where documents end
    rows = list(ids)
    if {row.ndim for row in rows} - {1}:
        raise DataError(f"{path}: input_ids is neither [rows, tokens] nor [tokens]; reshape it.")
    full_R = np.array([len(row) for row in rows], dtype=np.int64)
    if fields.get("attention_mask") is not None:
        masked_R = _mask_lengths(_table(fields["attention_mask"], f"{path}: attention_mask"), full_R, path)
        if length_R is not None and not np.array_equal(length_R, masked_R):
            raise DataError(f"{path}: lengths and attention_mask disagree; keep one of them.")
        length_R = masked_R
    length_R = full_R if length_R is None else length_R
    if len(length_R) != len(full_R) or not len(full_R):
        raise DataError(
            f"{path}: {len(length_R)} lengths for {len(full_R)} rows; give one for each of at least one row."
        )
    if len(wrong := np.flatnonzero((length_R < 1) | (length_R > full_R))):
        row = wrong[0]
        raise DataError(
            f"{path} row {row + 1} has the length {length_R[row]} of {full_R[row]} tokens; each row needs at least "
            "one token, and no more than it holds."
        )
    return TokenFile(path, [row[:n] for row, n in zip(rows, length_R.tolist(), strict=True)], width)


def _loaded(path: Path) -> Any:
    try:
        if path.suffix == ".npy":
            return np.lib.format.open_memmap(path, mode="r")  # unlike np.load, it never tries pickle
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path} is damaged or holds more than tensors, and is not unpickled; save a tensor, or a list or dict of "
            "tensors."
        ) from error
    except _UNREADABLE as error:
        raise DataError(f"Cannot read {path} ({first_line(error)}); save it again as tensors of token ids.") from error


def _fields(content: Any, path: Path) -> Mapping[str, Any]:
    if isinstance(content, list | tuple) and content and all(isinstance(row, Mapping) for row in content):
        names = [name for name in FIELDS if name in content[0]]
        if any(name not in row for name in names for row in content):
            raise DataError(f"{path}: not every row has {' and '.join(names)}; give all rows the same fields.")
        content = {name: [row[name] for row in content] for name in names}
    if not isinstance(content, Mapping):
        return {"input_ids": content}
    if "input_ids" not in content:
        raise DataError(f"{path} has no tensor input_ids, but {sorted(map(str, content))[:8]}; rename or convert it.")
    return content


def _table(value: Any, what: str) -> Array | list[Array]:
    """Integers [N] or [R, T] as an array, or as a list of arrays [N] where rows differ in length."""
    try:
        if not (isinstance(value, list | tuple) and any(np.ndim(row) for row in value)):
            return _integers(value, what)
        rows = [_integers(row, f"{what} row {number}") for number, row in enumerate(value, start=1)]
        return np.stack(rows) if len({row.shape for row in rows}) == 1 else rows
    except (ValueError, TypeError, RuntimeError) as error:  # lists in lists, of different depth; tensors without values
        raise DataError(f"{what} is no table of numbers ({first_line(error)}); give rows of token ids.") from error


def _integers(value: Any, what: str) -> Array:
    if isinstance(value, Tensor) and value.is_floating_point():  # some of which NumPy does not know
        raise DataError(f"{what} holds {value.dtype}, no integers; save it as int32 or int64.")
    array: Array = np.asarray(value)
    if not array.ndim:
        shown = "nothing" if value is None else f"a single {type(value).__name__} ({str(value)[:40]!r})"
        raise DataError(f"{what} is {shown}, no list or tensor of numbers; save one.")
    if not array.size:
        array = array.astype(np.int64)  # an empty list has no type
    is_mask = array.dtype.kind == "b" and "attention_mask" in what
    if array.dtype.kind not in "iu" and not is_mask:
        raise DataError(f"{what} holds {array.dtype}, no integers; save it as int32 or int64.")
    return array


def _cut(ids_N: Array, length_R: Array | None, path: Path) -> list[Array]:
    """One long row as the documents of these lengths, end to end; as one without."""
    if length_R is None:
        return [ids_N]
    if length_R.sum() != len(ids_N) or (length_R < 1).any():
        raise DataError(
            f"{path}: the lengths of the documents add up to {length_R.sum()}, but there are {len(ids_N)} tokens; "
            "give positive lengths of documents that lie end to end."
        )
    return np.split(ids_N, np.cumsum(length_R)[:-1])


def _mask_lengths(masks: Array | list[Array], full_R: Array, path: Path) -> Array:
    lengths = []
    for number, (mask_N, width) in enumerate(zip(masks, full_R, strict=False), start=1):
        place = f"{path} row {number}"
        if mask_N.shape != (width,) or not np.isin(mask_N, (0, 1)).all():
            raise DataError(f"{place}: attention_mask is not a 0 or 1 for each of {width} tokens; correct it.")
        length = int(mask_N.astype(np.int64).sum())
        if not mask_N[:length].all():
            where = "on the left" if not mask_N[0] else "in the middle"
            raise DataError(f"{place} is padded {where}; pad on the right, or leave the padding out.")
        lengths.append(length)
    if len(masks) != len(full_R):
        raise DataError(f"{path}: attention_mask has {len(masks)} rows, input_ids {len(full_R)}; give one for each.")
    return np.array(lengths, dtype=np.int64)


def _check_ids(ids_N: Array, vocab_size: int | None, place: str) -> None:
    beyond = ids_N[(ids_N < 0) | (ids_N >= (vocab_size or LARGEST_ID))]
    if len(beyond):
        size = f"the model's vocabulary has {vocab_size} tokens" if vocab_size else "ids are stored as int32"
        raise DataError(f"{place} holds the id {beyond[0]}, but {size}; tokenise with the tokenizer of the model.")
