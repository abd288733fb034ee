"""Files of this machine, written so that a reader sees the old content or the new, never a part."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from qat_lora.errors import ConfigError, DiskFull, OutputError

HOME = "QAT_LORA_CACHE_HOME"


def disk_home() -> Path:
    """The folder for what can be fetched or made again; ConfigError where this user has none."""
    if named := os.environ.get(HOME):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qat_lora"
    except RuntimeError:
        raise ConfigError(f"this user has no home folder for copies of shards; name a folder by {HOME}.") from None


def write_atomically(path: Path, write: Callable[[BinaryIO], object], *, replace: bool = True) -> bool:
    """Call `write` with a temporary file beside `path`, flush it to disk, then rename it into place.

    Without `replace` a file that is there stays, and False is returned. Raises OutputError where the folder cannot be
    written, DiskFull where it is full; nothing half-written stays.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _File(temporary, "wb") as file, io.BufferedWriter(file) as stream:
                try:
                    write(stream)
                except RuntimeError as error:  # torch.save's, in place of the OSError that it met
                    raise file.refusal or error from None
                stream.flush()
                os.fsync(stream.fileno())
            try:
                (os.replace if replace else os.link)(temporary, path)
            except OSError:
                if not replace and path.exists():
                    return False
                os.replace(temporary, path)  # a file system without links
            sync_folder(path.parent)
            return True
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from None


class _File(io.FileIO):
    """A file that keeps the error with which the system refused to write to it."""

    refusal: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.refusal = error
            raise


def write_json(path: Path, tree: Any) -> None:
    """Write a tree of JSON types, indented, keys in their own order."""
    text = json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda stream: stream.write(text.encode()))


def file_sizes(folder: Path) -> dict[str, int]:
    """Name -> bytes of the files in a folder; empty where there is no such folder."""
    return {path.name: path.stat().st_size for path in folder.glob("*") if path.is_file()}


def check_writable(folder: Path) -> None:
    """Prove, before the long work, that files can be written in a folder, and leave no trace.

    Raises OutputError.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:  # on Linux without a name, so a kill leaves nothing
            file.write(bytes(4096))  # a full disk still takes an empty file
    except OSError as error:
        raise unwritable(folder, error) from None
    finally:
        with contextlib.suppress(OSError):  # what was not made cannot be removed
            for path in missing:  # the deepest first
                path.rmdir()


def unwritable(path: Path, error: OSError) -> OutputError:
    """What is raised where a file cannot be written."""
    reason = error.strerror or str(error)
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else OutputError
    return kind(f"{path} cannot be written ({reason}); choose another --output or free space.")


def sync_folder(folder: Path) -> None:
    """Make the rename itself durable; only POSIX systems can open a folder for that."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
