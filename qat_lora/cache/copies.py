"""Copies of remote shards on the local disk: fetched when first needed or a little before, checked, and limited.

Owns the folder of copies, which processes and ranks share: a copy is named by the sha256 of what is in it, so that a
shard that was written anew is another file; it is there whole or not at all; those not used for longest make room. Owns
the threads that fetch ahead. Does not own what is read out of a shard (`shards`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qat_lora.cache.index import Shard, check_shard, check_size
from qat_lora.errors import ConfigError, OutputError
from qat_lora.files import HOME, disk_home
from qat_lora.urls import Url, file_sizes

logger = logging.getLogger(__name__)

LIMIT_GB = "QAT_LORA_DISK_CACHE_GB"
FETCHING_THREADS = 4
MOST_AHEAD = 64  # shards; what is further away is asked for in time


class DiskCache:
    """The folder of copies of shards. All that it knows is in its files.

    Args:
        limit_gb: how much it may hold, in 10^9 bytes; 0 asks the environment, and where that is silent too, the copies
            leave a tenth of the disk free.
        home: the folder; by default QAT_LORA_CACHE_HOME, else qat_lora in XDG_CACHE_HOME or ~/.cache.
    """

    def __init__(self, limit_gb: float = 0.0, home: Path | None = None) -> None:
        self.home = disk_home() if home is None else home
        self.limit_bytes = int((limit_gb or _limit_gb()) * 1e9) or None

    def path(self, folder: Url, record: Shard) -> Path:
        """Where the copy of a shard lies, if it is there."""
        whose = f"{folder.name or folder.scheme}-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
        return self.home / "shards" / whose / f"{record.sha256}.safetensors"

    def found(self, folder: Url, record: Shard) -> Path | None:
        """The copy of a shard, which now counts as used; None where there is none."""
        path = self.path(folder, record)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if path.stat().st_size == record.size_bytes:
                _touch(path)
                return path
        return None

    def get(self, folder: Url, record: Shard) -> Path:
        """The copy of a shard, fetched and checked where it is not there yet.

        Raises CacheError where what comes is not what the record says, RemoteError where nothing comes.
        """
        if (path := self.found(folder, record)) is not None:
            return path
        source = folder / record.file

        def fetch(target: Path) -> None:
            try:
                source.download(target)
            except FileNotFoundError:  # the check says that it is lacking
                target.unlink(missing_ok=True)
            check_shard(target, record, name=source)

        if self._room(self._files().values()) < record.size_bytes:  # no copy gives way to what an index only claims
            check_size(source, file_sizes(folder).get(record.file), record)
        return self._made(folder, record, fetch)

    def put(self, folder: Url, record: Shard, data: bytes) -> Path:
        """Keep a shard that was just written there, in the place of any copy, which may have gone bad."""
        return self._made(folder, record, lambda target: target.write_bytes(data), anew=True)

    def capacity(self, shard_bytes: int) -> int:
        """How many shards of so many bytes fit, when all other copies give way."""
        files = self._files().values()
        return (self._room(files) + sum(file.st_size for file in files)) // shard_bytes

    def _made(self, folder: Url, record: Shard, fill: Callable[[Path], object], *, anew: bool = False) -> Path:
        """The copy, made by whoever comes first; the others wait for it."""
        path = self.path(folder, record)
        # The name says how much room this takes before it is there.
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{record.size_bytes}.tmp")
        try:
            with self._locked(record.sha256[:3]):  # 4,096 locks: two shards rarely share one
                if not anew and (found := self.found(folder, record)) is not None:
                    return found
                for left in path.parent.glob(f".{path.name}.*.tmp"):
                    left.unlink(missing_ok=True)  # a killed process's, since the lock is here
                try:
                    self._make_room(record, temporary)
                    fill(temporary)
                    _touch(temporary)
                    with self._locked("room"):  # who looks sees one of the two
                        os.replace(temporary, path)
                finally:
                    temporary.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(
                f"{path} cannot be written ({error.strerror or error}); free space, lower --disk-cache-gb, or name "
                f"another folder by {HOME}."
            ) from None
        return path

    def _make_room(self, record: Shard, temporary: Path) -> None:
        """Delete the copies used longest ago until this one fits, beside those that are being fetched."""
        if self.limit_bytes is not None and record.size_bytes > self.limit_bytes:
            raise ConfigError(
                f"The disk cache may hold {self.limit_bytes / 1e9:g} GB, but {record.file} has "
                f"{record.size_bytes / 1e9:g} GB; raise --disk-cache-gb (or {LIMIT_GB})."
            )
        with self._locked("room"):
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch()
            files = self._files()
            coming = [path for path in files if path.suffix == ".tmp" and self._is_coming(path)]
            here = sorted(files.keys() - coming, key=lambda path: files[path].st_mtime_ns)  # with dead processes' parts
            room = self._room([files[path] for path in here]) - sum(int(path.name.split(".")[-2]) for path in coming)
            for path in here:
                if room >= 0:
                    break
                path.unlink(missing_ok=True)
                room += files[path].st_size

    def _is_coming(self, temporary: Path) -> bool:
        """Whether who fetches this lives, and so holds the lock of its shard; ask only with the lock of the room."""
        with contextlib.suppress(Timeout), self._locked(temporary.name[1:4], timeout=0):
            return False
        return True

    def _room(self, files: Collection[os.stat_result]) -> int:
        """Bytes that may come without a copy giving way."""
        if self.limit_bytes is not None:
            return self.limit_bytes - sum(file.st_size for file in files)
        disk = shutil.disk_usage(next(path for path in (self.home, *self.home.parents) if path.exists()))
        return disk.free - disk.total // 10

    def _files(self) -> dict[Path, os.stat_result]:
        """The copies, and the parts of copies."""
        files = {}
        for path in (self.home / "shards").glob("*/*.safetensors*"):
            with contextlib.suppress(FileNotFoundError):
                files[path] = path.stat()
        return files

    def _locked(self, name: str, timeout: float = -1) -> FileLock:
        """Let one thread of one process at a time do what has this name; the lock of a killed one is free."""
        folder = self.home / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / name, timeout, is_singleton=False)


class ShardFetcher:
    """The shards of one remote cache as local files, the next ones fetched in the background.

    A thread that fetches ends when nothing is left to fetch, and none keeps the program from ending.
    """

    def __init__(self, folder: Url, records: Sequence[Shard], disk: DiskCache) -> None:
        self.folder, self.records, self.disk = folder, records, disk
        self._lock, self._waiting, self._coming = threading.Lock(), list[int](), dict[int, threading.Event]()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardFetcher, (self.folder, self.records, self.disk)

    def path(self, index: int) -> Path:
        """The copy of a shard, waiting for it if need be; raises as `DiskCache.get`."""
        if (coming := self._coming.get(index)) is not None:  # one that only waits is fetched here, sooner
            coming.wait()
        return self.disk.get(self.folder, self.records[index])

    def expect(self, indices: Sequence[int]) -> None:
        """Fetch these shards in this order in the background, and none that an earlier call named and this does not.

        Of more than half of what the disk cache may hold, or `MOST_AHEAD`, the first: the others would drive them out.
        Those that are here count as used, so that what comes takes the place of others.
        """
        wanted = [i for i in indices[: 4 * MOST_AHEAD] if self.disk.found(self.folder, self.records[i]) is None]
        if wanted:
            largest = max(record.size_bytes for record in self.records)
            wanted = wanted[: min(MOST_AHEAD, self.disk.capacity(largest) // 2)]
        with self._lock:
            self._waiting = [index for index in wanted if index not in self._coming]
            while len(self._coming) < FETCHING_THREADS and (index := self._next()) is not None:
                threading.Thread(target=self._fetch, args=(index,), name="qat_lora-fetch", daemon=True).start()

    def _next(self) -> int | None:
        """Begin with the first that waits; the caller holds the lock."""
        if not self._waiting:
            return None
        self._coming[index := self._waiting.pop(0)] = threading.Event()
        return index

    def _fetch(self, index: int | None) -> None:
        while index is not None:
            try:
                self.disk.get(self.folder, self.records[index])
            except Exception as error:  # who needs the shard is told then
                logger.debug("fetching %s ahead: %s", self.records[index].file, error)
            with self._lock:
                self._coming.pop(index).set()
                index = self._next()


def _touch(path: Path) -> None:
    """Count a copy as used now; the file system's own clock may be milliseconds behind, and two uses the same."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _limit_gb() -> float:
    given = os.environ.get(LIMIT_GB) or "0"
    try:
        limit = float(given)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise ConfigError(f"{LIMIT_GB}={given!r} is no number of GB; write {LIMIT_GB}=100, or unset it.")
    return limit
