"""Finished caches into other ones: merged, split, and with other settings.

Owns what may be put together, and what the new manifest says. A `CacheWriter` writes, so each of these acts can be
killed and continued by the same call, and its files are the same as if it had not been. Each shard that is read is read
whole and its sha256 compared, so that no damage is taken into a cache with digests of its own. One shard of the source
and one of the result are in memory.

Legend: R rows, T positions, K candidates, n temperatures.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from qat_lora.cache.bits import Array
from qat_lora.cache.build import Progress
from qat_lora.cache.codec import AS_STORED, decoded, rows_of
from qat_lora.cache.index import CacheIndex, Shard, check_shard, load_cache, source_digest
from qat_lora.cache.manifest import WHOLE, CacheManifest, Part, load_manifest
from qat_lora.cache.write import CacheWriter
from qat_lora.errors import CacheError, CacheMismatch, ConfigError

Fields = Callable[[range], dict[str, Array]]  # some rows -> all that a cache holds of them, [len(rows), ...] each
_Act = tuple[CacheWriter, Callable[[int], None]]  # a folder that becomes a cache, and how a shard of it is written

_OF_THE_ROWS = ("rows", "rows_per_shard", "source_digest")  # what may differ between caches that are merged


def merge(
    folders: Sequence[Path], output: Path, *, rows_per_shard: int = 0, progress: Progress | None = None
) -> CacheIndex:
    """Put caches together: folders of one cache (its parts) are united, different caches are laid end to end.

    Parts of one cache give the files that one build leaves, byte for byte. Rows of several caches must be of one
    teacher, tokenizer and length, and stored alike; they come in the order of the folders, with a source_digest of
    their own.

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
    if len(sources) == 1 and rows_per_shard in (0, first.rows_per_shard):
        return _write_all([_copied(output, sources[0])], progress)[0]
    keys = np.concatenate([source.keys() for source in sources])
    manifest = dataclasses.replace(
        first,
        rows=len(keys),
        rows_per_shard=rows_per_shard or first.rows_per_shard,
        source=" + ".join(dict.fromkeys(source.manifest.source for source in sources)),
        source_digest=source_digest(keys, first.seq_len),
    )

    def fields(rows: range) -> dict[str, Array]:
        pieces, start = [], 0
        for source in sources:
            own = range(max(rows.start - start, 0), min(rows.stop - start, source.manifest.rows))
            pieces += [source.fields(own)] if own else []
            start += source.manifest.rows
        return joined(pieces)

    return rewrite(fields, manifest, output, progress)


def split_parts(
    folder: Path, output: Path, count: int, *, progress: Progress | None = None
) -> list[tuple[Path, CacheIndex]]:
    """Copy a cache into `count` folders, each with a part of it: whole shards, every `count`-th."""
    source = StoredRows([folder])
    folders = [output / f"part-{number}-of-{count}" for number in range(1, count + 1)]
    check_apart([folder], *folders)
    acts = [_copied(part_folder, source, Part(number, count)) for number, part_folder in enumerate(folders, 1)]
    return list(zip(folders, _write_all(acts, progress), strict=True))


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
    folders = [output / "first", output / "rest"]
    check_apart([folder], *folders)
    acts = []
    for chosen, side in zip((range(rows), range(rows, was.rows)), folders, strict=True):
        manifest = dataclasses.replace(
            was,
            rows=len(chosen),
            source=f"{was.source} (rows {chosen.start + 1:,} to {chosen.stop:,} of {was.rows:,})",
            source_digest=source_digest(source.keys()[chosen.start : chosen.stop], was.seq_len),
        )
        acts.append(_from_fields(side, manifest, functools.partial(source.fields, start=chosen.start)))
    return list(zip(folders, _write_all(acts, progress), strict=True))


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
    wanted = narrower(was, folder, top_k=top_k, temperatures=temperatures, logprob_bits=logprob_bits)
    wanted = dataclasses.replace(wanted, rows_per_shard=rows_per_shard or was.rows_per_shard)
    return rewrite(lambda rows: narrowed(source.fields(rows), was, wanted), wanted, output, progress)


