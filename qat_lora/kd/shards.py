"""Reading rows out of shard files, from disk as needed or from memory.

Owns file handles and the content hash of rows. Does not own row order, splits or tensors: it returns arrays as they
are stored.

Legend: R rows, T positions.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load as from_safetensors

from qat_lora.errors import CacheError
from qat_lora.kd.format import CacheManifest, ends_name
from qat_lora.kd.soundness import REBUILD, check_shards, damaged

Array: TypeAlias = "np.ndarray[Any, Any]"

OPEN_HANDLES = 16
ROWS_PER_HASH_READ = 1024


class RowSource(Protocol):
    """Where rows come from."""

    def read(self, rows: Array, names: tuple[str, ...] | None = None) -> dict[str, Array]:
        """Return the stored arrays ``[len(rows), ...]`` of these rows of the cache: all, or the tensors named.

        Of a stream, ``[len(rows), P]``: each row's bytes, filled up to the longest row's.
        """


class ShardFiles:
    """Rows straight from the files: a read copies what it needs out of a memory map; few files stay open."""

    def __init__(self, directory: Path, manifest: CacheManifest) -> None:
        """Check every shard's size and tag against the manifest."""
        self.directory, self.manifest = directory, manifest
        self._open: OrderedDict[int, Any] = OrderedDict()
        check_shards(directory, manifest)

    def read(self, rows: Array, names: tuple[str, ...] | None = None) -> dict[str, Array]:
        """See `RowSource`."""
        wanted = self.manifest.tensors(len(rows))
        streams: dict[str, list[Any]] = {name: [None] * len(rows) for name in self.manifest.streams}
        if names is not None:
            wanted = {name: spec for name, spec in wanted.items() if name in names}
            streams = {name: found for name, found in streams.items() if name in names}
        arrays = {name: np.empty(*spec) for name, spec in wanted.items()}
        shards, places = np.divmod(rows, self.manifest.rows_per_shard)
        # Shard by shard, so that a batch opens each file once however many handles are kept.
        for i in np.argsort(shards, kind="stable"):
            handle = self._handle(int(shards[i]))
            for name, array in arrays.items():
                array[i] = handle.get_slice(name)[int(places[i])]
            for name, found in streams.items():
                begin, end = self._span(handle, name, int(places[i]))
                found[i] = handle.get_slice(name)[begin:end]
        return arrays | {name: _side_by_side(found) for name, found in streams.items()}

    @staticmethod
    def _span(handle: Any, stream: str, place: int) -> tuple[int, int]:
        """Where a row's bytes lie in a stream of its shard."""
        ends = handle.get_slice(ends_name(stream))[max(0, place - 1) : place + 1]
        return int(ends[0]) if place else 0, int(ends[-1])

    def load(self, index: int) -> dict[str, Array]:
        """Return all arrays of one shard after checking its sha256."""
        record = self.manifest.shards[index]
        data = self.path(index).read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found != record.sha256:
            raise CacheError(damaged(self.path(index), record.sha256, found))
        arrays: dict[str, Array] = from_safetensors(data)
        return arrays

    def path(self, index: int) -> Path:
        """Path of one shard."""
        return self.directory / self.manifest.shards[index].file

    def __getstate__(self) -> dict[str, Any]:
        """Leave the handles behind: a worker process opens its own."""
        return {**self.__dict__, "_open": OrderedDict()}

    def _handle(self, index: int) -> Any:
        if index in self._open:
            self._open.move_to_end(index)
            return self._open[index]
        if len(self._open) >= OPEN_HANDLES:
            self._open.popitem(last=False)
        path = self.path(index)
        try:
            self._open[index] = safe_open(path, framework="np")
        except (SafetensorError, OSError) as error:
            raise CacheError(f"{str(path)!r} is no sound safetensors file ({error}); {REBUILD}.") from error
        return self._open[index]


class MemoryShards:
    """All rows in memory, in the dtypes they are stored in, each shard's sha256 checked."""

    def __init__(self, files: ShardFiles) -> None:
        """Read all shards."""
        manifest = files.manifest
        self._arrays = {name: np.empty(*spec) for name, spec in manifest.tensors(manifest.rows).items()}
        streams: dict[str, list[Array]] = {name: [] for name in manifest.streams}
        for index in range(manifest.shard_count):
            rows = manifest.shard_rows(index)
            found = files.load(index)
            for name, parts in streams.items():
                found[ends_name(name)] += sum(map(len, parts))
                parts.append(found.pop(name))
            for name, array in found.items():
                self._arrays[name][rows.start : rows.stop] = array
        self._streams = {name: np.concatenate(parts) for name, parts in streams.items()}

    def read(self, rows: Array, names: tuple[str, ...] | None = None) -> dict[str, Array]:
        """See `RowSource`."""
        wanted = (*self._arrays, *self._streams) if names is None else names
        return {
            name: self._of_stream(name, rows) if name in self._streams else self._arrays[name][rows] for name in wanted
        }

    def _of_stream(self, name: str, rows: Array) -> Array:
        ends, stream = self._arrays[ends_name(name)], self._streams[name]
        return _side_by_side([stream[0 if row == 0 else ends[row - 1] : ends[row]] for row in rows])


def _side_by_side(rows: list[Array]) -> Array:
    """Rows of bytes as one array, filled up with 0 to the longest."""
    found = np.zeros((len(rows), max(map(len, rows))), np.uint8)
    for array, row in zip(found, rows, strict=True):
        array[: len(row)] = row
    return found


def row_fractions(source: RowSource, rows: int) -> Array:
    """Return for each row a number in [0, 1) that depends on nothing but its token ids (their sha256)."""
    fractions = np.empty(rows)
    for start in range(0, rows, ROWS_PER_HASH_READ):
        chosen = np.arange(start, min(start + ROWS_PER_HASH_READ, rows))
        ids_RT = source.read(chosen, ("input_ids",))["input_ids"].astype("<i4")
        digests = b"".join(hashlib.sha256(row.tobytes()).digest()[:8] for row in ids_RT)
        # 53 bits are what a float holds: 64 could round up to 1.0.
        fractions[chosen] = (np.frombuffer(digests, ">u8") >> np.uint64(11)) / 2.0**53
    return fractions
