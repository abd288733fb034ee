"""A filesystem of fsspec's own kind that counts its calls, waits and fails as it is told."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem


class Elsewhere(MemoryFileSystem):
    """`elsewhere://` in memory; not an object store, so that files are moved into place.

    Attributes:
        calls: how often each method was called on a file, as ("get_file", "shard-00000.safetensors").
        failing: (method, part of a name) -> what is raised.
        flaky: (method, part of a name) -> how often TimeoutError is raised before it works.
        listings: folder -> what it was when it was listed, which answers until `invalidate_cache`, as on S3 or GCS.
        gate: while it is cleared, get_file waits.
    """

    protocol = "elsewhere"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    calls: Counter[tuple[str, str]] = Counter()
    failing: dict[tuple[str, str], BaseException] = {}
    flaky: dict[tuple[str, str], int] = {}
    listings: dict[str, list[dict[str, Any]]] = {}
    gate = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("elsewhere://", "memory://"))

    @classmethod
    def reset(cls) -> None:
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.calls.clear()
        cls.failing.clear()
        cls.flaky.clear()
        cls.listings.clear()
        cls.gate.set()

    def _note(self, method: str, path: str) -> None:
        name = path.rsplit("/", 1)[-1]
        self.calls[method, name] += 1
        for (failing, part), error in self.failing.items():
            if failing == method and part in name:
                raise error
        for (failing, part), left in self.flaky.items():
            if failing == method and part in name and left:
                self.flaky[failing, part] = left - 1
                raise TimeoutError("the line is slow")

    def invalidate_cache(self, path=None):
        for known in list(self.listings) if path is None else (path, self._parent(path)):
            self.listings.pop(known, None)

    def ls(self, path, detail=True, **kwargs):
        path = self._strip_protocol(path)
        if path not in self.listings:
            self._note("ls", path)
            self.listings[path] = super().ls(path, True, **kwargs)
        found = self.listings[path]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path, **kwargs):
        path = self._strip_protocol(path)
        if (listed := self.listings.get(self._parent(path))) is not None:
            for entry in listed:
                if entry["name"] == path:
                    return entry
            raise FileNotFoundError(path)
        self._note("info", path)
        return super().info(path, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._note("cat_file", path)
        return super().cat_file(path, start=start, end=end, **kwargs)

    def get_file(self, rpath, lpath, **kwargs):
        self._note("get_file", rpath)
        assert self.gate.wait(20)
        with open(lpath, "wb") as file:  # memory's own moves the one position that all readers of a file share
            file.write(super().cat_file(rpath))

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._note("pipe_file", path)
        super().pipe_file(path, value, mode=mode, **kwargs)

    def mv(self, path1, path2, **kwargs):
        self._note("mv", path2)
        super().mv(path1, path2, **kwargs)

    def rm_file(self, path):
        self._note("rm_file", path)
        if self.store.pop(self._strip_protocol(path), None) is None:
            raise FileNotFoundError(path)


register_implementation("elsewhere", Elsewhere, clobber=True)
