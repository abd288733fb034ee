"""The folder that becomes a cache: which shards are missing, and how a file gets its place.

A file appears whole and under its name, or not at all; where two builders write the same one, the first stays. That is
all that builds in one folder have to agree on: each looks what is missing, and the index, written last, records the
files that are there. Does not own what the rows hold.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qat_lora.cache.bits import Array
from qat_lora.cache.codec import AS_STORED, encoded, joined, sums_of
from qat_lora.cache.copies import DiskCache
from qat_lora.cache.index import INDEX_NAME, CacheIndex, Shard, check_shard, load_cache, read_header, scan, shard_file
from qat_lora.cache.manifest import MANIFEST_NAME, WHOLE, Arrays, CacheManifest, Part, sealed, shard_name
from qat_lora.errors import CacheError, CacheMismatch, ConfigError, DiskFull, OutputError
from qat_lora.files import write_atomically
from qat_lora.urls import Location, Url, check_writable, file_sizes, location

logger = logging.getLogger(__name__)

_SEEN_BY_ALL = "give an --output that all ranks see, or build a --part on each machine"


class CacheWriter:
    """A folder that becomes the cache of a manifest: fresh, or left behind by interrupted builds, or holding parts.

    With several ranks, rank 0's writer is made before the others', and `finish` is called when all ranks have written
    their shards, by rank 0 first.

    Attributes:
        manifest: what is built. indices: the shards that are this writer's, which do not depend on what is there.
        missing: those of them that are not there.
        rounds: shards of the rank that has most.
    """

    def __init__(
        self,
        directory: Location | str,
        manifest: CacheManifest,
        *,
        part: Part = WHOLE,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Write the manifest, or take up what is there if it describes the same cache."""
        self.directory, self.part, self.rank, self.world_size = location(directory), part, rank, world_size
        if part.count > manifest.shard_count:
            raise ConfigError(
                f"A part needs a shard at least, but part={str(part)!r} and the cache has {manifest.shard_count} "
                f"shards of {manifest.rows_per_shard} rows; use fewer parts or a smaller --rows-per-shard."
            )
        self.manifest = self._opened(manifest)
        everything = part.shards(manifest.shard_count)
        self.indices, self.rounds = list(everything[rank::world_size]), -(-len(everything) // world_size)
        listed = file_sizes(self.directory)  # before the scan: what another builder finishes meanwhile is sound
        self._shards = {shard.file: shard for shard in scan(self.directory, self.manifest)}
        self._unsound = listed.keys() - self._shards.keys()
        self.missing = [index for index in self.indices if shard_name(index) not in self._shards]
        if 0 < len(self.missing) < len(self.indices):
            logger.info("%d of %d shards are in %s", len(self._shards), manifest.shard_count, self.directory)
        self._warn_of_little_room()

    @property
    def rows_done(self) -> int:
        """Rows of this writer's shards that are there."""
        return self.rows - sum(len(self.manifest.shard_rows(index)) for index in self.missing)

    @property
    def rows(self) -> int:
        """Rows of this writer's shards."""
        return sum(len(self.manifest.shard_rows(index)) for index in self.indices)

    def is_there(self, index: int) -> bool:
        """Whether a shard has come, maybe from another builder, since this writer was made."""
        path = self.directory / shard_name(index)
        if path.name in self._unsound:  # another builder may have replaced it
            try:
                read_header(path, self.manifest, index, file_sizes(self.directory).get(path.name, 0))
            except CacheMismatch:
                raise
            except CacheError:
                return False
            self._unsound.discard(path.name)
        return path.exists()

    def encode(self, fields: Arrays) -> tuple[dict[str, Array], dict[str, Array]]:
        """Some rows as they are stored, and their sums: what `write_encoded` takes pieces of."""
        _check_fields(self.manifest, fields)
        tensors = encoded(self.manifest, fields)
        return tensors, sums_of(self.manifest, tensors, fields)

    def write_shard(self, index: int, fields: Arrays) -> None:
        """Write shard `index` with the fields of all its rows."""
        self.write_encoded(index, [self.encode(fields)])

    def write_encoded(self, index: int, pieces: Sequence[tuple[Arrays, Arrays]]) -> None:
        """Write shard `index` from what `encode` gave; where it has come meanwhile, that file stays."""
        tensors = joined(self.manifest, [piece for piece, _ in pieces])
        sums = {name: float(np.concatenate([each[name] for _, each in pieces]).sum()) for name in pieces[0][1]}
        shard, content = shard_file(self.manifest, index, tensors, sums)
        shard.check(self.manifest)
        self._write(shard, content)

    def copy_shard(self, shard: Shard, path: Path) -> None:
        """Write a shard as another folder has it; CacheError where it is damaged there."""
        check_shard(path, shard)
        self._write(shard, path.read_bytes())

    def finish(self) -> CacheIndex:
        """Write the index where all shards are there, and return it; of a part, what is there.

        Rank 0 makes it, the others read it. At a URL, where another builder's file may have taken the place of one of
        ours, each header is read again.
        """
        if self.rank:
            return load_cache(self.directory)
        known = {} if isinstance(self.directory, Url) else self._shards
        index = CacheIndex(self.manifest, tuple(scan(self.directory, self.manifest, known)))
        there = {shard.index for shard in index.shards}
        if lacking := [i for i in self.part.shards(self.manifest.shard_count) if i not in there]:
            raise CacheError(
                f"All shards were written, but {str(self.directory)!r} lacks {shard_name(lacking[0])}; {_SEEN_BY_ALL}."
            )
        path = self.directory / INDEX_NAME
        if index.complete and (not path.exists() or path.read_bytes() != index.content()):
            write_file(path, index.content(), replace=True)
        sizes = file_sizes(self.directory)
        for left in self.directory.glob(".*.tmp"):  # of killed builders, or of one that comes too late
            if ".".join(left.name.split(".")[1:3]) in sizes:
                left.unlink(missing_ok=True)
        return index

    def _write(self, shard: Shard, content: bytes) -> None:
        path = self.directory / shard.file
        if self.is_there(shard.index):
            return
        try:
            if write_file(path, content, replace=shard.file in self._unsound):
                self._shards[shard.file] = shard
        except DiskFull:
            left = sum(not self.is_there(index) for index in self.missing)
            raise DiskFull(
                f"The disk of {str(self.directory)!r} is full: {shard.file} takes {_megabytes(len(content))} and "
                f"{left} {'shard is' if left == 1 else 'shards are'} still missing; free about "
                f"{_megabytes(left * len(content))} and run the same command again, it continues with these."
            ) from None
        if isinstance(path, Url):
            with contextlib.suppress(ConfigError, OutputError):  # training may soon want it
                DiskCache().put(path.parent, shard, content)

    def _opened(self, wanted: CacheManifest) -> CacheManifest:
        """Return the manifest that is in the folder, or write this one; it must describe the same cache."""
        if not self.rank:
            check_writable(self.directory)
        path = self.directory / MANIFEST_NAME
        try:
            found = CacheManifest.read(path)
        except FileNotFoundError:
            if self.rank:
                raise CacheError(
                    f"rank {self.rank} does not find {str(path)!r}, which rank 0 has just written; {_SEEN_BY_ALL}."
                ) from None
            if shards := sorted(name for name in file_sizes(self.directory) if name.startswith("shard-")):
                raise CacheError(
                    f"{str(self.directory)!r} holds {shards[0]} but no {MANIFEST_NAME}, so it is not ours to write "
                    "over; choose another --output or delete that directory."
                ) from None
            write_file(path, sealed(wanted.to_json()))
            found = CacheManifest.read(path)
        if differing := found.differing(wanted):
            shown = ", ".join(f"{name}: there {a!r}, asked for {b!r}" for name, (a, b) in differing.items())
            raise CacheMismatch(
                f"{str(self.directory)!r} holds a KD cache of something else ({path.name}: {shown}); "
                "choose another --output or delete that directory."
            )
        return found

    def _warn_of_little_room(self) -> None:
        """Others may free or fill a disk meanwhile, so this is no error."""
        wanted = (self.rows - self.rows_done) * self.manifest.bytes_per_row
        if isinstance(self.directory, Path) and (free := shutil.disk_usage(self.directory).free) < wanted:
            sizes = (_megabytes(free), _megabytes(wanted))
            logger.warning("%s has %s free, but the shards to be written take about %s", self.directory, *sizes)


def write_file(path: Location, content: bytes, *, replace: bool = False) -> bool:
    """Write a file whole and durably; unless `replace`, one that is there stays, and False is returned.

    At a URL it is always replaced: there is no other way to write one.
    """
    if isinstance(path, Url):
        path.write_bytes(content)
        return True
    try:
        return write_atomically(path, lambda stream: stream.write(content), replace=replace)
    except OutputError:
        if path.exists() and path.read_bytes() == content:  # of another builder, who has removed our temporary file
            return False
        raise


def _check_fields(manifest: CacheManifest, fields: Arrays) -> None:
    wanted = manifest.fields(len(next(iter(fields.values()))))
    if set(fields) - set(AS_STORED) != set(wanted):
        raise ValueError(f"a shard needs the fields {sorted(wanted)}, got {sorted(fields)}")
    for name, (shape, dtype) in wanted.items():
        if fields[name].shape != shape or fields[name].dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {shape}, got {fields[name].dtype} {fields[name].shape}")
    for name in fields.keys() & {"topk_ids", "draw_ids"}:
        ids = fields[name]
        if ids.min() < 0 or ids.max() >= manifest.vocab_size:
            raise ValueError(f"{name} must lie in 0..{manifest.vocab_size - 1}, got {ids.min()}..{ids.max()}")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"
