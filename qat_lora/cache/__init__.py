"""The teacher's predictions on disk: built, read, checked, converted."""

from qat_lora.cache.format import CacheManifest, ShardRecord
from qat_lora.cache.older import convert_older, is_older
from qat_lora.cache.operations import convert, merge, split_parts, split_rows
from qat_lora.cache.parts import Part, load_manifest
from qat_lora.cache.reader import KDCacheDataset
from qat_lora.cache.soundness import verify
from qat_lora.cache.summary import CacheSummary, summarise
from qat_lora.cache.teacher import build_cache, topk_rows
from qat_lora.cache.vocabulary import differ_in_padding
from qat_lora.cache.writer import CacheWriter

__all__ = [
    "CacheManifest",
    "CacheSummary",
    "CacheWriter",
    "KDCacheDataset",
    "Part",
    "ShardRecord",
    "build_cache",
    "convert",
    "convert_older",
    "differ_in_padding",
    "is_older",
    "load_manifest",
    "merge",
    "split_parts",
    "split_rows",
    "summarise",
    "topk_rows",
    "verify",
]
