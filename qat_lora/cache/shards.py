"""Rows out of shard files, from disk as needed or from memory.

Owns open files, and the check of a shard's sha256 before the first of its rows is used. Does not own row order, splits
or tensors: it returns arrays as they are stored. Nor copies of what lies elsewhere (`copies`).

Files are mapped by the safetensors library: the pages that were touched count as file pages of this process, which the
system takes back when it needs them; no memory of its own grows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from qat_lora.cache.bits import Array
from qat_lora.cache.codec import batch_of, rows_of
from qat_lora.cache.copies import DiskCache, ShardFetcher
from qat_lora.cache.index import REBUILD, CacheIndex, check_shard, check_size, read_header
from qat_lora.errors import CacheError
from qat_lora.urls import Location, Url, file_sizes

OPEN_FILES = 16  # a file that is open keeps its bytes on the disk, even when the disk cache has dropped it
SHARE_OF_MEMORY = 0.5  # of what is free, that preloaded caches may take


class ShardReader:
    """The rows of a cache, by number; any thread may read.

    Of a cache at a URL, rows come from copies of its shards on the local disk, which are fetched when first needed.
    """

    def __init__(
        self, directory: Location, index: CacheIndex, *, disk: DiskCache | None = None, preload: bool = False
    ) -> None:
        """Check every file's size against the index; with `preload`, read and check all of them."""
        self.directory, self.index, self._loaded = directory, index, dict[int, dict[str, Array]]()
        self._fetcher: ShardFetcher | None = None
        if isinstance(directory, Url):
            self._fetcher = ShardFetcher(directory, index.shards, disk or DiskCache())
        else:
            sizes = file_sizes(directory)
            for shard in index.shards:
                check_size(directory / shard.file, sizes.get(shard.file), shard)
        self._start()
        for number in range(index.manifest.shard_count) if preload else ():
            if self._fetcher is not None:
                self._fetcher.expect(range(number, index.manifest.shard_count))
            self._loaded[number] = self._sound(number, load_file)

    def _start(self) -> None:
        self._checked = set[int]()
        # A file leaves this cache, and is closed, when it was not used for longest; one that is being read stays open.
        self._file = functools.lru_cache(OPEN_FILES)(lambda number: self._sound(number, _opened))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open files behind: a worker process opens its own."""
        return {name: x for name, x in self.__dict__.items() if name not in ("_file", "_checked")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def expect(self, rows: Array) -> None:
        """Take note of the rows that are read next, in that order: shards that lie elsewhere are fetched."""
        if self._fetcher is not None:
            shards, firsts = np.unique(rows // self.index.manifest.rows_per_shard, return_index=True)
            self._fetcher.expect(shards[np.argsort(firsts)].tolist())

    def read(self, rows: Array) -> dict[str, Array]:
        """Return the stored arrays ``[len(rows), ...]`` of these rows; of a stream each row's bytes, filled up."""
        manifest = self.index.manifest
        # In the order of the files, so that each is opened once and rows beside each other are one read.
        order = np.argsort(rows, kind="stable")
        shards, places = np.divmod(rows[order], manifest.rows_per_shard)
        breaks = np.flatnonzero((np.diff(shards) != 0) | (np.diff(places) != 1)) + 1
        pieces = []
        for begin, end in itertools.pairwise([0, *breaks.tolist(), len(rows)]):
            number, first = int(shards[begin]), int(places[begin])
            tensors = self._loaded[number] if self._loaded else self._file(number)
            try:
                pieces.append(rows_of(manifest, tensors, first, first + end - begin))
            except (ValueError, KeyError, OverflowError, MemoryError, SafetensorError, OSError) as error:
                raise _unreadable(self._path(number), error) from error
        back = np.argsort(order)
        return {name: x[back] for name, x in batch_of(manifest, pieces).items()}

    def _path(self, number: int) -> Path:
        """Where a shard lies on this machine, fetched if need be."""
        if self._fetcher is not None:
            return self._fetcher.path(number)
        return Path(str(self.directory)) / self.index.shards[number].file

    def _sound(self, number: int, load: Callable[[Path], dict[str, Any]], *, again: bool = True) -> dict[str, Any]:
        """What `load` makes of a shard's file, after every byte was checked once.

        A copy that has gone bad, or that made room in another process since it was found, is fetched again.
        """
        path, shard = self._path(number), self.index.shards[number]
        try:
            if number not in self._checked:
                check_shard(path, shard)
                read_header(path, self.index.manifest, number, shard.size_bytes)
                self._checked.add(number)
            return load(path)
        except (CacheError, SafetensorError, OSError) as error:
            if self._fetcher is None or not again:
                raise error if isinstance(error, CacheError) else _unreadable(path, error) from None
        path.unlink(missing_ok=True)
        return self._sound(number, load, again=False)


def _opened(path: Path) -> dict[str, Any]:
    file = safe_open(path, framework="numpy")
    return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118


def _unreadable(path: Path, error: Exception) -> CacheError:
    return CacheError(f"{str(path)!r} cannot be read ({error}); {REBUILD}.")


def fits_in_memory(size: int, world_size: int) -> bool:
    """Whether each rank of this host may hold so many bytes."""
    return size * _ranks_here(world_size) <= SHARE_OF_MEMORY * _free_bytes()


def _free_bytes() -> float:
    """Memory that can be had without others giving way; half of it all where the system does not say."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024.0
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    return 0.0


def _ranks_here(world_size: int) -> int:
    """Ranks of this host: what torchrun says, else all."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(said), world_size) if said.isdigit() and int(said) else world_size
