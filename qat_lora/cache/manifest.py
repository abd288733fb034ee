"""What a KD cache is: the manifest, which is written first and never changes, and what a shard of it holds.

Owns the schema: names, shapes and dtypes of fields and tensors. Does not own how fields become tensors (`codec`), what
a shard says of itself (`index`) or when files are written (`build`). `docs/kd_cache.md` describes it all for people.

Legend: R rows of a shard, T positions of a row, V vocabulary, K candidates, N draws, n temperatures.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from qat_lora.cache.remote import Place, location, read_at_most
from qat_lora.config import Packing, Store
from qat_lora.errors import CacheError, CacheMismatch, ConfigError
from qat_lora.files import Location
from qat_lora.kd.targets import TargetSpec
from qat_lora.settings import check_types

SCHEMA = "qat_lora.kd_cache/4"
MANIFEST_NAME = "manifest.json"
SHARD_BYTES = 64 * 2**20  # small enough to hold twice while writing, large enough that a build has few files
MOST_SHARD_ROWS = 2**16  # a shard's header names every row
GRID_BITS = (4, 5, 6, 7, 8)  # of a log-probability; more are a float's own
_NO_IDENTITY = ("teacher", "source", "tokenizer_size")  # names, and what follows from the tokenizer's digest
_MOST = {
    "vocab_size": 2**31,
    "seq_len": 2**24,
    "rows": 2**40,
    "samples": 2**16,
    "tail_draws": 2**16,
    "rows_per_shard": MOST_SHARD_ROWS,
    "tokenizer_size": 2**31,
    "sampling_seed": 2**63 - 1,
}

Normalizer = Literal["exact", "estimated", "candidates"]
Array: TypeAlias = "np.ndarray[Any, Any]"
Arrays: TypeAlias = Mapping[str, Array]
Specs: TypeAlias = dict[str, tuple[tuple[int, ...], "np.dtype[Any]"]]

# What concerns one store only: which, and what stands in its place elsewhere.
_OF_STORE = {
    "top_k": ("topk", 0),
    "logprob_bits": ("topk", 0),
    "tail_draws": ("topk", 0),
    "samples": ("sampled", 0),
}


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


@dataclass(frozen=True, kw_only=True)
class CacheManifest:
    """All that is needed to know whether a cache fits a run: its identity.

    Attributes:
        teacher: the name it was asked for by; the digest decides.
        teacher_digest: digest of the teacher's weights, with ":8bit" or ":4bit" behind it where they were quantised.
        tokenizer_digest: digest of the tokenizer.
        vocab_size: V, the width of the teacher's logits.
        teacher_dtype: in which the teacher computed, such as float32; empty where that is not known.
        tokenizer_size: the tokenizer's greatest id + 1; ids from there up to V are padding. 0 where it is not known.
        seq_len: T, tokens per row.
        rows: rows of the finished cache.
        source: the text source as it was named; the digest decides.
        source_digest: digest of all token rows (`index.source_digest`).
        eval_fraction: about which share of the documents is held out, each row tagged; 0: no row has a tag.
        bos: the ids before every document; None where that is not known: rows of ids as they were, converted caches.
        answers: whether each token has a bit that says if it belongs to an answer of a chat.
        store: what is stored of a distribution: its K most probable tokens and the mass of the rest; N draws from it;
            or all logits, which only tests can afford.
        temperatures: that the cache serves; 1.0 always comes first.
        top_k: K, candidates per token; 0 where none are stored.
        logprob_bits: of a candidate's log-probability: 4 to 8 on a grid (see `gaps`), 16 or 32 as a float.
        tail_draws: draws per token from what is no candidate, beside candidates; 0 where none are stored.
        samples: N, draws per token; 0 where none are stored.
        proposal_temperature: at which tokens are drawn.
        sampling_seed: of the draws.
        rows_per_shard: rows of each shard, the last may hold fewer; 0 asks for what fits SHARD_BYTES.
        normalizer: how the log-sum-exp over the vocabulary is known: ``exact``; ``estimated`` from uniform samples;
            ``candidates``: it is that of the candidates alone (the last two of converted caches).
        packing: how documents lie in the rows; with ``documents``, where they begin is stored too.
        schema: the format itself.
    """

    teacher: str
    teacher_digest: str
    tokenizer_digest: str
    vocab_size: int
    seq_len: int
    rows: int
    source: str
    source_digest: str
    eval_fraction: float = 0.0
    bos: tuple[int, ...] | None = None
    answers: bool = False
    store: Store = "topk"
    temperatures: tuple[float, ...] = (1.0,)
    top_k: int = 0
    logprob_bits: int = 5
    tail_draws: int = 0
    samples: int = 0
    proposal_temperature: float = 1.0
    sampling_seed: int = 0
    rows_per_shard: int = 0
    normalizer: Normalizer = "exact"
    packing: Packing = "stream"
    tokenizer_size: int = 0
    teacher_dtype: str = ""
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        """Check the sizes and fill in what follows from them."""
        for name in ("temperatures", "bos"):
            if isinstance(value := getattr(self, name), list):  # as JSON has it
                object.__setattr__(self, name, tuple(value))
        check_types(self)
        object.__setattr__(self, "temperatures", _with_one_first(self.temperatures))
        for name, (store, default) in _OF_STORE.items():
            if self.store != store:
                object.__setattr__(self, name, default)
        if not self.draws:
            object.__setattr__(self, "proposal_temperature", 1.0)
            object.__setattr__(self, "sampling_seed", 0)
        size = {"topk": ("top_k",), "sampled": ("samples",), "full": ()}[self.store]
        for name in ("vocab_size", "seq_len", "rows", *size):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"A KD cache needs a positive {name}, but {name}={value}; set it to 1 or more.")
        for name, most in _MOST.items():
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range; a KD cache may have {most}.")
        if self.top_k > self.vocab_size:
            raise ConfigError(
                f"top_k={self.top_k} exceeds the vocabulary of {self.vocab_size} tokens of teacher "
                f"{self.teacher!r}; set top_k to at most {self.vocab_size}."
            )
        if self.tail_draws and self.top_k == self.vocab_size:
            raise ConfigError(
                f"tail_draws={self.tail_draws} needs tokens that are no candidates, but top_k={self.top_k} is the "
                "whole vocabulary; set tail_draws to 0 or choose a smaller top_k."
            )
        if self.store == "topk" and self.logprob_bits not in (*GRID_BITS, 16, 32):
            raise ConfigError(
                f"logprob_bits={self.logprob_bits!r} is unknown; choose {GRID_BITS[0]} to {GRID_BITS[-1]}, 16 or 32."
            )
        if self.proposal_temperature <= 0:
            raise ConfigError(
                f"proposal_temperature must be above 0, but it is {self.proposal_temperature}; use 0.8 to 1.2."
            )
        if any(not 0 <= i < self.vocab_size for i in self.bos or ()):
            raise ConfigError(f"bos={self.bos} is not ids below {self.vocab_size}; give the tokenizer's own.")
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"eval_fraction must lie in [0, 1), but it is {self.eval_fraction}; use 0.05.")
        if self.rows_per_shard < 1:
            rows = min(max(1, SHARD_BYTES // self.bytes_per_row), MOST_SHARD_ROWS)
            object.__setattr__(self, "rows_per_shard", rows)

    @property
    def teacher_weights(self) -> str:
        """Digest of the weights that the teacher has on disk."""
        return self.teacher_digest.partition(":")[0]

    @property
    def teacher_quantization(self) -> str:
        """How the teacher's weights were quantised on loading, such as 8bit; empty where they were not."""
        return self.teacher_digest.partition(":")[2]

    @property
    def bytes_per_row(self) -> int:
        """Bytes that one row takes on disk; of what varies from row to row, most that it may take."""
        fixed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors(1).values())
        return fixed + self.seq_len * self.draws * (self.id_bits + 8 * len(self.weighed)) // 8

    @property
    def shard_count(self) -> int:
        """Shards of the finished cache."""
        return -(-self.rows // self.rows_per_shard)

    def shard_rows(self, index: int) -> range:
        """Rows of the cache that shard `index` holds."""
        return range(index * self.rows_per_shard, min((index + 1) * self.rows_per_shard, self.rows))

    def identity(self) -> dict[str, Any]:
        """Return the fields that decide what the rows hold: equal identity, equal cache."""
        return {k: v for k, v in self.to_json().items() if k not in _NO_IDENTITY}

    @property
    def digest(self) -> str:
        """The sha256 of the identity, which every shard and the index carry."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    def differing(self, other: CacheManifest) -> dict[str, tuple[Any, Any]]:
        """Return the fields of the identity that differ, each with this value and the other's."""
        ours, theirs = self.identity(), other.identity()
        return {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}

    @property
    def id_bits(self) -> int:
        """Bits of a stored id, as many as the vocabulary needs: ceil(log2 V)."""
        return max(1, (self.vocab_size - 1).bit_length())

    @property
    def contents(self) -> str:
        """What is stored of a distribution, in two words."""
        beside = f" and {self.tail_draws} draws of the tail" if self.tail_draws else ""
        found = {"topk": f"top {self.top_k}{beside}", "sampled": f"{self.samples} draws", "full": "all logits"}
        return found[self.store]

    @property
    def target_spec(self) -> TargetSpec:
        """What the losses have to know of the rows."""
        return TargetSpec(
            self.store, self.vocab_size, self.temperatures, self.top_k, self.samples, self.weighed, self.tail_draws
        )

    @property
    def draws(self) -> int:
        """Draws per token, from the whole vocabulary or from the tail; 0 where none are stored."""
        return self.samples or self.tail_draws

    @property
    def weighed(self) -> tuple[int, ...]:
        """Which of the temperatures the draws serve by weights: those that are not the proposal's."""
        if not self.draws:
            return ()
        return tuple(i for i, t in enumerate(self.temperatures) if t != self.proposal_temperature)

    @property
    def streams(self) -> tuple[str, ...]:
        """Tensors uint8 [bytes of all rows] of a shard; the ends of its rows are int64 [R] under `ends_name`."""
        return () if not self.draws else ("draw_ids", "draw_ratios") if self.weighed else ("draw_ids",)

    def tensors(self, rows: int) -> Specs:
        """Name -> (shape, dtype) of the tensors of a shard of so many rows, but for its `streams`: encoded fields."""
        found, t, k = self.fields(rows), self.seq_len, self.top_k
        for name in found.keys() & {"starts", "answer"}:
            found[name] = _packed(rows, t)
        if "held_out" in found:
            found["held_out"] = ((rows,), np.dtype(np.uint8))
        if self.store == "topk":
            found["topk_ids"] = _packed(rows, t * k * self.id_bits)
            if self.logprob_bits in GRID_BITS:
                found["topk_logprobs"] = _packed(rows, t * (k - 1) * self.logprob_bits)
                found["largest_gap"] = ((rows, t), np.dtype(np.float16))
        if self.draws:
            found["draw_runs"] = _packed(rows, t * self.draws)
            found |= {ends_name(name): ((rows,), np.dtype(np.int64)) for name in self.streams}
        return {name: spec for name, spec in found.items() if name not in self.streams}

    def token_fields(self, rows: int) -> Specs:
        """Name -> (shape, dtype) of what is known of so many rows before the teacher has read them."""
        t = self.seq_len
        found: Specs = {"input_ids": ((rows, t), np.dtype(np.int32)), "lengths": ((rows,), np.dtype(np.int32))}
        if self.packing == "documents":
            found["starts"] = ((rows, t), np.dtype(np.bool_))
        if self.eval_fraction:
            found["held_out"] = ((rows,), np.dtype(np.bool_))
        if self.answers:
            found["answer"] = ((rows, t), np.dtype(np.bool_))
        return found

    def fields(self, rows: int) -> Specs:
        """Name -> (shape, dtype) of what so many rows hold, as it is built and read."""
        t, n = self.seq_len, len(self.temperatures)
        found = self.token_fields(rows)
        if self.store == "topk":
            found["topk_ids"] = ((rows, t, self.top_k), np.dtype(np.int64))
            found["topk_logprobs"] = ((rows, t, self.top_k), np.dtype("f2" if self.logprob_bits == 16 else "f4"))
            found["tail"] = ((rows, t, n), np.dtype(np.float32))
        if self.draws:
            found["draw_ids"] = ((rows, t, self.draws), np.dtype(np.int64))
            if self.weighed:
                found["draw_ratios"] = ((rows, t, self.draws, len(self.weighed)), np.dtype(np.uint8))
            found["entropy" if self.store == "sampled" else "tail_entropy"] = ((rows, t, n), np.dtype(np.float16))
        if self.store == "full":
            found["logits"] = ((rows, t, self.vocab_size), np.dtype(np.float32))
        return found

    def to_json(self) -> dict[str, Any]:
        """The plain form, as it stands in manifest.json, less the digest of that file."""
        return {**dataclasses.asdict(self), "temperatures": list(self.temperatures)}

    @classmethod
    def read(cls, path: Place) -> CacheManifest:
        """Read the file; CacheError where it cannot be read or understood, FileNotFoundError where there is none."""
        data = read_sealed(path, SCHEMA, 2**26)
        try:
            return cls(**data)
        except (TypeError, ValueError) as error:
            raise CacheError(f"{str(path)!r} is damaged ({error}); {_RESTORE}.") from error


_RESTORE = "restore the file or build the cache again"


def load_manifest(directory: Location | str) -> CacheManifest:
    """Return the manifest of a folder or URL; CacheError where there is none, or none that can be understood."""
    directory = location(directory)
    try:
        return CacheManifest.read(directory / MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError):
        fix = "check the path or build one with scripts/build_kd_cache.py --output"
        if any(directory.glob("shard_*.pt")):
            fix = "it is one of the older layout: make one of today of it with scripts/convert_older_cache.py"
        raise CacheError(f"No {MANIFEST_NAME} in {str(directory)!r}, so it is no KD cache; {fix}.") from None


def sealed(tree: Mapping[str, Any]) -> bytes:
    """The content of a record file: the JSON of a tree, and last in it the sha256 of all that less these 64 digits.

    A function of the tree, so a file that says the same in other bytes is not this one either.
    """

    def content(digest: str) -> bytes:
        text = json.dumps({**tree, "digest": digest}, indent=2, ensure_ascii=False) + "\n"
        return text.encode("utf-8", "surrogatepass")

    return content(hashlib.sha256(content("")).hexdigest())


def read_sealed(path: Place, schema: str, most_bytes: int) -> dict[str, Any]:
    """Read what `sealed` made; CacheError where it is not that, FileNotFoundError where there is no file.

    Of a larger file nothing stays in memory.
    """
    try:
        content = read_at_most(path, most_bytes)
        data = json.loads(content.decode("utf-8", "surrogatepass"))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CacheError(f"Cannot read {str(path)!r} ({error}); {_RESTORE}.") from error
    found = data.get("schema") if isinstance(data, dict) else None
    if found != schema:
        raise CacheMismatch(
            f"{str(path)!r} has schema {found!r}, but this version reads {schema!r}; build the cache again."
        )
    data.pop("digest", None)
    if sealed(data) != content:
        raise CacheError(
            f"{str(path)!r} is damaged: its digest is not that of its content (a byte was changed, or it was "
            f"edited by hand); {_RESTORE}."
        )
    return data


def checked_digest(value: Any) -> str:
    """Return a sha256 in hex; ValueError for anything else, which must not become part of a path."""
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError(f"{value!r} is no sha256")
    return value


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"shard-{index:05d}.safetensors"


def ends_name(stream: str) -> str:
    """The tensor beside a stream that says where each row's bytes end."""
    return f"{stream}_ends"


def _packed(rows: int, bits_per_row: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    return (rows, -(-bits_per_row // 8)), np.dtype(np.uint8)


def _with_one_first(temperatures: tuple[float, ...]) -> tuple[float, ...]:
    values = tuple(float(t) for t in temperatures)
    if any(t <= 0 for t in values):
        raise ConfigError(f"Temperatures must be above 0, but temperatures={list(values)}; use 1.0 or more.")
    return (1.0, *dict.fromkeys(t for t in values if t != 1.0))
