"""Rows of tensors out of a safetensors file, read by position: nothing is mapped, and nothing of the file stays.

The safetensors library reads through a memory map, whose touched pages count as this process's memory for as long as
the file is open. Here a read costs one system call, or one range request where the file lies elsewhere. Owns the
header, checked against the file's size. Does not own what the tensors mean.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from qat_lora.remote import Location, RemotePath

Array: TypeAlias = "np.ndarray[Any, Any]"

_DTYPES: dict[str, np.dtype[Any]] = {
    f"{kind}{bits}": np.dtype(f"<{kind.lower()}{bits // 8}")
    for kind, sizes in {"F": (16, 32, 64), "I": (8, 16, 32, 64), "U": (8, 16, 32, 64)}.items()
    for bits in sizes
}
_HEADER_LIMIT = 2**24


class Stored(NamedTuple):
    """Where a tensor lies: bytes from `start` of the file on, row by row."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """A safetensors file, open for reading.

    Attributes:
        tensors: name -> `Stored`.
        metadata: what the file says beside them.
    """

    def __init__(self, path: Location) -> None:
        """Read the header; ValueError where it is none, OSError where the file cannot be read."""
        self.path = path
        self._descriptor = -1 if isinstance(path, RemotePath) else os.open(path, os.O_RDONLY)
        try:
            self.tensors, self.metadata = self._header()
        except BaseException:
            self.close()
            raise

    def rows_into(self, name: str, first: int, out: Array) -> None:
        """Fill `out` ``[n, ...]``, C-contiguous and of the tensor's dtype, with its rows from `first` on."""
        dtype, shape, start = self.tensors[name]
        if out.dtype != dtype or out.shape[1:] != shape[1:] or first + len(out) > shape[0]:
            raise ValueError(f"{name} is {dtype} {shape}, but rows {first}.. of {out.dtype} {out.shape} were asked for")
        if out.size:
            row_bytes = out.nbytes // len(out)
            self._read_into(start + first * row_bytes, out.reshape(-1).view(np.uint8).data)

    def rows(self, name: str, first: int, count: int) -> Array:
        """Rows `first` up to `first + count` of a tensor."""
        dtype, shape, _ = self.tensors[name]
        out = np.empty((count, *shape[1:]), dtype)
        self.rows_into(name, first, out)
        return out

    def close(self) -> None:
        """Give the file back; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()

    def _header(self) -> tuple[dict[str, Stored], Mapping[str, str]]:
        length = int.from_bytes(self._read(0, 8), "little")
        if not 0 < length <= _HEADER_LIMIT:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(self._read(8, length))
        if not isinstance(header, dict):
            raise ValueError(f"a header that is {type(header).__name__}")
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} of {shape} in {end - begin} bytes")
            tensors[name] = Stored(dtype, shape, 8 + length + begin)
        return tensors, metadata

    def _read(self, offset: int, count: int) -> bytes:
        data = bytearray(count)
        self._read_into(offset, memoryview(data))
        return bytes(data)

    def _read_into(self, offset: int, buffer: memoryview) -> None:
        if isinstance(self.path, RemotePath):
            data = self.path.read_bytes(offset, offset + len(buffer))
            if len(data) != len(buffer):
                raise ValueError(f"{len(data)} bytes at {offset} instead of {len(buffer)}")
            buffer[:] = data
            return
        done = 0
        while done < len(buffer):  # a call reads 2 GiB at most
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise ValueError(f"the file ends at {offset + done}, inside what was asked for")
            done += count
