"""Finished caches into other ones: merged, split, and with other settings.

Owns what may be put together, and what the new manifest says. Rows come from `rows` (or `older`), are written by
`writer`, so each of these acts can be killed and gone on with by the same call, and its files are the same as if it
had not been. One shard of the source and one of the result are in memory.

Legend: R rows, T positions, K candidates, n temperatures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from qat_lora.cache.codec import AS_STORED
from qat_lora.cache.index import CacheIndex, source_digest
from qat_lora.cache.manifest import Array, CacheManifest, Part, load_manifest
from qat_lora.cache.rows import JoinedRows, Rows, SomeRows, StoredRows
from qat_lora.cache.write import CacheWriter
from qat_lora.errors import CacheMismatch, ConfigError

Progress = Callable[[int, int], None]  # shards written, shards in all

_OF_THE_ROWS = ("rows", "rows_per_shard", "source_digest")  # what may differ between caches that are merged


def merge(
    folders: Sequence[Path], output: Path, *, rows_per_shard: int = 0, progress: Progress | None = None
) -> CacheIndex:
    """Put caches together: folders of one cache (its parts) are united, different caches are laid end to end.

    Parts alone give the files that one build leaves, byte for byte. Rows of several caches must be of one teacher,
    tokenizer and length, and stored alike; they come in the order of the folders, with a source_digest of their own.

    Raises CacheError where a cache is incomplete or damaged, CacheMismatch where two of them are of different kinds.
    """
    check_apart(folders, output)
    sources = _caches(folders)
    first = sources[0].manifest
    for source in sources[1:]:
        if differing := {k: v for k, v in first.differing(source.manifest).items() if k not in _OF_THE_ROWS}:
            shown = ", ".join(f"{name}: {a!r} there, {b!r} here" for name, (a, b) in differing.items())
            raise CacheMismatch(
                f"{str(sources[0].folders[0])!r} and {str(source.folders[0])!r} cannot be merged ({shown}); merge "
                "caches of one teacher, and make what is stored alike with `qat-lora cache convert`."
            )
    each = rows_per_shard or first.rows_per_shard
    if len(sources) == 1:
        if each == first.rows_per_shard:
            return _copied(sources[0], output, Part(1, 1), progress)
        return write_rows(sources[0], dataclasses.replace(first, rows_per_shard=each), output, progress)
    rows = JoinedRows(sources)
    manifest = dataclasses.replace(
        first,
        rows=rows.count,
        rows_per_shard=each,
        source=" + ".join(dict.fromkeys(source.manifest.source for source in sources)),
        source_digest=source_digest(rows.keys(), first.seq_len),
    )
    return write_rows(rows, manifest, output, progress)


def split_parts(
    folder: Path, output: Path, count: int, *, progress: Progress | None = None
) -> list[tuple[Path, CacheIndex]]:
    """Copy a cache into `count` folders, each with a part of it: whole shards, every `count`-th."""
    source = StoredRows([folder])
    folders = [output / f"part-{number}-of-{count}" for number in range(1, count + 1)]
    check_apart([folder], *folders)
    before = 0
    found = []
    for number, part_folder in enumerate(folders, 1):
        index = _copied(source, part_folder, Part(number, count), _moved(progress, before, source.manifest.shard_count))
        before += len(index.shards)
        found.append((part_folder, index))
    return found


def split_rows(
    folder: Path, output: Path, rows: int, *, progress: Progress | None = None
) -> list[tuple[Path, CacheIndex]]:
    """Make two caches of one: `first` with that many rows, and `rest`."""
    source = StoredRows([folder])
    was = source.manifest
    if not 0 < rows < was.rows:
        raise ConfigError(
            f"--rows {rows} leaves nothing to one side of {str(folder)!r}, which has {was.rows} rows; give 1 to "
            f"{was.rows - 1}."
        )
    check_apart([folder], output / "first", output / "rest")
    ranges = {"first": range(rows), "rest": range(rows, was.rows)}
    total = sum(-(-len(chosen) // was.rows_per_shard) for chosen in ranges.values())
    before = 0
    found = []
    for name, chosen in ranges.items():
        some = SomeRows(source, chosen)
        manifest = dataclasses.replace(
            was,
            rows=some.count,
            source=f"{was.source} (rows {chosen.start + 1:,} to {chosen.stop:,} of {was.rows:,})",
            source_digest=source_digest(some.keys(), was.seq_len),
        )
        made = write_rows(some, manifest, output / name, _moved(progress, before, total))
        before += manifest.shard_count
        found.append((output / name, made))
    return found


def convert(
    folder: Path,
    output: Path,
    *,
    top_k: int = 0,
    temperatures: Sequence[float] = (),
    logprob_bits: int = 0,
    rows_per_shard: int = 0,
    progress: Progress | None = None,
) -> CacheIndex:
    """Store a cache with other settings: no more candidates, temperatures or digits than it has."""
    source = StoredRows([folder])
    check_apart([folder], output)
    was = source.manifest
    manifest = narrower(was, folder, top_k=top_k, temperatures=temperatures, logprob_bits=logprob_bits)
    manifest = dataclasses.replace(manifest, rows_per_shard=rows_per_shard or was.rows_per_shard)
    return write_rows(Narrowed(source, was, manifest), manifest, output, progress)


def write_rows(rows: Rows, manifest: CacheManifest, output: Path, progress: Progress | None = None) -> CacheIndex:
    """Write, or continue writing, the cache of a manifest with these rows; return what is there in the end."""
    writer = CacheWriter(output, manifest)
    done = manifest.shard_count - len(writer.missing)
    for number in writer.missing:
        writer.write_shard(number, rows.fields(manifest.shard_rows(number)))
        done += 1
        if progress is not None:
            progress(done, manifest.shard_count)
    return writer.finish()


def narrower(
    was: CacheManifest, folder: Path, *, top_k: int = 0, temperatures: Sequence[float] = (), logprob_bits: int = 0
) -> CacheManifest:
    """Return the manifest of a cache with less; ConfigError where more is asked for than is there."""
    if was.store != "topk" and (top_k or temperatures or logprob_bits):
        raise ConfigError(
            f"{str(folder)!r} has store={was.store!r}, of which top_k, temperatures and logprob_bits cannot be "
            "changed; leave these out, or build a cache with them."
        )
    if was.tail_draws and top_k not in (0, was.top_k):
        raise ConfigError(
            f"{str(folder)!r} has {was.tail_draws} draws from all but its {was.top_k} candidates, which say nothing of "
            f"candidates left out, but top_k={top_k}; leave --top-k out, or build a cache with --top-k {top_k}."
        )
    if top_k > was.top_k:
        raise ConfigError(
            f"{str(folder)!r} stores {was.top_k} candidates, but top_k={top_k}; set --top-k to at most {was.top_k}."
        )
    if lacking := [t for t in temperatures if t not in was.temperatures]:
        raise ConfigError(
            f"{str(folder)!r} serves temperatures {list(was.temperatures)}, but temperatures={list(temperatures)}; "
            f"leave out {lacking[0]}, or build a cache with it."
        )
    if logprob_bits > was.logprob_bits:
        raise ConfigError(
            f"{str(folder)!r} stores log-probabilities in {was.logprob_bits} bits, but logprob_bits={logprob_bits}, "
            "which would not bring back the digits; leave --logprob-bits out."
        )
    changes = {"top_k": top_k, "temperatures": tuple(temperatures), "logprob_bits": logprob_bits}
    return dataclasses.replace(was, **{k: v for k, v in changes.items() if v})  # type: ignore[arg-type]


class Narrowed:
    """Rows of a top-k cache with fewer candidates or temperatures, or log-probabilities in fewer bits."""

    def __init__(self, source: Rows, was: CacheManifest, wanted: CacheManifest) -> None:
        """Take the rows, and the manifests that they follow and shall follow."""
        self._source, self._was, self._wanted = source, was, wanted

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self._source.count

    def fields(self, rows: range) -> dict[str, Array]:
        """Return the source's fields, the dropped candidates' probability in the tail."""
        fields, k = self._source.fields(rows), self._wanted.top_k
        if self._was.store != "topk":
            return fields
        places = [self._was.temperatures.index(t) for t in self._wanted.temperatures]
        tail_RTn = fields["tail"]
        if k < self._was.top_k:
            tail_RTn = tail_RTn + self._dropped(fields, k)
        if self._wanted.logprob_bits != self._was.logprob_bits:
            fields = {name: x for name, x in fields.items() if name not in AS_STORED}
        elif "levels" in fields:
            fields["levels"] = fields["levels"][..., : k - 1]
        dtype = self._wanted.fields(1)["topk_logprobs"][1]
        if self._was.tail_draws:
            fields = fields | self._draws(fields, places)
        return {
            **fields,
            "topk_ids": fields["topk_ids"][..., :k],
            "topk_logprobs": fields["topk_logprobs"][..., :k].astype(dtype),
            "tail": tail_RTn[..., places],
        }

    def _draws(self, fields: dict[str, Array], places: list[int]) -> dict[str, Array]:
        """What draws from the tail have of each temperature, of those that are wanted."""
        found = {"tail_entropy": fields["tail_entropy"][..., places]}
        if self._was.weighed:
            columns = [self._was.weighed.index(places[i]) for i in self._wanted.weighed]
            found["draw_ratios"] = fields.pop("draw_ratios")[..., columns]
        return {name: x for name, x in found.items() if x.size}

    def keys(self) -> Array:
        """Return the source's."""
        return self._source.keys()

    def _dropped(self, fields: dict[str, Array], k: int) -> Array:
        """Probability of the candidates from `k` on at each temperature ``[R, T, n]``, as `targets` would have it."""
        dropped = []
        logp_RTK = fields["topk_logprobs"].astype(np.float64)
        for i, temperature in enumerate(self._was.temperatures):
            weights_RTK = np.exp((logp_RTK - logp_RTK[..., :1]) / temperature)
            kept_RT = 1.0 - fields["tail"][..., i].astype(np.float64)
            dropped.append(kept_RT * weights_RTK[..., k:].sum(-1) / weights_RTK.sum(-1))
        return np.stack(dropped, axis=-1).astype(np.float32)


