"""Rows of finished caches as fields, in any range, whatever shards they lie in: what merging and converting read.

Unlike `reader`, which hands out batches for training, this reads each shard whole and checks its sha256, so that no
damage is taken into a cache with digests of its own. A shard is held at a time.

Legend: R rows, T positions of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors.numpy import load_file

from qat_lora.cache.codec import decoded, rows_of
from qat_lora.cache.index import Shard, check_shard, load_cache
from qat_lora.cache.manifest import Array, CacheManifest, load_manifest
from qat_lora.errors import CacheError


class Rows(Protocol):
    """Rows with all that a cache holds of them."""

    @property
    def count(self) -> int:
        """How many there are."""

    def fields(self, rows: range) -> dict[str, Array]:
        """Return the fields ``[len(rows), ...]`` of these rows, a range that is not empty."""

    def keys(self) -> Array:
        """Return the keys of all rows, uint64 ``[count]`` (see `index.row_keys`)."""


class StoredRows:
    """A finished cache, its shards in one folder, or those of its parts in several."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Read the headers of all folders, which must be of one cache and together complete."""
        self.folders = tuple(folders)
        self.manifest: CacheManifest = load_manifest(folders[0])
        self._shards: dict[int, tuple[Path, Shard]] = {}
        for folder in folders:
            for shard in load_cache(folder).shards:
                self._shards.setdefault(shard.index, (folder / shard.file, shard))
        if len(self._shards) < self.manifest.shard_count:
            raise CacheError(
                f"{', '.join(map(str, folders))}: {len(self._shards)} of the {self.manifest.shard_count} shards of one "
                "cache; give the folders of all its parts, or run its build command again, which continues where it "
                "stopped."
            )
        self._last: tuple[int, dict[str, Array]] = (-1, {})

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self.manifest.rows

    def shard(self, index: int) -> tuple[Path, Shard]:
        """A shard, and where it lies."""
        return self._shards[index]

    def fields(self, rows: range) -> dict[str, Array]:
        """See `Rows`."""
        each, pieces = self.manifest.rows_per_shard, []
        for index in range(rows.start // each, -(-rows.stop // each)):
            if self._last[0] != index:
                self._last = (-1, {})  # one shard at a time
                path, shard = self._shards[index]
                check_shard(path, shard)
                tensors = rows_of(self.manifest, load_file(path), 0, shard.rows)
                self._last = (index, decoded(self.manifest, tensors))
            inside = slice(max(0, rows.start - index * each), rows.stop - index * each)
            pieces.append({name: x[inside] for name, x in self._last[1].items()})
        return joined(pieces)

    def keys(self) -> Array:
        """See `Rows`."""
        return np.concatenate([self._shards[number][1].key_array() for number in range(self.manifest.shard_count)])


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

    def keys(self) -> Array:
        """See `Rows`."""
        return np.concatenate([source.keys() for source in self._sources])


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

    def keys(self) -> Array:
        """See `Rows`."""
        return self._source.keys()[self._chosen.start : self._chosen.stop]


def joined(pieces: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Fields one after the other; a copy only where there are several pieces."""
    if len(pieces) == 1:
        return dict(pieces[0])
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
