"""Files written so that a reader sees the old content or the new, never a part; digests of files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from qat_lora.errors import DiskFull, OutputError
from qat_lora.remote import Location, RemotePath


def write_atomically(path: Location, write: Callable[[BinaryIO], object]) -> None:
    """Call `write` with a temporary file beside `path`, flush it to disk, then rename it into place.

    What goes to a URL is put together in memory. Raises OutputError where the folder cannot be written, DiskFull where
    it is full, RemoteError where the URL cannot; nothing half-written stays.
    """
    if isinstance(path, RemotePath):
        buffer = io.BytesIO()
        write(buffer)
        return path.write_bytes(buffer.getvalue())
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
            os.replace(temporary, path)
            sync_folder(path.parent)
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


def write_json(path: Location, tree: Any) -> None:
    """Write a tree of JSON types, indented, keys in their own order."""
    text = json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda stream: stream.write(text.encode()))


def sha256_file(path: Location) -> str:
    """Hex sha256 of a file's bytes."""
    if isinstance(path, RemotePath):
        digest = hashlib.sha256()
        for chunk in path.chunks():
            digest.update(chunk)
        return digest.hexdigest()
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_sizes(folder: Location) -> dict[str, int]:
    """Name -> bytes of the files in a folder; empty where there is no such folder."""
    if isinstance(folder, RemotePath):
        return folder.sizes()
    return {path.name: path.stat().st_size for path in folder.glob("*") if path.is_file()}


def check_writable(folder: Location) -> None:
    """Prove, before the long work, that files can be written in a folder, and leave no trace.

    Raises OutputError, or RemoteError for a URL.
    """
    if isinstance(folder, RemotePath):
        return folder.check_writable()
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    probe = folder / f".probe.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except OSError as error:
        raise unwritable(folder, error) from None
    finally:
        with contextlib.suppress(OSError):  # what was not made cannot be removed
            probe.unlink(missing_ok=True)
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
