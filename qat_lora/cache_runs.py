"""What merging, splitting and converting a cache may be told, beside `qat_lora.config.CacheRun`, which builds one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from qat_lora.errors import ConfigError
from qat_lora.settings import check_choices, check_range, setting

StoredTail = Literal["estimated", "none"]


@dataclass(frozen=True)
class MergeRun:
    """`qat-lora cache merge`: parts of a cache, or several caches of one teacher, as one."""

    command: ClassVar[str] = "cache merge"

    output: Path = setting(Path("caches/merged"), "folder of the merged cache; a half-written one is gone on with")
    rows_per_shard: int = setting(0, "rows per shard file; 0: as in the first folder")

    def __post_init__(self) -> None:
        check_range(self, "rows_per_shard", at_least=0)


@dataclass(frozen=True)
class SplitRun:
    """`qat-lora cache split`: parts to be copied one by one, or two caches."""

    command: ClassVar[str] = "cache split"

    output: Path = setting(
        Path("caches/split"), "where the folders go: part-1-of-N, part-2-of-N, ... or, with --rows, first and rest"
    )
    parts: int = setting(0, "parts of whole shards, which copied into one folder, or merged, are the cache again")
    rows: int = setting(0, "rows of the first of two caches; the other has the rest")

    def __post_init__(self) -> None:
        for name in ("parts", "rows"):
            check_range(self, name, at_least=0)
        if self.parts == 1:
            raise ConfigError("parts=1 is the cache itself; give --parts 2 or more.")


@dataclass(frozen=True)
class ConvertRun:
    """`qat-lora cache convert`: a cache with other settings, or one of the older layout (shard_*.pt, meta.json)."""

    command: ClassVar[str] = "cache convert"

    output: Path = setting(Path("caches/converted"), "folder of the new cache; a half-written one is gone on with")
    teacher: str = setting("", "older layout: the model that it was built from, for the digests that it lacks")
    top_k: int = setting(0, "teacher candidates per position, at most as many as are there; 0 keeps all")
    temperatures: tuple[float, ...] = setting(
        (), "temperatures to serve, of those that are there; older layout: any; none: those that are there, or 1.0"
    )
    logprob_bits: int = setting(
        0, "of a candidate's log-probability, no more than there are; 0: as they are, older layout: 5"
    )
    rows_per_shard: int = setting(0, "rows per shard file; 0: as they are, older layout: about 64 MB")
    tail: StoredTail = setting(
        "estimated",
        "older layout: the probability outside the candidates, estimated from its uniform samples, or none, which "
        "renormalises over the candidates and is biased",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("top_k", "logprob_bits", "rows_per_shard"):
            check_range(self, name, at_least=0)
        if any(not 0 < t < math.inf for t in self.temperatures):
            raise ConfigError(f"temperatures must be positive, but temperatures={self.temperatures}; use 1.0.")


AnyCacheRun = MergeRun | SplitRun | ConvertRun
