"""The teacher's predictions on disk: built, read, checked, converted. Not what a student is asked to match (`kd`)."""

from qat_lora.cache.build import build_cache, token_arrays
from qat_lora.cache.check import CacheSummary, summarise, verify
from qat_lora.cache.index import CacheIndex, Shard, load_cache, row_keys, source_digest
from qat_lora.cache.manifest import CacheManifest, Part, load_manifest
from qat_lora.cache.operations import convert, merge, split_parts, split_rows
from qat_lora.cache.read import KDCacheDataset
from qat_lora.cache.write import CacheWriter

__all__ = [
    "CacheIndex", "CacheManifest", "CacheSummary", "CacheWriter", "KDCacheDataset", "Part", "Shard", "build_cache",
    "convert", "load_cache", "load_manifest", "merge", "row_keys", "source_digest", "split_parts", "split_rows",
    "summarise", "token_arrays", "verify",
]  # fmt: skip
