"""What a cache holds, said for people: sizes by field, how much of the teacher is kept.

Reads a finished cache or an unfinished one, a few rows of each shard. Whether every byte is the one that was written
is `soundness`'s to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qat_lora.cache.codec import decoded_levels, decoded_logprobs
from qat_lora.cache.format import CacheManifest, ShardRecord, ends_name
from qat_lora.cache.gaps import expected_kl
from qat_lora.cache.parts import load_manifest
from qat_lora.cache.soundness import check_shards
from qat_lora.cache.tensor_file import Array, TensorFile
from qat_lora.errors import CacheError
from qat_lora.remote import Location, location


@dataclass(frozen=True)
class CacheSummary:
    """A cache in numbers.

    Attributes:
        manifest: what it says of itself, of all its parts.
        rows: that are there, of the manifest's. tokens: valid ones in them.
        bytes_on_disk: of the shards that are there.
        bytes_per_token: by tensor, over the valid tokens; `overhead` is headers and padding.
        rows_read: from which the next two come.
        kept_mass: mean probability, at T = 1, of the stored candidates; 1 where nothing is left out on average.
        grid_kl: what the grid of log-probabilities costs on average, in nats per token (see `gaps`); 0 without one.
        entropy: mean of the teacher's in nats; of candidates and the tail as one more, which is a lower bound of it.
    """

    manifest: CacheManifest
    rows: int
    tokens: int
    bytes_on_disk: int
    bytes_per_token: dict[str, float]
    rows_read: int
    kept_mass: float
    entropy: float
    grid_kl: float


def summarise(directory: Location | str, *, max_rows: int = 1024) -> CacheSummary:
    """Read the records of a cache and about `max_rows` of its rows, from every shard; CacheError where that fails."""
    directory = location(directory)
    manifest = load_manifest(directory)
    if not manifest.shards:
        raise CacheError(f"The KD cache {str(directory)!r} has no finished shard yet; run its build command again.")
    check_shards(directory, manifest)
    lengths = np.concatenate(
        [_read(directory, shard, ("lengths",), shard.rows)["lengths"] for shard in manifest.shards]
    )
    tokens, on_disk = int(lengths.sum()), sum(shard.bytes for shard in manifest.shards)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in manifest.tensors(len(lengths)).items()}
    for name in manifest.streams:
        ends = ends_name(name)
        sizes[name] = sum(int(_read(directory, s, (ends,), s.rows)[ends][-1]) for s in manifest.shards)
    per_token = {name: size / tokens for name, size in sizes.items()}
    rows_each = -(-max_rows // len(manifest.shards))
    parts = [_measures(directory, manifest, shard, min(rows_each, shard.rows)) for shard in manifest.shards]
    kept_P, entropy_P, kl_P = (np.concatenate(x) for x in zip(*parts, strict=True))
    return CacheSummary(
        manifest=manifest,
        rows=len(lengths),
        tokens=tokens,
        bytes_on_disk=on_disk,
        bytes_per_token=per_token | {"overhead": on_disk / tokens - sum(per_token.values())},
        rows_read=sum(min(rows_each, shard.rows) for shard in manifest.shards),
        kept_mass=float(kept_P.mean()),
        entropy=float(entropy_P.mean()),
        grid_kl=float(kl_P.mean()),
    )


def _measures(
    directory: Location, manifest: CacheManifest, shard: ShardRecord, rows: int
) -> tuple[Array, Array, Array]:
    """Kept mass, entropy and grid_kl at T = 1, float64 [P] each, of the valid positions of a shard's first rows."""
    names = {"topk": ("tail", "topk_logprobs"), "sampled": ("entropy",), "full": ("logits",)}[manifest.store]
    has_grid = "largest_gap" in manifest.tensors(1)
    tensors = _read(directory, shard, ("lengths", *names, *(("largest_gap",) if has_grid else ())), rows)
    is_token_RT = np.arange(manifest.seq_len) < tensors["lengths"][:, None]
    tail_P = kl_P = np.zeros(is_token_RT.sum())
    if manifest.store == "sampled":
        return 1.0 - tail_P, tensors["entropy"][is_token_RT][:, 0].astype(np.float64), kl_P
    if manifest.store == "full":
        z_PV = tensors["logits"][is_token_RT].astype(np.float64)
        logp_PK = z_PV - np.logaddexp.reduce(z_PV, axis=-1, keepdims=True)
    else:
        logp_RTK = decoded_logprobs(manifest, tensors).astype(np.float64)
        logp_PK, tail_P = logp_RTK[is_token_RT], tensors["tail"][is_token_RT][:, 0].astype(np.float64)
        if has_grid:
            codes, bits = decoded_levels(manifest, tensors), manifest.logprob_bits
            kl_P = expected_kl(codes, tensors["largest_gap"], bits, logp_RTK)[is_token_RT]
    return 1.0 - tail_P, -(np.exp(logp_PK) * logp_PK).sum(-1) - _x_log_x(tail_P), kl_P


def _read(directory: Location, shard: ShardRecord, names: tuple[str, ...], rows: int) -> dict[str, Array]:
    """The first rows of a shard's fields."""
    path = directory / shard.file
    try:
        with TensorFile(path) as file:
            return {name: file.rows(name, 0, rows) for name in names}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CacheError(
            f"{str(path)!r} cannot be read ({error}); restore the file, or delete it and run the build command again."
        ) from None


def _x_log_x(x: Array) -> Array:
    return np.where(x > 0, x * np.log(np.maximum(x, np.finfo(np.float64).tiny)), 0.0)
