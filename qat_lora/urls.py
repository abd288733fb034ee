"""Folders and files at URLs: pathlib's words for what fsspec opens, with bounded retries, a failure as one sentence.

Owns every call to fsspec, and the functions that treat a folder of this machine and one at a URL alike.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

from qat_lora import files
from qat_lora.errors import ConfigError, QatLoraError, RemoteError

logger = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 2**20  # what is held of a file that is only hashed
RETRY_SECONDS = (0.5, 2.0, 8.0)  # the waits after a first, second, third failure; then it is an error

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_LOST_SLASH = re.compile(r"(gs|gcs|s3|s3a|hf|memory|file|local):/[^/]")
# There a file is visible once all of it is, so that nothing has to be moved into place.
_OBJECT_STORES = ("gs", "gcs", "s3", "s3a", "hf", "abfs", "abfss", "az", "adl", "oss", "memory")
_ALIASES = {"gcs": "gs", "s3a": "s3"}
_LOG_IN = {
    "gs": "check the bucket's name, and log in with `gcloud auth application-default login`",
    "s3": "check the bucket's name, and log in with `aws configure` or by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "hf": "check the repository's name, and log in with `hf auth login`",
}
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# What another attempt does not change: absence, refusal, a missing package, an unknown protocol.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, ValueError)

T = TypeVar("T")


class Url:
    """A folder or file by its URL, with the methods of `pathlib.Path` that a cache needs. Two of one URL are equal.

    What reads or writes raises RemoteError where fsspec, a package that it needs or the other side fails, each after
    some attempts; what is merely not there is a FileNotFoundError, as on a disk.
    """

    def __init__(self, url: str) -> None:
        """Drop slashes at the end: a folder has one name."""
        self.url = url.rstrip("/")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Url) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Self:
        return type(self)(f"{self.url}/{name}")

    @property
    def scheme(self) -> str:
        """What the URL begins with, `gs` say."""
        return self.url.split("://")[0].lower()

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def parent(self) -> Self:
        """The folder that this lies in."""
        return type(self)(self.url.rsplit("/", 1)[0])

    def resolve(self) -> Self:
        """Itself: a URL is whole."""
        return self

    def exists(self) -> bool:
        """Whether there is a file or folder."""
        return self._info() is not None

    def sizes(self) -> dict[str, int]:
        """Name -> bytes of the files in this folder, by one listing; empty where there is no such folder."""
        entries: list[dict[str, Any]] = self._looked("listed", lambda fs, path: fs.ls(path, detail=True), [])
        return {e["name"].rstrip("/").rsplit("/", 1)[-1]: int(e["size"]) for e in entries if e["type"] == "file"}

    def glob(self, pattern: str) -> Iterator[Url]:
        """Yield the files of this folder whose names match."""
        return (self / name for name in sorted(self.sizes()) if fnmatch.fnmatchcase(name, pattern))

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """The file, or its bytes from `start` up to `stop`."""
        data: bytes = self._tried("read", lambda fs, path: fs.cat_file(path, start=start, end=stop))
        return data

    def chunks(self) -> Iterator[bytes]:
        """Yield the file piece by piece."""
        info = self._info()
        if info is None:
            raise FileNotFoundError(self.url)
        for start in range(0, int(info["size"]), CHUNK_BYTES):
            yield self.read_bytes(start, min(start + CHUNK_BYTES, int(info["size"])))

    def download(self, target: Path) -> None:
        """Copy the file to a local one."""
        self._tried("read", lambda fs, path: fs.get_file(path, str(target)))

    def write_bytes(self, data: bytes) -> None:
        """Write the file, whole or not at all: object stores show it when it is; elsewhere it is moved into place."""
        self._tried("written", lambda fs, path: self._write(fs, path, data))

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file."""
        try:
            self._tried("deleted", lambda fs, path: fs.rm_file(path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def _write(self, fs: Any, path: str, data: bytes) -> None:
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

    def _info(self) -> dict[str, Any] | None:
        return self._looked("read", lambda fs, path: fs.info(path), None)  # `exists` takes a refusal for an absence

    def _looked(self, done: str, look: Callable[[Any, str], T], absent: T) -> T:
        """What there is, or `absent`, whatever fsspec remembers: another process may have written there."""

        def act(fs: Any, path: str) -> T:
            fs.invalidate_cache(path)
            try:
                return look(fs, path)
            except FileNotFoundError:
                return absent

        return self._tried(done, act)

    def _opened(self) -> tuple[Any, str]:
        """The filesystem, which fsspec keeps one of per process, and the path in it."""
        from fsspec.core import url_to_fs

        found: tuple[Any, str] = url_to_fs(self.url)
        return found

    def _tried(self, done: str, act: Callable[[Any, str], T]) -> T:
        """Do it, again after a failure that may pass; what remains becomes one sentence.

        That a file to be read is not there is the caller's to judge.
        """
        for wait in (*RETRY_SECONDS, None):
            try:
                return act(*self._opened())
            except QatLoraError:
                raise
            except Exception as error:  # every library behind fsspec has exceptions of its own
                if isinstance(error, FileNotFoundError) and done in ("read", "deleted"):
                    raise
                if isinstance(error, OSError) and error.errno in _OF_THE_DISK:  # of this machine, which a copy goes to
                    raise
                if wait is None or isinstance(error, _FINAL):
                    raise self._failure(done, error) from error
                logger.info("%s cannot be %s (%s); another attempt in %g s", self, done, _line(error), wait)
                time.sleep(wait)
        raise AssertionError

    def _failure(self, done: str, error: Exception) -> RemoteError:
        scheme = _ALIASES.get(self.scheme, self.scheme)
        if isinstance(error, ImportError):
            fix = f"pip install 'qat_lora[{scheme}]'" if scheme in ("gs", "s3") else "install it"
            return RemoteError(f"{str(self)!r} needs a package that is not there ({_line(error)}); {fix}.")
        fix = _LOG_IN.get(scheme, "check the URL and the network")
        return RemoteError(f"{str(self)!r} cannot be {done} ({_line(error)}); {fix}.")


Location: TypeAlias = Path | Url


def is_remote(spec: str | Location) -> bool:
    """Whether this names what lies elsewhere, and not a path of this machine."""
    return isinstance(spec, Url) or (isinstance(spec, str) and _URL.match(spec) is not None)


def location(spec: str | Location) -> Location:
    """Return the place that was named: a Url, or else a Path; ConfigError for what was a URL once."""
    if isinstance(spec, Url):
        return spec
    if is_remote(spec):
        return Url(str(spec))
    if _LOST_SLASH.match(str(spec)):
        scheme, _, rest = str(spec).partition(":/")
        raise ConfigError(f"{str(spec)!r} is a URL that has lost a slash; write '{scheme}://{rest}', as text.")
    return Path(spec)


def file_sizes(folder: Location) -> dict[str, int]:
    """Name -> bytes of the files in a folder; empty where there is no such folder."""
    return folder.sizes() if isinstance(folder, Url) else files.file_sizes(folder)


def read_at_most(path: Location, most: int) -> bytes:
    """A file's bytes; ValueError where it has more than `most`."""
    if isinstance(path, Url):
        content = path.read_bytes(0, most + 1)  # one request, where asking for the size first would be two
        size = len(content)
    elif (size := path.stat().st_size) <= most:
        content = path.read_bytes()
    if size > most:
        raise ValueError(f"it has more than {most} bytes")
    return content


def check_writable(folder: Location) -> None:
    """Prove, before the long work, that files can be written in a folder, and leave no trace."""
    if not isinstance(folder, Url):
        files.check_writable(folder)
        return
    probe = folder / f".probe.{os.getpid()}"
    probe.write_bytes(b"probe")
    probe.unlink(missing_ok=True)


def _line(error: BaseException) -> str:
    """An exception in one line, however long its text."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}" if words else type(error).__name__