def rewrite(fields: Fields, manifest: CacheManifest, output: Path, progress: Progress | None = None) -> CacheIndex:
    """Write, or continue writing, the cache of a manifest with these rows; return what is there in the end."""
    return _write_all([_from_fields(output, manifest, fields)], progress)[0]


def narrower(
    was: CacheManifest, folder: Path, *, top_k: int = 0, temperatures: Sequence[float] = (), logprob_bits: int = 0
) -> CacheManifest:
    """Return the manifest of a cache with less; ConfigError where more is asked for than is there."""
    changes = {"top_k": top_k, "temperatures": tuple(temperatures), "logprob_bits": logprob_bits}
    changes = {name: value for name, value in changes.items() if value}
    lacking = ", ".join(str(t) for t in temperatures if t not in was.temperatures)
    refused = (
        (was.store != "topk" and changes, f"has store={was.store!r}, of which top_k, temperatures and logprob_bits "
         "cannot be changed; leave these out, or build a cache with them"),
        (was.tail_draws and top_k not in (0, was.top_k), f"has {was.tail_draws} draws from all but its {was.top_k} "
         f"candidates, which say nothing of candidates left out, but top_k={top_k}; leave --top-k out, or build a "
         f"cache with --top-k {top_k}"),
        (top_k > was.top_k, f"stores {was.top_k} candidates, but top_k={top_k}; set --top-k to at most {was.top_k}"),
        (lacking, f"serves temperatures {list(was.temperatures)}, but temperatures={list(temperatures)}; leave out "
         f"{lacking}, or build a cache with it"),
        (logprob_bits > was.logprob_bits, f"stores log-probabilities in {was.logprob_bits} bits, but logprob_bits="
         f"{logprob_bits}, which would not bring back the digits; leave --logprob-bits out"),
    )  # fmt: skip
    for is_wrong, why in refused:
        if is_wrong:
            raise ConfigError(f"{str(folder)!r} {why}.")
    return dataclasses.replace(was, **changes)  # type: ignore[arg-type]


def narrowed(fields: dict[str, Array], was: CacheManifest, wanted: CacheManifest) -> dict[str, Array]:
    """Fields of some rows with fewer candidates, whose probability joins the tail, temperatures or bits."""
    if was.store != "topk":
        return fields
    k, places = wanted.top_k, [was.temperatures.index(t) for t in wanted.temperatures]
    dtype = wanted.fields(1)["topk_logprobs"][1]
    found = fields | {
        "topk_ids": fields["topk_ids"][..., :k],
        "topk_logprobs": fields["topk_logprobs"][..., :k].astype(dtype),
        "tail": (fields["tail"] + _dropped(fields, was, k) if k < was.top_k else fields["tail"])[..., places],
    }
    if wanted.logprob_bits != was.logprob_bits:
        found = {name: x for name, x in found.items() if name not in AS_STORED}
    elif "levels" in found:
        found["levels"] = fields["levels"][..., : k - 1]
    if was.tail_draws:
        found["tail_entropy"] = fields["tail_entropy"][..., places]
    if was.weighed:
        ratios = found.pop("draw_ratios")[..., [was.weighed.index(places[i]) for i in wanted.weighed]]
        found |= {"draw_ratios": ratios} if wanted.weighed else {}
    return found


def _dropped(fields: dict[str, Array], was: CacheManifest, k: int) -> Array:
    """Probability of the candidates from `k` on at each temperature [R, T, n], as `kd.targets` would have it."""
    logp_RTK, dropped = fields["topk_logprobs"].astype(np.float64), []
    for i, temperature in enumerate(was.temperatures):
        weights_RTK = np.exp((logp_RTK - logp_RTK[..., :1]) / temperature)
        kept_RT = 1.0 - fields["tail"][..., i].astype(np.float64)
        dropped.append(kept_RT * weights_RTK[..., k:].sum(-1) / weights_RTK.sum(-1))
    return np.stack(dropped, axis=-1).astype(np.float32)


