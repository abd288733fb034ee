"""Writing a KD cache shard by shard, so that a build that stops can go on where it stopped.

Owns the order of writes: manifest, then for each shard its file and then the manifest that names it. A shard
counts only once the manifest names it, so a crash at any moment loses at most one shard. Does not own what
the rows hold.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from pathlib import Path

import numpy as np
from safetensors.numpy import save as to_safetensors

from qat_lora.errors import CacheError, CacheMismatch
from qat_lora.files import check_writable, write_atomically
from qat_lora.kd.format import (
    MANIFEST_NAME,
    SHARD_KEY,
    Arrays,
    CacheManifest,
    ShardRecord,
    shard_name,
)

logger = logging.getLogger(__name__)


class CacheWriter:
    """A directory that becomes the cache of a manifest: fresh, or left behind by an interrupted build."""

    def __init__(self, directory: Path | str, manifest: CacheManifest) -> None:
        """Write the manifest, or take up the one that is there if it describes the same cache."""
        self.directory = Path(directory)
        check_writable(self.directory)
        self._remove_leftovers()
        if (self.directory / MANIFEST_NAME).exists():
            self.manifest = self._continued(manifest)
        else:
            self._refuse_foreign_shards()
            self.manifest = dataclasses.replace(manifest, shards=(), complete=False)
            self.manifest.save(self.directory)

    @property
    def next_shard(self) -> int:
        """Index of the first shard that is missing; `manifest.shard_count` when none is."""
        return len(self.manifest.shards)

    def write_shard(self, index: int, tensors: Arrays) -> None:
        """Write the tensors of shard `index`, which must be `next_shard`, and record it."""
        if index != self.next_shard or index >= self.manifest.shard_count:
            raise ValueError(f"shard {index} is out of turn: the next one is {self.next_shard}")
        rows = len(self.manifest.shard_rows(index))
        _check_tensors(self.manifest, rows, tensors)
        data = to_safetensors(
            {name: np.ascontiguousarray(x) for name, x in tensors.items()},
            metadata={SHARD_KEY: self.manifest.shard_tag(index)},
        )
        write_atomically(self.directory / shard_name(index), lambda stream: stream.write(data))
        record = ShardRecord(shard_name(index), rows, len(data), hashlib.sha256(data).hexdigest())
        self._save(shards=(*self.manifest.shards, record), complete=False)

    def finish(self) -> CacheManifest:
        """Mark the cache as complete and return its manifest."""
        if self.next_shard != self.manifest.shard_count:
            raise ValueError(f"shard {self.next_shard} of {self.manifest.shard_count} is still missing")
        if not self.manifest.complete:
            self._save(shards=self.manifest.shards, complete=True)
        return self.manifest

    def _save(self, *, shards: tuple[ShardRecord, ...], complete: bool) -> None:
        self.manifest = dataclasses.replace(self.manifest, shards=shards, complete=complete)
        self.manifest.save(self.directory)

    def _continued(self, wanted: CacheManifest) -> CacheManifest:
        found = CacheManifest.load(self.directory)
        differing = [k for k, v in wanted.identity().items() if found.identity()[k] != v]
        if differing:
            shown = ", ".join(
                f"{k}: there {found.identity()[k]!r}, asked for {wanted.identity()[k]!r}" for k in differing
            )
            raise CacheMismatch(
                f"{str(self.directory)!r} holds a KD cache of something else ({shown}); "
                "choose another --output or delete that directory."
            )
        kept = []
        for record in found.shards:
            path = self.directory / record.file
            if not path.is_file() or path.stat().st_size != record.bytes:
                break
            kept.append(record)
        if len(kept) < found.shard_count:
            logger.info("resuming at shard %d of %d in %s", len(kept), found.shard_count, self.directory)
        return dataclasses.replace(found, shards=tuple(kept), complete=found.complete and kept == list(found.shards))

    def _remove_leftovers(self) -> None:
        # What a killed build was just writing.
        for pattern in ("shard-*.safetensors", MANIFEST_NAME):
            for path in self.directory.glob(f".{pattern}.*.tmp"):
                path.unlink(missing_ok=True)

    def _refuse_foreign_shards(self) -> None:
        shards = sorted(p.name for p in self.directory.glob("shard-*.safetensors"))
        if shards:
            raise CacheError(
                f"{str(self.directory)!r} holds {shards[0]} but no {MANIFEST_NAME}, so it is not ours to "
                "write over; choose another --output or delete that directory."
            )


def _check_tensors(manifest: CacheManifest, rows: int, tensors: Arrays) -> None:
    wanted = manifest.tensors(rows)
    if set(tensors) != set(wanted):
        raise ValueError(f"a shard needs the tensors {sorted(wanted)}, got {sorted(tensors)}")
    for name, (shape, dtype) in wanted.items():
        if tensors[name].shape != shape or tensors[name].dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {shape}, got {tensors[name].dtype} {tensors[name].shape}")
