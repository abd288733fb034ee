"""Writing a KD cache shard by shard, alone, as one of several ranks or one part, so that any build can be gone on with.

Owns the order of writes: first a record that names the cache, then for each shard its file and then the record that
names it. A shard counts only once a record names it, so a crash at any moment loses at most the shard that was being
written. Ranks write side by side, each into a record of its own; rank 0 makes one of all, before they start and after
they end. Does not own what the rows hold, nor how ranks wait for each other: the caller does that between the acts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save as to_safetensors

from qat_lora.cache.codec import AS_STORED, encoded
from qat_lora.cache.fetch import DiskCache
from qat_lora.cache.format import (
    MANIFEST_NAME,
    SHARD_KEY,
    Arrays,
    CacheManifest,
    ShardRecord,
    shard_name,
)
from qat_lora.cache.parts import WHOLE, Part, Record, named, record_name, records_in, united, with_shards
from qat_lora.cache.soundness import read_recorded, shard_tag_of
from qat_lora.errors import CacheError, CacheMismatch, ConfigError, DiskFull, OutputError
from qat_lora.files import check_writable, file_sizes, write_atomically
from qat_lora.remote import Location, RemotePath, location

logger = logging.getLogger(__name__)


class CacheWriter:
    """A directory that becomes the cache of a manifest: fresh, or left behind by interrupted builds, or parts.

    With several ranks, rank 0's writer is made before the others', and `finish` is called when all ranks have written
    their shards, by rank 0 first.

    Args:
        directory: the folder or URL, which all ranks see.
        manifest: what is to be built.
        part: which part of it; the whole takes up the records of parts that it finds, and removes them.
        rank: which of `world_size` writers of this part this one is.
        world_size: how many there are.

    Attributes:
        manifest: what this writer's own record names: alone, all shards of the part; else those of this rank.
        rounds: shards of the rank that has most to write.
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
        """Write the part's record, or take up what is there if it describes the same cache."""
        self.directory, self.part, self.rank, self.world_size = location(directory), part, rank, world_size
        if part.count > manifest.shard_count:
            raise ConfigError(
                f"A part needs a shard at least, but part={str(part)!r} and the cache has {manifest.shard_count} "
                f"shards of {manifest.rows_per_shard} rows; use fewer parts or a smaller --rows-per-shard."
            )
        begun = self._joined(manifest) if rank else self._opened(manifest)
        there = {shard.index for shard in begun.shards}
        missing = [index for index in part.shards(begun.shard_count) if index not in there]
        self._own = missing[rank::world_size]
        self.rounds = -(-len(missing) // world_size)
        self.manifest = begun if world_size == 1 else with_shards(begun, (), part)
        self._warn_of_little_room()

    @property
    def missing(self) -> list[int]:
        """The shards that this writer has yet to write."""
        written = {shard.index for shard in self.manifest.shards}
        return [index for index in self._own if index not in written]

    @property
    def rows_done(self) -> int:
        """Rows of the shards in this writer's own record."""
        return sum(shard.rows for shard in self.manifest.shards)

    @property
    def rows(self) -> int:
        """Rows of the shards that will be in this writer's own record in the end."""
        return self.rows_done + sum(len(self.manifest.shard_rows(index)) for index in self.missing)

    def write_shard(self, index: int, fields: Arrays) -> None:
        """Write the fields of shard `index`, which must be one of `missing`, and record it."""
        self._check_missing(index)
        rows = len(self.manifest.shard_rows(index))
        _check_fields(self.manifest, rows, fields)
        data = to_safetensors(
            {name: np.ascontiguousarray(x) for name, x in encoded(self.manifest, fields).items()},
            metadata={SHARD_KEY: self.manifest.shard_tag(index)},
        )
        self._write(index, data)

    def copy_shard(self, index: int, path: Path, sha256: str) -> None:
        """Write shard `index`, one of `missing`, as another folder has it; CacheError where it is damaged there."""
        self._check_missing(index)
        self._write(index, read_recorded(path, sha256))

    def _check_missing(self, index: int) -> None:
        if index not in self.missing:
            raise ValueError(f"shard {index} is not this writer's: it lacks {self.missing}")

    def _write(self, index: int, data: bytes) -> None:
        record = ShardRecord(
            shard_name(index), len(self.manifest.shard_rows(index)), len(data), hashlib.sha256(data).hexdigest()
        )
        try:
            self._store(record, data)
            manifest = with_shards(self.manifest, (*self.manifest.shards, record), self.part)
            manifest.save(self.directory / record_name(self.part, self.rank if self.world_size > 1 else None))
        except DiskFull:
            left = len(self.missing)
            raise DiskFull(
                f"The disk of {str(self.directory)!r} is full: {record.file} takes {_megabytes(len(data))} and "
                f"{left} {'shard is' if left == 1 else 'shards are'} still missing, so free about "
                f"{_megabytes(left * len(data))} and run the same command again; it goes on here, with the "
                f"{len(self.manifest.shards)} that are written."
            ) from None
        self.manifest = manifest

    def finish(self) -> CacheManifest:
        """Return the complete manifest of the part: rank 0 makes it of all ranks' records, the others read it."""
        found = CacheManifest.read(self._main) if self.rank else self._consolidated()
        if not found.complete:
            there = {shard.index for shard in found.shards}
            lacking = [index for index in self.part.shards(found.shard_count) if index not in there]
            if self.world_size == 1:
                raise ValueError(f"shard {lacking[0]} of {found.shard_count} is still missing")
            raise CacheError(
                f"All ranks have written their shards, but {str(self.directory)!r} lacks {shard_name(lacking[0])}; "
                "give an --output that all ranks see, or build a --part on each machine."
            )
        return found

    def _store(self, record: ShardRecord, data: bytes) -> None:
        """Write a shard's file; of one at a URL a copy is kept where there is room, since training may soon want it."""
        path = self.directory / record.file
        if isinstance(path, RemotePath):
            path.write_bytes(data)
            with contextlib.suppress(ConfigError, OutputError):
                DiskCache().put(path.parent, record, data)
        else:
            write_atomically(path, lambda stream: stream.write(data))

    @property
    def _main(self) -> Location:
        return self.directory / record_name(self.part)

    def _opened(self, wanted: CacheManifest) -> CacheManifest:
        """Check what is in the folder and return, and write, what is recorded of this part."""
        check_writable(self.directory)
        # Before the records: another part may begin just now, and its record comes before its first shard.
        shards = sorted(path.name for path in self.directory.glob("shard-*.safetensors"))
        records = records_in(self.directory)
        if shards and not records:
            raise CacheError(
                f"{str(self.directory)!r} holds {shards[0]} but no {MANIFEST_NAME}, so it is not ours to "
                "write over; choose another --output or delete that directory."
            )
        for record in records:
            self._check_same(record.path, record.manifest, wanted)
        if self.part != WHOLE and any(record.part == WHOLE for record in records):
            raise CacheError(
                f"{str(self.directory)!r} holds a whole cache, finished or not, so part={str(self.part)!r} cannot be "
                "built there; finish it without --part, or choose another --output."
            )
        self._refuse_foreign(shards, records, wanted)
        self._remove_leftovers()
        if not any(self._is_ours(record.part) for record in records):
            fresh = dataclasses.replace(wanted, shards=(), complete=False)
            fresh.save(self._main)
            return fresh
        found = self._consolidated()
        if not found.complete:
            logger.info("going on with %d of %d shards in %s", len(found.shards), found.shard_count, self.directory)
        return found

    def _joined(self, wanted: CacheManifest) -> CacheManifest:
        """Return what rank 0 has just written."""
        if not self._main.exists():
            raise CacheError(
                f"rank {self.rank} does not find {str(self._main)!r}, which rank 0 has just written; give an --output "
                "that all ranks see, or build a --part on each machine."
            )
        found = CacheManifest.read(self._main)
        self._check_same(self._main, found, wanted)
        return found

    def _consolidated(self) -> CacheManifest:
        """Make one record, on disk too, of all records of this part, and of those of its shards that are there."""
        records = [record for record in records_in(self.directory) if self._is_ours(record.part)]
        found = united(records, self.part)
        sizes = file_sizes(self.directory)
        there = [shard for shard in found.shards if sizes.get(shard.file) == shard.bytes]
        found = with_shards(found, there, self.part)
        if records[0].path != self._main or records[0].manifest != found:
            found.save(self._main)
        for record in records:  # only now: each of their shards has a record at any moment
            if record.path != self._main:
                record.path.unlink()
        return found

    def _check_same(self, path: Location, found: CacheManifest, wanted: CacheManifest) -> None:
        if differing := found.differing(wanted):
            shown = ", ".join(f"{name}: there {a!r}, asked for {b!r}" for name, (a, b) in differing.items())
            raise CacheMismatch(
                f"{str(self.directory)!r} holds a KD cache of something else ({path.name}: {shown}); "
                "choose another --output or delete that directory."
            )

    def _warn_of_little_room(self) -> None:
        """Others may free or fill a disk meanwhile, so this is no error."""
        if isinstance(self.directory, RemotePath):
            return
        wanted = (self.rows - self.rows_done) * self.manifest.bytes_per_row
        free = shutil.disk_usage(self.directory).free
        if free < wanted:
            logger.warning(
                "%s has %s free, but the shards to be written take about %s",
                self.directory,
                _megabytes(free),
                _megabytes(wanted),
            )

    def _refuse_foreign(self, files: Sequence[str], records: Sequence[Record], wanted: CacheManifest) -> None:
        """Raise CacheMismatch at a shard of another cache; what is no sound file, or not recorded, is written anew.

        At a URL, where each look costs a request, only files that no record names are looked at.
        """
        named = {shard.file for record in records for shard in record.manifest.shards}
        ours = records[0].manifest if records else wanted
        for file in files:
            if file in named and isinstance(self.directory, RemotePath):
                continue
            path = self.directory / file
            try:
                tag = shard_tag_of(path)
            except CacheError:
                continue
            if (match := re.match(r"shard-([0-9]+)", file)) and tag != ours.shard_tag(int(match[1])):
                raise CacheMismatch(
                    f"{str(path)!r} is no shard of the cache that the folder's manifest describes, or of another place "
                    "in it, and is not written over; delete it to have it built, or choose another --output."
                )

    def _is_ours(self, part: Part) -> bool:
        return self.part in (WHOLE, part)

    def _remove_leftovers(self) -> None:
        """Remove what killed writers of this part were just writing; another part's may be alive."""
        for path in self.directory.glob(".*.tmp"):
            name = path.name[1:].rsplit(".", 2)[0]
            whose, shard = named(name), re.fullmatch(r"shard-([0-9]+)\.safetensors", name)
            if (whose is not None and self._is_ours(whose[0])) or (
                shard is not None and int(shard[1]) % self.part.count == self.part.number - 1
            ):
                path.unlink(missing_ok=True)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"


def _check_fields(manifest: CacheManifest, rows: int, fields: Arrays) -> None:
    wanted = manifest.fields(rows)
    if set(fields) - set(AS_STORED) != set(wanted):
        raise ValueError(f"a shard needs the fields {sorted(wanted)}, got {sorted(fields)}")
    for name, (shape, dtype) in wanted.items():
        if fields[name].shape != shape or fields[name].dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {shape}, got {fields[name].dtype} {fields[name].shape}")
    for name in fields.keys() & {"topk_ids", "draw_ids"}:
        ids = fields[name]
        if ids.min() < 0 or ids.max() >= manifest.vocab_size:
            raise ValueError(f"{name} must lie in 0..{manifest.vocab_size - 1}, got {ids.min()}..{ids.max()}")
