"""What the shards of a cache say of themselves, and the index that holds it for all of them.

A shard is a safetensors file. One entry in its header, `shard`, says which cache it is of, which shard it is, the
sha256 of its data, and what is in it in numbers. `index.json`, written last, repeats that for every shard, with the
sha256 of the header: so the index vouches for the header, and the header for the data. Where there is no index, as in a
folder that parts were copied into, the headers give the same.

Legend: R rows of a shard, T positions of a row.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from safetensors.numpy import save as to_safetensors

from qat_lora.cache.bits import Array
from qat_lora.cache.manifest import (
    TOKEN_FIELDS,
    Arrays,
    CacheManifest,
    checked_digest,
    load_manifest,
    read_sealed,
    sealed,
    shard_name,
)
from qat_lora.errors import CacheError, CacheMismatch
from qat_lora.urls import Location, Url, file_sizes, location

INDEX_NAME, INDEX_SCHEMA = "index.json", "qat_lora.kd_index/1"
HEADER_KEY = "shard"
HEADER_LIMIT = 2**24
HEADER_GUESS = 2**16  # bytes; most headers are read at once
REQUESTS_AT_ONCE = 16
ROWS_AT_ONCE = 1024  # that are hashed
SUMS = ("kept_mass", "entropy", "grid_kl")
REBUILD = "restore the file, or delete it and run the build command again to write it anew"

_DTYPES = {"u1": "U8", "i4": "I32", "i8": "I64", "f2": "F16", "f4": "F32"}  # NumPy's words, safetensors'
_SHARD = re.compile(r"shard-([0-9]{5,15})\.safetensors")


@dataclass(frozen=True)
class Shard:
    """One shard file, as its header and the index describe it.

    Attributes:
        index: which shard of the cache it is.
        content: sha256 of all bytes behind the header.
        rows: how many it holds. tokens: valid ones in them.
        kept_mass: sum over the valid tokens of the probability of the stored candidates at T = 1.
        entropy: sum over them of the teacher's, in nats. grid_kl: sum of what the grid of log-probabilities costs.
        tensor_bytes: name -> bytes.
        keys: base64 of the rows' keys (see `row_keys`), 8 bytes each.
        held_out: base64 of a bit per row; empty where rows have no tag.
        sha256: of the header and the length before it. size_bytes: of the whole file.
    """

    index: int
    content: str
    rows: int
    tokens: int
    kept_mass: float
    entropy: float
    grid_kl: float
    tensor_bytes: Mapping[str, int]
    keys: str
    held_out: str
    sha256: str = ""
    size_bytes: int = 0

    @property
    def file(self) -> str:
        """Name of the file."""
        return shard_name(self.index)

    def key_array(self) -> Array:
        """The rows' keys, uint64 [R]."""
        return np.frombuffer(base64.b64decode(self.keys, validate=True), "<u8")

    def held_out_array(self) -> Array:
        """Bool [R]: which rows are tagged as held out."""
        bits = np.frombuffer(base64.b64decode(self.held_out, validate=True), np.uint8)
        return np.unpackbits(bits, count=self.rows, bitorder="little").astype(bool)

    def check(self, manifest: CacheManifest) -> None:
        """Raise ValueError where this cannot be a shard of a cache."""
        for name in ("index", "rows", "tokens", "size_bytes"):
            value = getattr(self, name)
            _check(type(value) is int and value >= 0, f"{name}={value!r}")
        for name in SUMS:
            value = getattr(self, name)
            _check(isinstance(value, float) and math.isfinite(value), f"{name}={value!r}")
        sizes = self.tensor_bytes
        _check(isinstance(sizes, dict) and all(type(size) is int for size in sizes.values()), f"tensor_bytes={sizes!r}")
        _check(self.index < manifest.shard_count, f"shard {self.index} of {manifest.shard_count}")
        checked_digest(self.content)
        checked_digest(self.sha256)
        rows, keys = len(manifest.shard_rows(self.index)), len(self.key_array())
        _check(self.rows == rows == keys, f"{self.rows} rows of {rows}, {keys} keys")
        tags = len(base64.b64decode(self.held_out, validate=True))
        _check(not manifest.eval_fraction or tags == -(-self.rows // 8), f"held_out={self.held_out!r}")


def _check(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)


@dataclass(frozen=True)
class CacheIndex:
    """A cache: its manifest, and its shards as far as they are there, in order."""

    manifest: CacheManifest
    shards: tuple[Shard, ...]

    @property
    def complete(self) -> bool:
        """Whether all shards are there, so that shard i is `shards[i]`."""
        return len(self.shards) == self.manifest.shard_count

    @property
    def rows(self) -> int:
        """Rows of the shards that are there."""
        return sum(shard.rows for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        """Of the shards that are there."""
        return sum(shard.size_bytes for shard in self.shards)

    def row_keys(self) -> Array:
        """uint64 [rows]: see `row_keys`."""
        return np.concatenate([shard.key_array() for shard in self.shards])

    def held_out(self) -> Array:
        """Bool [rows]: which rows are tagged as held out."""
        return np.concatenate([shard.held_out_array() for shard in self.shards])

    def content(self) -> bytes:
        """The bytes of index.json."""
        shards = [asdict(shard) for shard in self.shards]
        return sealed({"schema": INDEX_SCHEMA, "cache": self.manifest.digest, "shards": shards})

    def check_complete(self, directory: Location) -> None:
        """Raise CacheError where a shard is missing."""
        if self.complete:
            return
        there, most = {shard.index for shard in self.shards}, 8
        lacking = [i for i in range(min(self.manifest.shard_count, len(there) + most + 1)) if i not in there]
        shown = ", ".join(map(str, lacking[:most])) + (", ..." if len(lacking) > most else "")
        raise CacheError(
            f"The KD cache {str(directory)!r} has {len(there)} of {self.manifest.shard_count} shards and lacks "
            f"{shown}: its build was interrupted, or parts are missing; run the same build command again, it continues "
            "where it stopped, or copy the files of all parts into this folder."
        )


def load_cache(directory: Location | str) -> CacheIndex:
    """Open a cache, finished or not; of a finished one two files are read.

    Raises CacheError where there is none or what there is cannot be understood.
    """
    directory = location(directory)
    manifest = load_manifest(directory)
    path = directory / INDEX_NAME
    try:
        data = read_sealed(path, INDEX_SCHEMA, 2**30)
    except FileNotFoundError:
        return CacheIndex(manifest, tuple(scan(directory, manifest)))
    if data.get("cache") != manifest.digest:
        raise CacheMismatch(
            f"{str(path)!r} is of another cache than the manifest beside it; delete it and run the build command again."
        )
    try:
        shards = tuple(Shard(**entry) for entry in data["shards"])
        for number, shard in enumerate(shards):
            shard.check(manifest)
            _check(shard.index == number, f"shard {shard.index} in place {number}")
        _check(len(shards) == manifest.shard_count, f"{len(shards)} of {manifest.shard_count} shards")
    except (KeyError, TypeError, ValueError) as error:
        raise CacheError(f"{str(path)!r} is damaged ({error}); delete it and run the build command again.") from error
    return CacheIndex(manifest, shards)


def scan(directory: Location, manifest: CacheManifest, known: Mapping[str, Shard] | None = None) -> list[Shard]:
    """Return the sound shards of a folder by their headers, in order; `known` are those that need not be read again.

    What is no sound file is left out, since a build writes it anew; CacheMismatch at a shard of another cache.
    """
    known, sizes = known or {}, file_sizes(directory)
    indices = {name: int(match[1]) for name in sizes if (match := _SHARD.fullmatch(name))}

    def read(name: str) -> Shard | None:
        if name in known and known[name].size_bytes == sizes[name]:
            return known[name]
        try:
            return read_header(directory / name, manifest, indices[name], sizes[name])
        except CacheMismatch:
            raise
        except CacheError:
            return None

    with ThreadPoolExecutor(REQUESTS_AT_ONCE if isinstance(directory, Url) else 1) as pool:
        found = list(pool.map(read, indices))
    return sorted((shard for shard in found if shard is not None), key=lambda shard: shard.index)


def read_header(path: Location, manifest: CacheManifest, index: int, size: int) -> Shard:
    """Read what the file of shard `index`, of `size` bytes, says of itself.

    CacheError where it is no sound file, CacheMismatch where it is another cache's or another shard.
    """
    try:
        header = _header_bytes(path, size)
        tree = json.loads(header[8:])
        said = json.loads(tree.pop("__metadata__")[HEADER_KEY])
        whose = said.pop("cache")
        if whose != manifest.digest or said["index"] != index:
            raise CacheMismatch(
                f"{str(path)!r} is shard {said['index']} of another KD cache ({str(whose)[:12]}.., the folder's is "
                f"{manifest.digest[:12]}..) or of another place in this one; delete it to have it built, or choose "
                "another --output."
            )
        shard = Shard(**{**said, "sha256": hashlib.sha256(header).hexdigest(), "size_bytes": size})
        shard.check(manifest)
        _check_tensors(manifest, shard, tree, size - len(header))
        return shard
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, OSError) as error:
        raise CacheError(f"{str(path)!r} is no sound shard ({error}); {REBUILD}.") from None


def check_size(place: Location, size: int | None, shard: Shard) -> None:
    """CacheError unless a shard's file is there, its size not None, and as large as it was when it was written."""
    if size is None:
        raise CacheError(
            f"The KD cache lacks its shard {str(place)!r}; restore the file or run the build command again."
        )
    if size != shard.size_bytes:
        raise CacheError(f"{str(place)!r} has {size} bytes instead of {shard.size_bytes} (cut short?); {REBUILD}.")


def check_shard(path: Location, shard: Shard, *, name: Location | None = None) -> None:
    """Read every byte of a shard file; CacheError unless it is the one that the index or its header describes.

    `name` is what a copy is called in errors.
    """
    place = name or path
    header, content = hashlib.sha256(), hashlib.sha256()
    size = header_end = 0
    try:
        for chunk in _chunks(path):
            header_end = header_end or _header_end(chunk)
            rest = max(0, header_end - size)
            header.update(chunk[:rest])
            content.update(chunk[rest:])
            size += len(chunk)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            check_size(place, None, shard)
        raise CacheError(f"{str(place)!r} cannot be read ({error}); restore the file.") from None
    check_size(place, size, shard)
    for found, wanted in ((header.hexdigest(), shard.sha256), (content.hexdigest(), shard.content)):
        if found != wanted:
            digests = f"sha256 {found[:12]}.. instead of the recorded {wanted[:12]}.."
            raise CacheError(f"{str(place)!r} is damaged: {digests}; {REBUILD}.")


def shard_file(manifest: CacheManifest, index: int, tensors: Arrays, sums: Mapping[str, float]) -> tuple[Shard, bytes]:
    """What the header of shard `index` with these tensors says, and the bytes of its file."""
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    bare = memoryview(to_safetensors(tensors))
    held_out = np.packbits(tensors.get("held_out", np.empty(0, np.uint8)), bitorder="little")
    shard = Shard(
        index=index,
        content=hashlib.sha256(bare[_header_end(bare) :]).hexdigest(),
        rows=len(tensors["lengths"]),
        tokens=int(tensors["lengths"].sum()),
        kept_mass=sums["kept_mass"],
        entropy=sums["entropy"],
        grid_kl=sums["grid_kl"],
        tensor_bytes={name: tensors[name].nbytes for name in sorted(tensors)},
        keys=base64.b64encode(row_keys(tensors).tobytes()).decode(),
        held_out=base64.b64encode(held_out.tobytes()).decode(),
    )
    said = {name: value for name, value in asdict(shard).items() if name not in ("sha256", "size_bytes")}
    whole = to_safetensors(tensors, {HEADER_KEY: json.dumps({"cache": manifest.digest, **said})})
    header = hashlib.sha256(memoryview(whole)[: _header_end(whole)]).hexdigest()
    return dataclasses.replace(shard, sha256=header, size_bytes=len(whole)), whole


def row_keys(tensors: Arrays) -> Array:
    """uint64 [R]: of each row the first 8 bytes of the sha256 of its tokens: ids, length, and all tags as bits.

    `tensors` may be those of a shard or fields; both give the same.
    """
    digests = bytearray()
    for first in range(0, len(tensors["lengths"]), ROWS_AT_ONCE):
        columns = []
        for name in (name for name in TOKEN_FIELDS if name in tensors):
            x = np.asarray(tensors[name][first : first + ROWS_AT_ONCE])
            x = x.reshape(len(x), -1)
            if name in ("input_ids", "lengths"):
                x = np.ascontiguousarray(x, dtype="<i4").view(np.uint8)
            columns.append(np.packbits(x, axis=1, bitorder="little") if x.dtype == bool else x)
        for row in np.concatenate(columns, axis=1):
            digests += hashlib.sha256(row.tobytes()).digest()[:8]
    return np.frombuffer(bytes(digests), "<u8")


def source_digest(keys: Array, seq_len: int) -> str:
    """The sha256 of all rows of a cache, from their keys."""
    digest = hashlib.sha256(repr((len(keys), seq_len)).encode())
    digest.update(np.ascontiguousarray(keys, dtype="<u8").tobytes())
    return digest.hexdigest()


def fractions(keys: Array) -> Array:
    """Of each row a number in [0, 1) that depends on nothing but its tokens; 53 bits are what a float holds."""
    return (keys >> np.uint64(11)).astype(np.float64) / 2.0**53


def _header_end(start: Any) -> int:
    """Where the header of a safetensors file ends, which begins with the 8 bytes of its length."""
    return 8 + int.from_bytes(start[:8], "little")


def _header_bytes(path: Location, size: int) -> bytes:
    """The header of a safetensors file, with the 8 bytes of its length; ValueError where it is none."""

    def read(start: int, stop: int) -> bytes:
        if isinstance(path, Url):
            return path.read_bytes(start, stop)
        with path.open("rb") as stream:
            stream.seek(start)
            return stream.read(stop - start)

    found = read(0, min(HEADER_GUESS, size))
    end = _header_end(found)
    _check(len(found) >= 8 and 8 < end <= min(HEADER_LIMIT, size), f"a header of {end - 8} bytes in a file of {size}")
    return found[:end] if len(found) >= end else found + read(len(found), end)


def _check_tensors(manifest: CacheManifest, shard: Shard, tree: Mapping[str, Any], data_bytes: int) -> None:
    """Raise ValueError unless a header's tensors are those of the manifest, and fill the file."""
    wanted = manifest.tensors(shard.rows)
    _check(set(tree) == {*wanted, *manifest.streams}, f"tensors {sorted(tree)}")
    for name, entry in tree.items():
        begin, end = entry["data_offsets"]
        shape, dtype = wanted.get(name, ((end - begin,), np.dtype("u1")))
        said = (entry["shape"], entry["dtype"])
        _check(said == (list(shape), _DTYPES[dtype.str[1:]]), f"{name} is {said[1]} {said[0]}")
        _check(0 <= begin == end - math.prod(shape) * dtype.itemsize, f"{name} of {shape} in {end - begin} bytes")
    ends = max(entry["data_offsets"][1] for entry in tree.values())
    _check(ends == data_bytes, f"{data_bytes} bytes of data instead of {ends}")


def _chunks(path: Location) -> Iterable[bytes]:
    if isinstance(path, Url):
        yield from path.chunks()
        return
    with path.open("rb") as stream:
        while chunk := stream.read(2**22):
            yield chunk
