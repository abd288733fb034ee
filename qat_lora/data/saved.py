"""Token rows saved on this machine's disk while their cache is built: a build that continues does not tokenise again.

Ranks and parts of one machine share them: the first tokenises, the others wait for it and read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from qat_lora.data.paths import find_files, is_local
from qat_lora.data.rows import TokenRows
from qat_lora.errors import ConfigError, OutputError
from qat_lora.files import check_writable, disk_home, write_atomically
from qat_lora.urls import Location

log = logging.getLogger(__name__)

ABANDONED_SECONDS = 30 * 24 * 3600.0  # after which nobody is expected to continue a build


class SavedRows:
    """The rows of a source for one cache, in a file that is named by all on which they depend.

    Of files: their names, sizes and times. Of a hub: the name alone, so a build continues with the rows that it began
    with. Of the embedded corpus: the version of Python.
    """

    def __init__(self, cache: Location, spec: str, *settings: Any) -> None:
        paths = find_files(spec) if is_local(spec) else []
        files = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
        what = json.dumps([spec, files, sys.version, settings], sort_keys=True, default=str)
        self._spec = spec
        self._cache, name = (hashlib.sha256(x.encode()).hexdigest()[:16] for x in (str(cache.resolve()), what))
        try:
            self.path: Path | None = disk_home() / "rows" / f"{self._cache}-{name}.safetensors"
        except ConfigError:  # a user without a home folder
            self.path = None

    def get(self, make: Callable[[], TokenRows]) -> TokenRows:
        """The rows that are saved, or else those that are made, which are saved where the disk takes them.

        One process makes them and the others wait for it, but once: who waited and finds none makes its own beside the
        rest. So where the save fails (the disk fills up meanwhile, or the process dies) those who waited are one
        tokenising behind the first; where the disk cannot be written from the start nobody waits.
        """
        if self.path is None:
            return make()
        lock = FileLock(self.path.with_suffix(".lock"), is_singleton=False)
        try:
            rows = _read(self.path)
            if rows is None:
                self._lock_or_wait(lock)
                rows = _read(self.path)
            if rows is None:
                rows = make()
                if lock.is_locked:
                    with contextlib.suppress(OutputError):
                        _write(self.path, rows)
            return rows
        finally:
            lock.release()

    def _lock_or_wait(self, lock: FileLock) -> None:
        """Take the lock if it is free, else wait until it is; neither on a disk that cannot be written, or locked."""
        folder = Path(lock.lock_file).parent
        with contextlib.suppress(OSError, OutputError, NotImplementedError):
            folder.mkdir(parents=True, exist_ok=True)  # first: what `check_writable` makes it also removes
            check_writable(folder)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                log.info("waiting for another process that makes the token rows of %s", self._spec)
                with lock:
                    pass

    def forget(self) -> None:
        """Remove all rows of this cache, and those of builds that nobody continued."""
        if self.path is None:
            return
        for path in self.path.parent.glob("*"):
            with contextlib.suppress(OSError):
                if path.name.startswith(self._cache) or time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()


def _write(path: Path, rows: TokenRows) -> None:
    arrays = {name: np.ascontiguousarray(x) for name, x in vars(rows).items() if isinstance(x, np.ndarray)}
    words = json.dumps({"bos": rows.bos, "digest": rows.digest()})
    content: bytes = save(arrays, {"rows": words})
    write_atomically(path, lambda stream: stream.write(content))


def _read(path: Path) -> TokenRows | None:
    """The rows of a file; None where it is missing or damaged."""
    try:
        with safe_open(path, "np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            words = json.loads(file.metadata()["rows"])
        bos = None if words["bos"] is None else tuple(words["bos"])
        rows = TokenRows(**{"starts_RT": None, **arrays, "bos": bos})
        return rows if rows.digest() == words["digest"] else None
    except (OSError, SafetensorError, TypeError, KeyError, ValueError):
        return None
