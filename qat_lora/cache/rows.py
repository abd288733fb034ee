"""Rows of finished caches as fields, in any range, whatever shards they lie in: what merging and converting read.

Unlike `reader`, which hands out batches for training, this reads each shard whole and checks its sha256, so that no
damage is taken into a cache with digests of its own. A shard is held at a time.

Legend: R rows, T positions of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from safetensors.numpy import load as from_safetensors

from qat_lora.cache.codec import Array, decoded
from qat_lora.cache.format import CacheManifest
from qat_lora.cache.parts import load_manifest, records_in, united
from qat_lora.cache.shards import by_rows
from qat_lora.cache.soundness import read_recorded, shard_fault
from qat_lora.errors import CacheError
from qat_lora.files import file_sizes

TOKENS = ("input_ids", "lengths", "starts")  # starts, where there are any, as a shard has them: a bit each
Tokens: TypeAlias = "dict[str, Array]"


class Rows(Protocol):
    """Rows with all that a cache holds of them."""

    @property
    def count(self) -> int:
        """How many there are."""

    def fields(self, rows: range) -> dict[str, Array]:
        """Return the fields ``[len(rows), ...]`` of these rows, a range that is not empty."""

    def tokens(self) -> Iterator[Tokens]:
        """Yield what was tokenised of all rows, some rows at a time."""


class StoredRows:
    """A finished cache, its shards in one folder, or those of its parts in several."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Read the records of all folders, which must be of one cache and together complete."""
        for folder in folders:
            load_manifest(folder)  # which has the words for a folder that is no cache
        records = [(folder, record) for folder in folders for record in records_in(folder)]
        self.folders = tuple(folders)
        self.manifest: CacheManifest = united([record for _, record in records])
        self._paths = {
            shard.index: folder / shard.file for folder, r in reversed(records) for shard in r.manifest.shards
        }
        self._last: tuple[int, dict[str, Array]] = (-1, {})
        if not self.manifest.complete:
            there = len(self.manifest.shards)
            raise CacheError(
                f"{', '.join(map(str, folders))}: {there} of the {self.manifest.shard_count} shards of one cache; give "
                "the folders of all its parts, or run its build command again, which goes on where it stopped."
            )
        sizes = {folder: file_sizes(folder) for folder in folders}
        for shard in self.manifest.shards:
            folder = self.path(shard.index).parent
            if fault := shard_fault(folder, self.manifest, shard, sizes[folder]):
                raise CacheError(fault)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self.manifest.rows

    def path(self, index: int) -> Path:
        """Where a shard lies."""
        return self._paths[index]

    def fields(self, rows: range) -> dict[str, Array]:
        """See `Rows`."""
        each, pieces = self.manifest.rows_per_shard, []
        for index in range(rows.start // each, -(-rows.stop // each)):
            if self._last[0] != index:
                self._last = (-1, {})  # one shard at a time
                self._last = (index, decoded(self.manifest, by_rows(self.manifest, self._load(index))))
            inside = slice(max(0, rows.start - index * each), rows.stop - index * each)
            pieces.append({name: x[inside] for name, x in self._last[1].items()})
        return joined(pieces)

    def tokens(self) -> Iterator[Tokens]:
        """See `Rows`."""
        for index in range(self.manifest.shard_count):
            tensors = self._load(index)
            yield {name: tensors[name] for name in TOKENS if name in tensors}

    def _load(self, index: int) -> dict[str, Array]:
        data = read_recorded(self.path(index), self.manifest.shards[index].sha256)
        tensors: dict[str, Array] = from_safetensors(data)
        return tensors


class JoinedRows:
    """The rows of several sources, one source after the other."""

    def __init__(self, sources: Sequence[Rows]) -> None:
        """Take the sources, all of one kind."""
        self._sources = sources

    @property
    def count(self) -> int:
        """How many rows there are."""
        return sum(source.count for source in self._sources)

    def fields(self, rows: range) -> dict[str, Array]:
        """See `Rows`."""
        pieces, first = [], 0
        for source in self._sources:
            own = range(max(rows.start - first, 0), min(rows.stop - first, source.count))
            if len(own):
                pieces.append(source.fields(own))
            first += source.count
        return joined(pieces)

    def tokens(self) -> Iterator[Tokens]:
        """See `Rows`."""
        for source in self._sources:
            yield from source.tokens()


class SomeRows:
    """A range of the rows of a source."""

    def __init__(self, source: Rows, chosen: range) -> None:
        """Take the source and which of its rows."""
        self._source, self._chosen = source, chosen

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self._chosen)

    def fields(self, rows: range) -> dict[str, Array]:
        """See `Rows`."""
        return self._source.fields(range(self._chosen[rows.start], self._chosen[rows.stop - 1] + 1))

    def tokens(self) -> Iterator[Tokens]:
        """See `Rows`."""
        first = 0
        for tokens in self._source.tokens():
            inside = slice(max(self._chosen.start - first, 0), max(self._chosen.stop - first, 0))
            if len(tokens["lengths"][inside]):
                yield {name: x[inside] for name, x in tokens.items()}
            first += len(tokens["lengths"])


def joined(pieces: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Fields one after the other; a copy only where there are several pieces."""
    if len(pieces) == 1:
        return dict(pieces[0])
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def rows_digest(rows: Rows, seq_len: int) -> str:
    """The source_digest of rows: sha256 of shape, ids, lengths and starts, that which a build from these would record.

    Reads all rows; what stays in memory of a row is its length and where its documents start.
    """
    digest = hashlib.sha256(repr((rows.count, seq_len)).encode())
    rest: dict[str, list[Array]] = {}
    for tokens in rows.tokens():
        digest.update(np.ascontiguousarray(tokens["input_ids"], dtype="<i4").tobytes())
        for name in TOKENS[1:]:
            if name in tokens:
                rest.setdefault(name, []).append(np.array(tokens[name], dtype="<i4" if name == "lengths" else "u1"))
    for parts in rest.values():
        digest.update(np.concatenate(parts).tobytes())
    return digest.hexdigest()
