"""What a cache holds, said for people: sizes by field, how much of the teacher is kept, whether its files are whole.

Reads a finished cache or an unfinished one, a few rows of each shard, or, to verify it, every byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from qat_lora.errors import CacheError
from qat_lora.files import sha256_file
from qat_lora.kd.format import CacheManifest, ShardRecord
from qat_lora.kd.parts import load_manifest
from qat_lora.kd.shards import Array, damaged


@dataclass(frozen=True)
class CacheSummary:
    """A cache in numbers.

    Attributes:
        manifest: what it says of itself, of all its parts.
        rows: that are there, of the manifest's. tokens: valid ones in them.
        bytes_on_disk: of the shards that are there.
        bytes_per_token: by field, over the valid tokens; `overhead` is headers and padding.
        rows_read: from which the next two come.
        kept_mass: mean probability, at T = 1, of the stored candidates.
        entropy: mean of sum -p log p in nats over candidates and the tail as one more: a lower bound of the teacher's.
    """

    manifest: CacheManifest
    rows: int
    tokens: int
    bytes_on_disk: int
    bytes_per_token: dict[str, float]
    rows_read: int
    kept_mass: float
    entropy: float


def summarise(directory: Path | str, *, max_rows: int = 1024) -> CacheSummary:
    """Read the records of a cache and about `max_rows` of its rows, from every shard; CacheError where that fails."""
    directory = Path(directory)
    manifest = load_manifest(directory)
    if not manifest.shards:
        raise CacheError(f"The KD cache {str(directory)!r} has no finished shard yet; run its build command again.")
    lengths = np.concatenate(
        [_read(directory, shard, ("lengths",), shard.rows)["lengths"] for shard in manifest.shards]
    )
    tokens, on_disk = int(lengths.sum()), sum(shard.bytes for shard in manifest.shards)
    fields = {
        name: math.prod(shape) * dtype.itemsize / tokens
        for name, (shape, dtype) in manifest.tensors(len(lengths)).items()
    }
    kept, entropies = [], []
    for tail_P, logprobs_PK in _positions(directory, manifest, -(-max_rows // len(manifest.shards))):
        kept.append(1.0 - tail_P)
        entropies.append(-(np.exp(logprobs_PK) * logprobs_PK).sum(-1) - _x_log_x(tail_P))
    return CacheSummary(
        manifest=manifest,
        rows=len(lengths),
        tokens=tokens,
        bytes_on_disk=on_disk,
        bytes_per_token=fields | {"overhead": on_disk / tokens - sum(fields.values())},
        rows_read=len(kept),
        kept_mass=float(np.concatenate(kept).mean()),
        entropy=float(np.concatenate(entropies).mean()),
    )


def verify(directory: Path | str) -> CacheManifest:
    """Compare the sha256 of every shard with the recorded one; CacheError, naming all that differ."""
    directory = Path(directory)
    manifest = load_manifest(directory)
    wrong = []
    for shard in manifest.shards:
        path = directory / shard.file
        found = sha256_file(path) if path.is_file() else "no file"
        if found != shard.sha256:
            wrong.append(damaged(path, shard.sha256, found))
    if wrong:
        raise CacheError(" ".join(wrong))
    return manifest


def _positions(directory: Path, manifest: CacheManifest, rows_each: int) -> Iterator[tuple[Array, Array]]:
    """The tail [P] and the candidates' log-probabilities [P, K] at T = 1 of each row's valid positions, in float64."""
    for shard in manifest.shards:
        fields = _read(directory, shard, ("lengths", "tail", "topk_logprobs"), min(rows_each, shard.rows))
        for length, tail_Tn, logprobs_TK in zip(
            fields["lengths"], fields["tail"], fields["topk_logprobs"], strict=True
        ):
            yield tail_Tn[:length, 0].astype(np.float64), logprobs_TK[:length].astype(np.float64)


def _read(directory: Path, shard: ShardRecord, names: tuple[str, ...], rows: int) -> dict[str, Array]:
    """The first rows of a shard's fields."""
    path = directory / shard.file
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_slice(name)[:rows] for name in names}
    except (SafetensorError, OSError) as error:
        raise CacheError(
            f"{str(path)!r} cannot be read ({error}); restore the file, or delete it and run the build command again."
        ) from None


def _x_log_x(x: Array) -> Array:
    return np.where(x > 0, x * np.log(np.maximum(x, np.finfo(np.float64).tiny)), 0.0)
