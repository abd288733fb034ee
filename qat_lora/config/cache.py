"""What building, merging, splitting and converting a cache may be told: one class per command."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from qat_lora.config import Packing, PlaceConfig, Store
from qat_lora.config.source import SourceConfig
from qat_lora.errors import ConfigError
from qat_lora.settings import Settings, setting
from qat_lora.urls import Location

DeviceMap = Literal["none", "auto"]
QuantizeTeacher = Literal["none", "8bit", "4bit"]
LOGPROB_BITS = (4, 5, 6, 7, 8, 16, 32)
MOST_SAMPLES = 1024  # of which 256 positions at once take half a gigabyte
STORE_OF = {"top_k": "topk", "logprob_bits": "topk", "tail_draws": "topk", "samples": "sampled"}


@dataclass(frozen=True)
class CacheRun(Settings):
    """`qat-lora cache`: the teacher's predictions on a text, written once."""

    command: ClassVar[str] = "cache"

    teacher: str = setting("embedded", "directory or hub id of the teacher; 'embedded' is the one in the package")
    device_map: DeviceMap = setting(
        "none", "auto: spread a teacher that one device cannot hold over all devices, the host's memory and the disk"
    )
    max_memory: tuple[str, ...] = setting((), "bounds of --device-map, as 0=20GiB,cpu=64GiB; default: what is free")
    quantize_teacher: QuantizeTeacher = setting(
        "none", "quantise the teacher's Linears on loading, by bitsandbytes; another teacher as far as a cache goes"
    )
    data: str = setting(
        "",
        ".txt or .jsonl; token ids in .pt, .npy or .safetensors; a folder or glob of one kind; "
        "hf:dataset[:config][:split]; embedded:train|eval; default, for the embedded teacher alone: embedded:train",
    )
    output: Location = setting(Path("caches/embedded"), "folder or URL of the new cache; a half-built one is resumed")
    seq_len: int = setting(128, "tokens per row", at_least=2)
    packing: Packing = setting(
        "stream", "texts end to end; the same, but attention begins anew with each; or a row for each, padded"
    )
    store: Store = setting("topk", "top-k and the mass of the rest; unbiased draws; or all logits, for tests")
    top_k: int = setting(64, "teacher candidates per position, with --store topk", at_least=1)
    logprob_bits: int = setting(5, "of a candidate's log-probability: 4 to 8 on a grid, 16 or 32 as a float")
    tail_draws: int = setting(
        0, "draws per position from what is no candidate, with --store topk", at_most=MOST_SAMPLES
    )
    samples: int = setting(
        50,
        "draws per position, with --store sampled; about a fourth to a half are distinct",
        at_least=1,
        at_most=MOST_SAMPLES,
    )
    proposal_temperature: float = setting(
        1.0, "at which tokens are drawn; other than 1 takes weights, 0.8 to 1.2 help", above=0
    )
    sampling_seed: int = setting(0, "of the draws", below=2**63)
    temperatures: tuple[float, ...] = setting((1.0,), "temperatures that the cache can serve")
    max_rows: int = setting(0, "rows at most; 0 takes the whole text")
    eval_fraction: float = setting(
        0.05,
        "share of the documents held out for evaluation while training; 0: none, runs hold out rows by content",
        below=1,
    )
    rows_per_shard: int = setting(0, "rows per shard file; 0: about 64 MB")
    build_batch_size: int = setting(8, "rows per teacher forward", "--batch-size", at_least=1)
    part: str = setting("", "i/n, from 1/n to n/n: build one of n parts, which copied into one folder are the cache")
    source: SourceConfig = SourceConfig()
    place: PlaceConfig = PlaceConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.logprob_bits not in LOGPROB_BITS:
            raise ConfigError(
                f"logprob_bits={self.logprob_bits} is unknown; choose one of {', '.join(map(str, LOGPROB_BITS))}."
            )
        if not self.temperatures or any(not 0 < t < math.inf for t in self.temperatures):
            raise ConfigError(f"temperatures must be positive, but temperatures={self.temperatures}; use 1.0.")
        number, count = self.part_of
        if not 1 <= number <= count:
            raise ConfigError(
                f"part must be i/n with i from 1 to n, but part={self.part!r}; write --part 2/4 for the second of four."
            )
        if self.max_memory and self.device_map == "none":
            raise ConfigError(
                f"max_memory={','.join(self.max_memory)} bounds what --device-map takes, but device_map=none; add "
                "--device-map auto."
            )

    def check_store(self) -> None:
        """Raise ConfigError where something is set that is another store's."""
        for name, store in STORE_OF.items():
            if store != self.store and (value := getattr(self, name)) != getattr(CacheRun, name):
                raise ConfigError(
                    f"{name}={value} is of --store {store}, but store={self.store!r}; leave out "
                    f"--{name.replace('_', '-')} or give --store {store}."
                )
        for name in () if self.store == "sampled" or self.tail_draws else ("proposal_temperature", "sampling_seed"):
            if (value := getattr(self, name)) != getattr(CacheRun, name):
                raise ConfigError(
                    f"{name}={value} is of draws, but there are none; leave out --{name.replace('_', '-')} or give "
                    "--store sampled or --tail-draws."
                )

    @property
    def part_of(self) -> tuple[int, int]:
        """Which part, from 1 on, of how many; (1, 1) is the whole cache, (0, 0) what cannot be read as a part."""
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", self.part or "1/1")
        return (int(match[1]), int(match[2])) if match else (0, 0)


@dataclass(frozen=True)
class MergeRun(Settings):
    """`qat-lora cache merge`: parts of a cache, or several caches of one teacher, as one."""

    command: ClassVar[str] = "cache merge"

    output: Path = setting(Path("caches/merged"), "folder of the merged cache; a half-written one is continued")
    rows_per_shard: int = setting(0, "rows per shard file; 0: as in the first folder")


@dataclass(frozen=True)
class SplitRun(Settings):
    """`qat-lora cache split`: parts to be copied one by one, or two caches."""

    command: ClassVar[str] = "cache split"

    output: Path = setting(
        Path("caches/split"), "where the folders go: part-1-of-N, part-2-of-N, ... or, with --rows, first and rest"
    )
    parts: int = setting(0, "parts of whole shards, which copied into one folder, or merged, are the cache again")
    rows: int = setting(0, "rows of the first of two caches; the other has the rest")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts == 1:
            raise ConfigError("parts=1 is the cache itself; give --parts 2 or more.")


@dataclass(frozen=True)
class ConvertRun(Settings):
    """`qat-lora cache convert`: a cache with other settings."""

    command: ClassVar[str] = "cache convert"

    output: Path = setting(Path("caches/converted"), "folder of the new cache; a half-written one is continued")
    top_k: int = setting(0, "teacher candidates per position, at most as many as are there; 0 keeps all")
    temperatures: tuple[float, ...] = setting((), "temperatures to serve, of those that are there; none: all of them")
    logprob_bits: int = setting(0, "of a candidate's log-probability, no more than there are; 0: as they are")
    rows_per_shard: int = setting(0, "rows per shard file; 0: as they are")

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(not 0 < t < math.inf for t in self.temperatures):
            raise ConfigError(f"temperatures must be positive, but temperatures={self.temperatures}; use 1.0.")


AnyCacheRun = CacheRun | MergeRun | SplitRun | ConvertRun