def _caches(folders: Sequence[Path]) -> list[StoredRows]:
    """The different caches that folders hold together, in the order in which they are named."""
    groups: list[tuple[CacheManifest, list[Path]]] = []
    for folder in folders:
        manifest = load_manifest(folder)
        for known, members in groups:
            if not known.differing(manifest):
                members.append(folder)
                break
        else:
            groups.append((manifest, [folder]))
    return [StoredRows(members) for _, members in groups]


def _copied(source: StoredRows, output: Path, part: Part, progress: Progress | None) -> CacheIndex:
    writer = CacheWriter(output, source.manifest, part=part)
    done = len(writer.indices) - len(writer.missing)
    for number in writer.missing:
        path, shard = source.shard(number)
        writer.copy_shard(shard, path)
        done += 1
        if progress is not None:
            progress(done, source.manifest.shard_count)
    return writer.finish()


def _moved(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Progress of one of several results."""
    return None if progress is None else lambda done, _: progress(before + done, total)


def check_apart(folders: Sequence[Path], *outputs: Path) -> None:
    """Raise ConfigError where a result would be written among what it is made from."""
    for output in outputs:
        if output.resolve() in [folder.resolve() for folder in folders]:
            raise ConfigError(f"--output {output} is one of the folders that are read; give another one.")
