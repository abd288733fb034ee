"""Parts of a cache, the record files that they and ranks leave in its folder, and their union.

A record is a manifest that names some of the shards: `manifest.json` those of the whole cache,
`manifest.part-2-of-4.json` those of one part; with `.rank-3` before `.json`, those that one of several ranks has
written so far. Owns names, union and the words for what is missing. Does not own when records are written (`writer`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qat_lora.cache.format import MANIFEST_NAME, CacheManifest, ShardRecord
from qat_lora.errors import CacheError, CacheMismatch
from qat_lora.remote import Location, location

_NAME = re.compile(r"manifest(?:\.part-([0-9]+)-of-([0-9]+))?(?:\.rank-([0-9]+))?\.json")


@dataclass(frozen=True)
class Part:
    """One of `count` equal parts of a cache, numbered from 1; 1/1 is the whole cache."""

    number: int
    count: int

    def shards(self, shard_count: int) -> range:
        """Return the shards of this part: every `count`-th."""
        return range(self.number - 1, shard_count, self.count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


WHOLE = Part(1, 1)


class Record(NamedTuple):
    """One record file of a folder; `rank` is None where it is not that of a rank."""

    path: Location
    part: Part
    rank: int | None
    manifest: CacheManifest


def record_name(part: Part, rank: int | None = None) -> str:
    """File name of the record of a part, or of one rank that builds it."""
    whose = "" if part == WHOLE else f".part-{part.number}-of-{part.count}"
    return f"manifest{whose}{'' if rank is None else f'.rank-{rank}'}.json"


def named(name: str) -> tuple[Part, int | None] | None:
    """Return part and rank that a file name speaks of; None where it is not the name of a record."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    number, count, rank = match.groups()
    part = WHOLE if number is None else Part(int(number), int(count))
    if number is not None and not (part.count > 1 and 1 <= part.number <= part.count):
        return None
    return part, None if rank is None else int(rank)


def records_in(directory: Location) -> list[Record]:
    """Read all records of a folder: the whole cache's first, then by part, then by rank."""
    records = []
    for path in directory.glob("manifest*.json"):
        who = named(path.name)
        try:
            if who is not None:
                records.append(Record(path, *who, CacheManifest.read(path)))
        except CacheError:
            if path.exists():  # another job may just have united the records of its ranks
                raise
    return sorted(records, key=lambda r: (r.part.count, r.part.number, -1 if r.rank is None else r.rank))


def united(records: Sequence[Record], part: Part = WHOLE) -> CacheManifest:
    """Return one manifest with the shards of all records, complete where these are all of the part.

    The names of teacher and source are the first record's. Raises CacheMismatch where two records are of different
    caches, or have different files in mind for one shard.
    """
    first = records[0]
    shards: dict[int, tuple[Location, ShardRecord]] = {}
    for record in records:
        if differing := first.manifest.differing(record.manifest):
            shown = ", ".join(f"{name}: {a!r} there, {b!r} here" for name, (a, b) in differing.items())
            raise CacheMismatch(
                f"{str(first.path)!r} and {str(record.path)!r} are of different caches ({shown}); put the parts of "
                "each cache into a folder of their own."
            )
        for shard in record.manifest.shards:
            path, known = shards.setdefault(shard.index, (record.path, shard))
            if known != shard:
                raise CacheMismatch(
                    f"{str(path)!r} and {str(record.path)!r} name different files for {shard.file} (sha256 "
                    f"{known.sha256[:12]}.. there, {shard.sha256[:12]}.. here); delete the one whose file is not here."
                )
    return with_shards(first.manifest, [shards[index][1] for index in sorted(shards)], part)


def with_shards(manifest: CacheManifest, shards: Sequence[ShardRecord], part: Part) -> CacheManifest:
    """Return the manifest with these shards in order, complete where they are all of the part."""
    ordered = tuple(sorted(shards, key=lambda shard: shard.index))
    there = {shard.index for shard in ordered}
    complete = there.issuperset(part.shards(manifest.shard_count))
    return dataclasses.replace(manifest, shards=ordered, complete=complete)


def load_manifest(directory: Location | str) -> CacheManifest:
    """Return the manifest of a folder or URL: of a whole cache, or the union of the records that are there.

    CacheError where there is none, or none that can be understood; CacheMismatch where they are not of one cache.
    """
    directory = location(directory)
    whole = directory / MANIFEST_NAME
    if whole.exists() and (found := CacheManifest.read(whole)).complete:
        return found
    records = records_in(directory)
    if not records:
        raise CacheError(
            f"No {MANIFEST_NAME} in {str(directory)!r}, so it is no KD cache; "
            "check the path or build one with scripts/build_kd_cache.py --output."
        )
    return united(records)


def what_is_missing(directory: Location, manifest: CacheManifest) -> str:
    """Say of an incomplete cache what it lacks and how to get it: whole parts where it is made of parts."""
    done, wanted = len(manifest.shards), manifest.shard_count
    parts = {record.part for record in records_in(directory)}
    if WHOLE in parts:
        return (
            f"The build of the KD cache {str(directory)!r} was interrupted after {done} of {wanted} shards; "
            "run the same build command again, it goes on where it stopped."
        )
    there = {shard.index for shard in manifest.shards}
    count = max(part.count for part in parts)
    every = [Part(number, count) for number in range(1, count + 1)]
    lacking = [
        f"part {part} is {'unfinished' if part in parts else 'missing'}"
        for part in every
        if not there.issuperset(part.shards(wanted))
    ]
    return (
        f"The KD cache {str(directory)!r} is made of parts and has {done} of {wanted} shards: {', '.join(lacking)}; "
        "copy all files of every part into it, or run the build command without --part, which builds what is missing."
    )
