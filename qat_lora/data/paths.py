"""Which local files a source names, of which kind they are, and in which order their rows come.

Does not own what is in the files: see `text` and `tokens`.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from qat_lora.config.source import SourceConfig
from qat_lora.errors import DataError

T = TypeVar("T")
HUB_PREFIX = "hf:"
EMBEDDED = ("embedded", "embedded:")
TEXT_SUFFIXES = (".txt", ".jsonl")
TOKEN_SUFFIXES = (".pt", ".npy", ".safetensors")
KNOWN = (
    "give .txt, .jsonl, .pt, .npy or .safetensors files, a folder or glob of those, 'hf:dataset' or 'embedded:train'"
)


def is_local(spec: str) -> bool:
    """Whether a source lies in files, not on a hub nor in the package."""
    return not (spec.startswith((HUB_PREFIX, EMBEDDED[1])) or spec == EMBEDDED[0])  # embedded_texts/ is a folder


def find_files(spec: str) -> list[Path]:
    """Return the files of a source in the order of their names; raises DataError where there are none of one kind."""
    path = Path(spec).expanduser()
    suffixes = TEXT_SUFFIXES + TOKEN_SUFFIXES
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.suffix in suffixes and p.is_file()]
    elif path.is_file():
        found = [path]
    else:
        found = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
    if not found:
        reason = f"holds no {', '.join(suffixes[:-1])} or {suffixes[-1]} file" if path.is_dir() else "does not exist"
        raise DataError(f"The source {spec!r} {reason}; {KNOWN}.")
    if wrong := [p for p in found if p.suffix not in suffixes]:
        raise DataError(f"{str(wrong[0])!r} is neither {', '.join(suffixes[:-1])} nor {suffixes[-1]}; convert it.")
    tokens = [p for p in found if p.suffix in TOKEN_SUFFIXES]
    if tokens and len(tokens) < len(found):
        raise DataError(
            f"The source {spec!r} holds both texts and token ids (such as {str(tokens[0])!r}); name one kind by a glob."
        )
    return sorted(found)


def has_tokens(spec: str) -> bool:
    """Whether a source is files of token ids; raises DataError where files that are named cannot be found."""
    return bool(spec) and is_local(spec) and find_files(spec)[0].suffix in TOKEN_SUFFIXES


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
