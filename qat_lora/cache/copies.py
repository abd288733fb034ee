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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from filelock import FileLock

from qat_lora.cache.index import REBUILD, Shard, check_shard
from qat_lora.cache.remote import RemotePath, file_sizes
from qat_lora.errors import CacheError, ConfigError, OutputError
from qat_lora.files import HOME, disk_home

logger = logging.getLogger(__name__)

LIMIT_GB = "QAT_LORA_DISK_CACHE_GB"
FETCHING_THREADS = 4
MOST_AHEAD = 64  # shards; what is further away is asked for in time
ABANDONED_SECONDS = 3600.0  # after which a half-fetched file is a killed process's


class DiskCache:
    """The folder of copies of shards.

    Args:
        limit_gb: how much it may hold, in 10^9 bytes; 0 asks the environment, and where that is silent too, the copies
            leave a tenth of the disk free.
        home: the folder; by default QAT_LORA_CACHE_HOME, else qat_lora in XDG_CACHE_HOME or ~/.cache.
    """

    def __init__(self, limit_gb: float = 0.0, home: Path | None = None) -> None:
        """Make nothing yet."""
        self.home = disk_home() if home is None else home
        self.limit_bytes = int((limit_gb or _limit_gb()) * 1e9) or None
        self._lock, self._coming = threading.Lock(), 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_coming": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def path(self, folder: RemotePath, record: Shard) -> Path:
        """Where the copy of a shard lies, if it is there."""
        whose = f"{folder.name or folder.scheme}-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
        return self.home / "shards" / whose / f"{record.sha256}.safetensors"

    def found(self, folder: RemotePath, record: Shard) -> Path | None:
        """The copy of a shard, which now counts as used; None where there is none."""
        path = self.path(folder, record)
        try:
            if path.stat().st_size == record.size_bytes:
                _touch(path)
                return path
        except (FileNotFoundError, NotADirectoryError):
            pass
        return None

    def get(self, folder: RemotePath, record: Shard) -> Path:
        """The copy of a shard, fetched and checked where it is not there yet.

        Raises CacheError where what comes is not what the record says, RemoteError where nothing comes.
        """
        if (there := self.found(folder, record)) is not None:
            return there
        source = folder / record.file

        def fetch(target: Path) -> None:
            try:
                source.download(target)
            except FileNotFoundError:
                raise CacheError(
                    f"The KD cache lacks its shard {str(source)!r}; restore the file or run the build command again."
                ) from None
            check_shard(target, record, name=source)

        if self._room(self._held()) < record.size_bytes:  # no copy gives way to what an index only claims
            size = file_sizes(folder).get(record.file, 0)
            if size != record.size_bytes:
                raise CacheError(f"{str(source)!r} has {size} bytes instead of {record.size_bytes}; {REBUILD}.")
        return self._made(folder, record, fetch)

    def put(self, folder: RemotePath, record: Shard, data: bytes) -> Path:
        """Keep a shard that was just written there, in the place of any copy, which may have gone bad."""
        return self._made(folder, record, lambda target: target.write_bytes(data), anew=True)

    def capacity(self, shard_bytes: int) -> int:
        """How many shards of so many bytes fit, when all other copies give way."""
        held = self._held()
        return (self._room(held) + sum(size for _, size, _ in held)) // shard_bytes

    def _made(self, folder: RemotePath, record: Shard, fill: Callable[[Path], object], *, anew: bool = False) -> Path:
        """The copy, made by whoever comes first; the others wait for it."""
        path = self.path(folder, record)
        try:
            with self._locked(record.sha256[:3]):  # 4,096 locks: two shards rarely share one
                if not anew and (there := self.found(folder, record)) is not None:
                    return there
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                self._make_room(record)
                try:
                    fill(temporary)
                    _touch(temporary)
                    with self._lock:  # a copy is coming or there, never both
                        os.replace(temporary, path)
                        self._coming -= record.size_bytes
                except BaseException:
                    with self._lock:
                        self._coming -= record.size_bytes
                    temporary.unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise OutputError(
                f"{path} cannot be written ({error.strerror or error}); free space, lower --disk-cache-gb, or name "
                f"another folder by {HOME}."
            ) from None
        return path

    def _make_room(self, record: Shard) -> None:
        """Delete the copies used longest ago until this one fits, beside those that other threads are fetching."""
        if self.limit_bytes is not None and record.size_bytes > self.limit_bytes:
            raise ConfigError(
                f"The disk cache may hold {self.limit_bytes / 1e9:g} GB, but {record.file} has "
                f"{record.size_bytes / 1e9:g} GB; raise --disk-cache-gb (or {LIMIT_GB})."
            )
        with self._locked("room"), self._lock:
            self._coming += record.size_bytes
            held = self._held()
            room = self._room(held)
            for _, size, path in sorted(held):
                if room >= self._coming:
                    break
                path.unlink(missing_ok=True)
                room += size

    def _room(self, held: Sequence[tuple[int, int, Path]]) -> int:
        """Bytes that may come without a copy giving way."""
        if self.limit_bytes is not None:
            return self.limit_bytes - sum(size for _, size, _ in held)
        disk = shutil.disk_usage(next(path for path in (self.home, *self.home.parents) if path.exists()))
        return disk.free - disk.total // 10

    def _held(self) -> list[tuple[int, int, Path]]:
        """When each copy was used last, its bytes and its path; files that are being fetched are not among them."""
        held = []
        for path in (self.home / "shards").glob("*/*.safetensors*"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                if path.suffix != ".tmp" or time.time() - stat.st_mtime > ABANDONED_SECONDS:
                    held.append((stat.st_mtime_ns, stat.st_size, path))
        return held

    def _locked(self, name: str) -> FileLock:
        """Let one thread of one process at a time do what has this name; the lock of a killed one is free."""
        folder = self.home / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / name, is_singleton=False)


class ShardFetcher:
    """The shards of one remote cache as local files, the next ones fetched in the background.

    A thread that fetches ends when nothing is left to fetch, and none keeps the program from ending.
    """

    def __init__(self, folder: RemotePath, records: Sequence[Shard], disk: DiskCache) -> None:
        """Fetch nothing yet."""
        self.folder, self.records, self.disk = folder, records, disk
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[int] = deque()
        self._begun: dict[int, Future[None]] = {}
        self._threads = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("folder", "records", "disk")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def is_here(self, index: int) -> bool:
        """Whether a shard's copy is on the disk."""
        return self.disk.path(self.folder, self.records[index]).exists()

    def path(self, index: int) -> Path:
        """The copy of a shard, waiting for it if need be; raises as `DiskCache.get`."""
        with self._lock:
            begun = self._begun.get(index)  # one that only waits to be fetched is fetched here, sooner
        if begun is not None:
            begun.result()
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
            self._waiting = deque(index for index in wanted if index not in self._begun)
            lacking = min(FETCHING_THREADS, len(self._waiting)) - self._threads
            self._threads += max(lacking, 0)
        for _ in range(lacking):
            threading.Thread(target=self._fetch, name="qat_lora-fetch", daemon=True).start()

    def _fetch(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                index = self._waiting.popleft()
                done = self._begun[index] = Future()
            try:
                self.disk.get(self.folder, self.records[index])
                done.set_result(None)
            except BaseException as error:
                logger.debug("fetching %s ahead: %s", self.records[index].file, error)
                done.set_exception(error)
            finally:
                with self._lock:
                    del self._begun[index]


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
