"""What a cache holds, said for people, and whether every byte is the one that was written."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from qat_lora.cache.index import CacheIndex, check_shard, load_cache
from qat_lora.errors import CacheError
from qat_lora.urls import Location, location


@dataclass(frozen=True)
class CacheSummary:
    """A cache in numbers.

    Attributes:
        index: its manifest and shards.
        tokens: valid ones in the rows that are there.
        bytes_per_token: by tensor, over the valid tokens; `overhead` is headers.
        kept_mass: mean probability, at T = 1, of the stored candidates; 1 where nothing is left out on average.
        entropy: mean of the teacher's in nats; of candidates and the tail as one more, which is a lower bound of it.
        grid_kl: what the grid of log-probabilities costs on average, in nats per token (see `grid`); 0 without one.
    """

    index: CacheIndex
    tokens: int
    bytes_per_token: dict[str, float]
    kept_mass: float
    entropy: float
    grid_kl: float


def summarise(directory: Location | str) -> CacheSummary:
    """Add up what the shards of a cache say of themselves: of a finished one two files are read."""
    index = load_cache(directory)
    if not index.shards:
        raise CacheError(f"The KD cache {str(directory)!r} has no finished shard yet; run its build command again.")
    tokens = max(1, sum(shard.tokens for shard in index.shards))
    sizes: Counter[str] = Counter()
    for shard in index.shards:
        sizes.update(shard.tensor_bytes)
    sizes["overhead"] = index.size_bytes - sum(sizes.values())
    return CacheSummary(
        index=index,
        tokens=tokens,
        bytes_per_token={name: size / tokens for name, size in sizes.items()},
        kept_mass=sum(shard.kept_mass for shard in index.shards) / tokens,
        entropy=sum(shard.entropy for shard in index.shards) / tokens,
        grid_kl=sum(shard.grid_kl for shard in index.shards) / tokens,
    )


def verify(directory: Location | str) -> CacheIndex:
    """Read every byte of a cache, finished or not; CacheError naming all shards that are not what was written."""
    directory = location(directory)
    index = load_cache(directory)
    faults = []
    for shard in index.shards:
        try:
            check_shard(directory / shard.file, shard)
        except CacheError as error:
            faults.append(str(error))
    if faults:
        raise CacheError(" ".join(faults))
    return index