class StoredRows:
    """The rows of a finished cache, its shards in one folder, or those of its parts in several.

    Attributes:
        shards: by index, each with where it lies.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        """Read the headers of all folders, which must be of one cache and together complete."""
        self.folders, self.manifest = tuple(folders), load_manifest(folders[0])
        self.shards: dict[int, tuple[Shard, Path]] = {}
        for folder in folders:
            for shard in load_cache(folder).shards:
                self.shards.setdefault(shard.index, (shard, folder / shard.file))
        if len(self.shards) < self.manifest.shard_count:
            raise CacheError(
                f"{', '.join(map(str, folders))}: {len(self.shards)} of the {self.manifest.shard_count} shards of one "
                "cache; give the folders of all its parts, or run its build command again, which continues where it "
                "stopped."
            )
        self._last: tuple[int, dict[str, Array]] = (-1, {})

    def fields(self, rows: range, *, start: int = 0) -> dict[str, Array]:
        """Return the fields of rows, a range that is not empty and counts from row `start`, whatever their shards."""
        first, stop, each, pieces = start + rows.start, start + rows.stop, self.manifest.rows_per_shard, []
        for index in range(first // each, -(-stop // each)):
            if self._last[0] != index:
                self._last = (-1, {})  # one shard at a time
                shard, path = self.shards[index]
                check_shard(path, shard)
                self._last = (index, decoded(self.manifest, rows_of(self.manifest, load_file(path), 0, shard.rows)))
            inside = slice(max(0, first - index * each), stop - index * each)
            pieces.append({name: x[inside] for name, x in self._last[1].items()})
        return joined(pieces)

    def keys(self) -> Array:
        """The keys of all rows, uint64 [R] (see `index.row_keys`)."""
        return np.concatenate([self.shards[number][0].key_array() for number in range(self.manifest.shard_count)])


def joined(pieces: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Fields one after the other; a copy only where there are several pieces."""
    if len(pieces) == 1:
        return dict(pieces[0])
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _from_fields(output: Path, manifest: CacheManifest, fields: Fields) -> _Act:
    writer = CacheWriter(output, manifest)
    return writer, lambda number: writer.write_shard(number, fields(manifest.shard_rows(number)))


def _copied(output: Path, source: StoredRows, part: Part = WHOLE) -> _Act:
    writer = CacheWriter(output, source.manifest, part=part)
    return writer, lambda number: writer.copy_shard(*source.shards[number])


def _write_all(acts: Sequence[_Act], progress: Progress | None) -> list[CacheIndex]:
    """Write what each folder lacks; `progress` counts the shards of all."""
    total = sum(len(writer.indices) for writer, _ in acts)
    done = total - sum(len(writer.missing) for writer, _ in acts)
    found = []
    for writer, write in acts:
        for number in writer.missing:
            write(number)
            done += 1
            if progress is not None:
                progress(done, total)
        found.append(writer.finish())
    return found


def _caches(folders: Sequence[Path]) -> list[StoredRows]:
    """The different caches that folders hold together, in the order in which they are named."""
    groups: dict[str, list[Path]] = {}
    for folder in folders:
        groups.setdefault(load_manifest(folder).digest, []).append(folder)
    return [StoredRows(members) for members in groups.values()]


def check_apart(folders: Sequence[Path], *outputs: Path) -> None:
    """Raise ConfigError where a result would be written among what it is made from."""
    for output in outputs:
        if output.resolve() in [folder.resolve() for folder in folders]:
            raise ConfigError(f"--output {output} is one of the folders that are read; give another one.")
