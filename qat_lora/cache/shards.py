"""Reading rows out of shard files, from disk as needed or from memory.

Owns file handles and the content hash of rows. Does not own row order, splits or tensors: it returns arrays as they
are stored. Nor copies of what lies elsewhere (`fetch`).

Legend: R rows, T positions.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors.numpy import load as from_safetensors

from qat_lora.cache.fetch import DiskCache, ShardFetcher
from qat_lora.cache.format import SHARD_KEY, CacheManifest, ends_name
from qat_lora.cache.soundness import REBUILD, check_shards, damaged
from qat_lora.cache.tensor_file import Array, TensorFile
from qat_lora.errors import CacheError
from qat_lora.remote import Location, RemotePath

_NO_BYTES = np.empty(0, np.uint8)
OPEN_HANDLES = 16  # a file that is open keeps its bytes on the disk, even when the disk cache has dropped it
ROWS_PER_HASH_READ = 1024
HASHING_THREADS = 16  # that wait for range requests, where rows are hashed that lie elsewhere


class RowSource(Protocol):
    """Where rows come from."""

    def read(self, rows: Array, names: tuple[str, ...] | None = None) -> dict[str, Array]:
        """Return the stored arrays ``[len(rows), ...]`` of these rows of the cache: all, or the tensors named.

        Of a stream, ``[len(rows), P]``: each row's bytes, filled up to the longest row's. Any thread may call.
        """

    def expect(self, shards: Sequence[int]) -> None:
        """Take note of the shards whose rows are read next, in that order."""

    def fractions(self) -> Array:
        """See `row_fractions`."""


class ShardFiles:
    """Rows straight from the files, read by position; few files stay open, and nothing of them stays in memory.

    Of a cache at a URL, whole rows come from copies of its shards on the local disk, which are fetched when first
    needed; of what is named, only its bytes are fetched.
    """

    def __init__(self, directory: Location, manifest: CacheManifest, *, disk: DiskCache | None = None) -> None:
        """Check every shard's size and tag against the manifest; a shard that lies elsewhere when it is fetched."""
        self.directory, self.manifest = directory, manifest
        self._open: OrderedDict[int, TensorFile] = OrderedDict()
        self._lock = threading.RLock()
        self._fetcher: ShardFetcher | None = None
        if isinstance(directory, RemotePath):
            self._fetcher = ShardFetcher(directory, manifest.shards, disk or DiskCache())
        else:
            check_shards(directory, manifest)

    def read(self, rows: Array, names: tuple[str, ...] | None = None) -> dict[str, Array]:
        """See `RowSource`."""
        wanted = self.manifest.tensors(len(rows))
        streams: dict[str, list[Array]] = {name: [_NO_BYTES] * len(rows) for name in self.manifest.streams}
        if names is not None:
            wanted = {name: spec for name, spec in wanted.items() if name in names}
            streams = {name: found for name, found in streams.items() if name in names}
        arrays = {name: np.empty(*spec) for name, spec in wanted.items()}
        if len(rows) == 0:
            return arrays
        # In the order of the files, so that each is opened once and rows beside each other are one read.
        order = np.argsort(rows, kind="stable")
        shards, places = np.divmod(rows[order], self.manifest.rows_per_shard)
        breaks = np.flatnonzero((np.diff(shards) != 0) | (np.diff(places) != 1)) + 1
        for begin, end in itertools.pairwise([0, *breaks.tolist(), len(rows)]):
            shard, first, where = int(shards[begin]), int(places[begin]), order[begin:end]
            if self._fetcher is not None:
                if names is not None and not self._fetcher.is_here(shard):
                    with self._checked(self._fetcher.folder / self.manifest.shards[shard].file, shard) as file:
                        self._fill(file, arrays, streams, first, where)
                    continue
                self._fetcher.path(shard)  # before the lock: others may read meanwhile; and the copy counts as used
            with self._lock:
                self._fill(self._file(shard), arrays, streams, first, where)
        return arrays | {name: _side_by_side(found) for name, found in streams.items()}

    def expect(self, shards: Sequence[int]) -> None:
        """Fetch them in the background, where they lie elsewhere."""
        if self._fetcher is not None:
            self._fetcher.expect(shards)

    def fractions(self) -> Array:
        """See `row_fractions`; of rows that lie elsewhere, they are kept on the local disk."""
        rows = self.manifest.rows
        if self._fetcher is None:
            return row_fractions(self, rows)
        kept = f"row fractions {self.manifest.source_digest} {rows}"
        return self._fetcher.disk.array(kept, (rows,), lambda: row_fractions(self, rows, threads=HASHING_THREADS))

    def load(self, index: int) -> dict[str, Array]:
        """Return all arrays of one shard after checking its sha256."""
        record = self.manifest.shards[index]
        data = self.path(index).read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found != record.sha256 and self._fetcher is not None:  # the copy has gone bad, and there is another
            self.path(index).unlink(missing_ok=True)
            data = self.path(index).read_bytes()
            found = hashlib.sha256(data).hexdigest()
        if found != record.sha256:
            raise CacheError(damaged(self.path(index), record.sha256, found))
        arrays: dict[str, Array] = from_safetensors(data)
        return arrays

    def path(self, index: int) -> Path:
        """Path of one shard on this machine."""
        if self._fetcher is not None:
            return self._fetcher.path(index)
        return Path(str(self.directory)) / self.manifest.shards[index].file

    def __getstate__(self) -> dict[str, Any]:
        """Leave the handles behind: a worker process opens its own."""
        return {**self.__dict__, "_open": OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    def _fill(
        self, file: TensorFile, arrays: dict[str, Array], streams: dict[str, list[Array]], first: int, where: Array
    ) -> None:
        """Read the rows from `first` on into the places `where` of all arrays and streams."""
        try:
            for name, array in arrays.items():
                if (np.diff(where) == 1).all():  # beside each other and in the same order as in the file
                    file.rows_into(name, first, array[where[0] : where[-1] + 1])
                else:
                    array[where] = file.rows(name, first, len(where))
            for name, found in streams.items():
                ends = file.rows(ends_name(name), max(0, first - 1), len(where) + (first > 0)).tolist()
                begin, *ends = ends if first > 0 else [0, *ends]
                data, at = file.rows(name, begin, ends[-1] - begin), begin
                if sorted([begin, *ends]) != [begin, *ends]:
                    raise ValueError(f"{ends_name(name)} does not ascend")
                for place, end in zip(where.tolist(), ends, strict=True):
                    found[place], at = data[at - begin : end - begin], end
        except (ValueError, KeyError, OverflowError, MemoryError, OSError) as error:
            raise CacheError(f"{str(file.path)!r} cannot be read ({error}); {REBUILD}.") from error

    def _file(self, index: int) -> TensorFile:
        """The open file of a shard, whose tag has been checked."""
        if index in self._open:
            self._open.move_to_end(index)
            return self._open[index]
        if len(self._open) >= OPEN_HANDLES:
            self._open.popitem(last=False)[1].close()
        path = self.path(index)
        try:
            self._open[index] = self._checked(path, index)
        except CacheError:
            if self._fetcher is None:
                raise
            path.unlink(missing_ok=True)  # a copy that has gone bad; what lies elsewhere may be sound
            self._open[index] = self._checked(self.path(index), index)
        return self._open[index]

    def _checked(self, path: Location, index: int) -> TensorFile:
        """A shard's file, opened; CacheError unless it is sound, and this shard of this cache."""
        try:
            file = TensorFile(path)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise CacheError(f"{str(path)!r} is no sound safetensors file ({error}); {REBUILD}.") from error
        if file.metadata.get(SHARD_KEY) != self.manifest.shard_tag(index):
            file.close()
            raise CacheError(f"{str(path)!r} belongs to another KD cache or another place in this one; {REBUILD}.")
        return file


class MemoryShards:
    """All rows in memory, in the dtypes they are stored in, each shard's sha256 checked."""

    def __init__(self, files: ShardFiles) -> None:
        """Read all shards."""
        manifest = files.manifest
        self._arrays = {name: np.empty(*spec) for name, spec in manifest.tensors(manifest.rows).items()}
        streams: dict[str, list[Array]] = {name: [] for name in manifest.streams}
        for index in range(manifest.shard_count):
            rows = manifest.shard_rows(index)
            files.expect(range(index, manifest.shard_count))
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

    def expect(self, shards: Sequence[int]) -> None:
        """Nothing: all are here."""

    def fractions(self) -> Array:
        """See `row_fractions`."""
        return row_fractions(self, len(self._arrays["lengths"]))

    def _of_stream(self, name: str, rows: Array) -> Array:
        ends, stream = self._arrays[ends_name(name)], self._streams[name]
        return _side_by_side([stream[0 if row == 0 else ends[row - 1] : ends[row]] for row in rows])


def by_rows(manifest: CacheManifest, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of a whole shard as a `RowSource` gives them: each stream divided among its rows."""
    streams = {name: _side_by_side(np.split(tensors[name], tensors[ends_name(name)][:-1])) for name in manifest.streams}
    return {**tensors, **streams}


def _side_by_side(rows: list[Array]) -> Array:
    """Rows of bytes as one array, filled up with 0 to the longest."""
    found = np.zeros((len(rows), max(map(len, rows))), np.uint8)
    for array, row in zip(found, rows, strict=True):
        array[: len(row)] = row
    return found


def row_fractions(source: RowSource, rows: int, *, threads: int = 1) -> Array:
    """Return for each row a number in [0, 1) that depends on nothing but its token ids (their sha256)."""

    def of(start: int) -> Array:
        chosen = np.arange(start, min(start + ROWS_PER_HASH_READ, rows))
        ids_RT = source.read(chosen, ("input_ids",))["input_ids"].astype("<i4")
        digests = b"".join(hashlib.sha256(row.tobytes()).digest()[:8] for row in ids_RT)
        # 53 bits are what a float holds: 64 could round up to 1.0.
        return (np.frombuffer(digests, ">u8") >> np.uint64(11)) / 2.0**53

    starts = range(0, rows, ROWS_PER_HASH_READ)
    if threads == 1:
        return np.concatenate([of(start) for start in starts])
    with ThreadPoolExecutor(threads) as pool:
        return np.concatenate(list(pool.map(of, starts)))
