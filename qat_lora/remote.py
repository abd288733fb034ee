"""Folders and files that lie elsewhere: URLs, opened by fsspec, with those of pathlib's words that a KD cache needs.

Owns what a URL is and every call to fsspec, so that each failure is one sentence with its fix. Does not own copies on
the local disk (`qat_lora.cache.fetch`).
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from qat_lora.errors import ConfigError, QatLoraError, RemoteError

CHUNK_BYTES = 16 * 2**20  # what is held of a file that is only hashed

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_LOST_SLASH = re.compile(r"(gs|gcs|s3|s3a|hf|memory|file|local):/[^/]")
# There a file is visible once all of it is, so that nothing has to be moved into place.
_OBJECT_STORES = ("gs", "gcs", "s3", "s3a", "hf", "abfs", "abfss", "az", "adl", "oss", "memory")
_EXTRAS = {"gs": "gs", "gcs": "gs", "s3": "s3", "s3a": "s3"}
_LOG_IN = {
    "gs": "check the bucket's name, and log in with `gcloud auth application-default login`",
    "s3": "check the bucket's name, and log in with `aws configure` or by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "hf": "check the repository's name, and log in with `hf auth login`",
}


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class RemotePath:
    """A folder or file by its URL; two of one URL are equal. It never changes.

    The methods are named as pathlib's and mean the same. All raise RemoteError where fsspec, a package that it needs or
    the other side fails; what is merely not there is a FileNotFoundError, as on a disk.
    """

    def __init__(self, url: str) -> None:
        """Drop slashes at the end: a folder has one name."""
        self.url = url.rstrip("/")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def scheme(self) -> str:
        """What the URL begins with, `gs` say."""
        return self.url.split("://")[0].lower()

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def parent(self) -> RemotePath:
        """The folder that this lies in."""
        return RemotePath(self.url.rsplit("/", 1)[0])

    def resolve(self) -> RemotePath:
        """Itself: a URL is whole."""
        return self

    def exists(self) -> bool:
        """Whether there is a file or folder."""
        return self._info() is not None

    def is_file(self) -> bool:
        """Whether there is a file."""
        info = self._info()
        return info is not None and info["type"] == "file"

    def sizes(self) -> dict[str, int]:
        """Name -> bytes of the files in this folder, by one listing; empty where there is no such folder."""
        with _said(self, "listed"):
            fs, path = self._opened()
            fs.invalidate_cache(path)  # another process may have written there
            try:
                entries = fs.ls(path, detail=True)
            except FileNotFoundError:
                return {}
        return {
            entry["name"].rstrip("/").rsplit("/", 1)[-1]: int(entry["size"])
            for entry in entries
            if entry["type"] == "file"
        }

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield the files of this folder whose names match."""
        return (self / name for name in sorted(self.sizes()) if fnmatch.fnmatchcase(name, pattern))

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """The file, or its bytes from `start` up to `stop`."""
        with _said(self, "read"):
            fs, path = self._opened()
            data: bytes = fs.cat_file(path, start=start, end=stop)
            return data

    def read_text(self, encoding: str = "utf-8") -> str:
        """The file as text."""
        return self.read_bytes().decode(encoding)

    def chunks(self) -> Iterator[bytes]:
        """Yield the file piece by piece."""
        size = self._size()
        for start in range(0, size, CHUNK_BYTES):
            yield self.read_bytes(start, min(start + CHUNK_BYTES, size))

    def download(self, target: Path) -> None:
        """Copy the file to a local one."""
        with _said(self, "read"):
            fs, path = self._opened()
            fs.get_file(path, str(target))

    def write_bytes(self, data: bytes) -> None:
        """Write the file, whole or not at all: object stores show it when it is; elsewhere it is moved into place."""
        with _said(self, "written"):
            fs, path = self._opened()
            if self.scheme in _OBJECT_STORES:
                fs.pipe_file(path, data)
                return
            folder, name = path.rsplit("/", 1)
            temporary = f"{folder}/.{name}.{os.getpid()}.tmp"
            fs.makedirs(folder, exist_ok=True)
            try:
                fs.pipe_file(temporary, data)
                fs.mv(temporary, path)
            except BaseException:
                with contextlib.suppress(Exception):  # what cannot be written cannot be tidied up either
                    fs.rm_file(temporary)
                raise

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file."""
        with _said(self, "deleted"):
            fs, path = self._opened()
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def check_writable(self) -> None:
        """Prove, before the long work, that files can be written in this folder, and leave none."""
        probe = self / f".probe.{os.getpid()}"
        probe.write_bytes(b"probe")
        probe.unlink(missing_ok=True)

    def _size(self) -> int:
        info = self._info()
        if info is None:
            raise FileNotFoundError(self.url)
        return int(info["size"])

    def _info(self) -> dict[str, Any] | None:
        with _said(self, "read"):
            fs, path = self._opened()
            fs.invalidate_cache(path)
            try:
                found: dict[str, Any] = fs.info(path)  # `exists` would take a refusal for an absence
            except FileNotFoundError:
                return None
            return found

    def _opened(self) -> tuple[Any, str]:
        """The filesystem, which fsspec keeps one of per process, and the path in it."""
        from fsspec.core import url_to_fs

        found: tuple[Any, str] = url_to_fs(self.url)
        return found


Location: TypeAlias = Path | RemotePath


def is_remote(spec: str | Location) -> bool:
    """Whether this names what fsspec opens, and not a path of this machine."""
    return isinstance(spec, RemotePath) or (isinstance(spec, str) and _URL.match(spec) is not None)


def location(spec: str | Location) -> Location:
    """Return the place that was named: a RemotePath for a URL, else a Path; ConfigError for what was a URL once."""
    if isinstance(spec, RemotePath):
        return spec
    if is_remote(spec):
        return RemotePath(str(spec))
    if _LOST_SLASH.match(str(spec)):
        scheme, _, rest = str(spec).partition(":/")
        raise ConfigError(f"{str(spec)!r} is a URL that has lost a slash; write '{scheme}://{rest}', as text.")
    return Path(spec)


@contextlib.contextmanager
def _said(place: RemotePath, done: str) -> Iterator[None]:
    """Turn every failure into one sentence; that a file to be read is not there is the caller's to judge."""
    scheme = {"gcs": "gs", "s3a": "s3"}.get(place.scheme, place.scheme)
    try:
        yield
    except QatLoraError:
        raise
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        fix = f"pip install 'qat_lora[{extra}]'" if extra else "install it"
        raise RemoteError(f"{str(place)!r} needs a package that is not there ({_line(error)}); {fix}.") from error
    except Exception as error:  # every library behind fsspec has exceptions of its own
        if isinstance(error, FileNotFoundError) and done in ("read", "deleted"):
            raise
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:  # of this machine, which a copy goes to
            raise
        fix = _LOG_IN.get(scheme, "check the URL and the network")
        raise RemoteError(f"{str(place)!r} cannot be {done} ({_line(error)}); {fix}.") from error


def _line(error: BaseException) -> str:
    """An exception in one line, however long its text."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}" if words else type(error).__name__
