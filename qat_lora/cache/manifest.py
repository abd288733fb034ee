"""What a KD cache is: the manifest, which is written first and never changes, and what a shard of it holds.

Owns the schema: names, shapes and dtypes of fields and tensors. Does not own how fields become tensors (`codec`), what
a shard says of itself (`index`) or when files are written (`build`). `docs/kd_cache.md` describes it all for people.

Legend: R rows of a shard, T positions of a row, V vocabulary, K candidates, N draws, n temperatures.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from qat_lora.cache.bits import Array
from qat_lora.config import Packing, Store
from qat_lora.config.cache import LOGPROB_BITS, STORE_OF
from qat_lora.errors import CacheError, CacheMismatch, ConfigError
from qat_lora.kd.targets import TargetSpec
from qat_lora.settings import check_types
from qat_lora.urls import Location, location, read_at_most

SCHEMA = "qat_lora.kd_cache/4"
MANIFEST_NAME = "manifest.json"
SHARD_BYTES = 64 * 2**20  # small enough to hold twice while writing, large enough that a build has few files
MOST_SHARD_ROWS = 2**16  # a shard's header names every row
TOKEN_FIELDS = ("input_ids", "lengths", "starts", "answer", "held_out")  # known before the teacher has read the rows
_NO_IDENTITY = ("teacher", "source", "tokenizer_size")  # names, and what follows from the tokenizer's digest
_RESTORE = "restore the file or build the cache again"

Normalizer = Literal["exact", "estimated", "candidates"]
Arrays: TypeAlias = Mapping[str, Array]
Specs: TypeAlias = dict[str, tuple[tuple[int, ...], "np.dtype[Any]"]]


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


class Field(NamedTuple):
    """What rows have of one thing: as it is built and read, and as a shard stores it.

    Each is the shape of a row's and a dtype; integers packed in so many bits have these for a dtype. What is built but
    not stored so is a stream (see `CacheManifest.streams`).
    """

    is_there: Any
    built: tuple[tuple[int, ...], str] | None
    stored: tuple[tuple[int, ...], str | int] | None


def _within(least: int, most: int, **options: Any) -> Any:
    """A field of the manifest whose number lies in a range, both ends in it."""
    return dataclasses.field(metadata={"range": (least, most)}, **options)


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise ConfigError(f"{why}.")


@dataclass(frozen=True, kw_only=True)
class CacheManifest:
    """All that is needed to know whether a cache fits a run: its identity.

    Attributes:
        teacher: the name it was asked for by; the digest decides.
        teacher_digest: digest of the teacher's weights, with ":8bit" or ":4bit" behind it where they were quantised.
        tokenizer_digest: digest of the tokenizer.
        vocab_size: V, the width of the teacher's logits.
        seq_len: T, tokens per row.
        rows: rows of the finished cache.
        source: the text source as it was named; the digest decides.
        source_digest: digest of all token rows (`index.source_digest`).
        eval_fraction: about which share of the documents is held out, each row tagged; 0: no row has a tag.
        bos: the ids before every document; None where that is not known: rows of ids as they were, converted caches.
        answers: whether each token has a bit that says if it belongs to an answer of a chat.
        store: candidates and the mass of the rest; draws; or all logits, which only tests can afford.
        temperatures: that the cache serves; 1.0 always comes first.
        top_k: K, candidates per token. logprob_bits: of a candidate's log-probability, 4 to 8 on a grid, 16 or 32 as a
            float. tail_draws: draws per token from what is no candidate. All 0 in other stores.
        samples: N, draws per token; 0 where none are stored.
        proposal_temperature: at which tokens are drawn. sampling_seed: of the draws.
        rows_per_shard: rows of each shard, the last may hold fewer; 0 asks for what fits SHARD_BYTES.
        normalizer: how the log-sum-exp over the vocabulary is known: ``exact``; ``estimated`` from uniform samples;
            ``candidates``: it is that of the candidates alone (the last two of converted caches).
        packing: how documents lie in the rows; with ``documents``, where they begin is stored too.
        tokenizer_size: the tokenizer's greatest id + 1; ids from there up to V are padding. 0 where it is not known.
        teacher_dtype: in which the teacher computed, such as float32; empty where that is not known.
        schema: the format itself.
    """

    teacher: str
    teacher_digest: str
    tokenizer_digest: str
    vocab_size: int = _within(1, 2**31)
    seq_len: int = _within(1, 2**24)
    rows: int = _within(1, 2**40)
    source: str
    source_digest: str
    eval_fraction: float = 0.0
    bos: tuple[int, ...] | None = None
    answers: bool = False
    store: Store = "topk"
    temperatures: tuple[float, ...] = (1.0,)
    top_k: int = _within(0, 2**31, default=0)
    logprob_bits: int = 5
    tail_draws: int = _within(0, 2**16, default=0)
    samples: int = _within(0, 2**16, default=0)
    proposal_temperature: float = 1.0
    sampling_seed: int = _within(0, 2**63 - 1, default=0)
    rows_per_shard: int = _within(0, MOST_SHARD_ROWS, default=0)
    normalizer: Normalizer = "exact"
    packing: Packing = "stream"
    tokenizer_size: int = _within(0, 2**31, default=0)
    teacher_dtype: str = ""
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        """Check the fields and fill in what follows from them."""
        for name in ("temperatures", "bos"):
            if isinstance(value := getattr(self, name), list):  # as JSON has it
                self._set(name, tuple(value))
        check_types(self)
        self._set("temperatures", (1.0, *dict.fromkeys(float(t) for t in self.temperatures if t != 1.0)))
        for name, store in STORE_OF.items():
            if self.store != store:
                self._set(name, 0)
        if not self.draws:
            self._set("proposal_temperature", 1.0)
            self._set("sampling_seed", 0)
        self._check_values()
        if not self.rows_per_shard:
            self._set("rows_per_shard", min(max(1, SHARD_BYTES // self.bytes_per_row), MOST_SHARD_ROWS))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_values(self) -> None:
        of_store = {"topk": "top_k", "sampled": "samples"}.get(self.store)
        for field in dataclasses.fields(self):
            if "range" in field.metadata:
                value, (least, most) = getattr(self, field.name), field.metadata["range"]
                least = 1 if field.name == of_store else least
                _require(least <= value <= most, f"{field.name}={value} is out of range; it may be {least} to {most}")
        v, k, bos = self.vocab_size, self.top_k, self.bos or ()
        _require(k <= v, f"top_k={k} exceeds the vocabulary of {v} tokens; set top_k to at most {v}")
        why = f"tail_draws={self.tail_draws} needs tokens that are no candidates, but top_k={k} is the whole vocabulary"
        _require(k < v or not self.tail_draws, f"{why}; set tail_draws to 0 or choose a smaller top_k")
        is_known = self.store != "topk" or self.logprob_bits in LOGPROB_BITS
        _require(is_known, f"logprob_bits={self.logprob_bits} is unknown; choose one of {LOGPROB_BITS}")
        _require(min(self.temperatures) > 0, f"temperatures={list(self.temperatures)} must be above 0; use 1.0 or more")
        proposal, held_out = self.proposal_temperature, self.eval_fraction
        _require(proposal > 0, f"proposal_temperature={proposal} must be above 0; use 0.8 to 1.2")
        _require(0 <= held_out < 1, f"eval_fraction={held_out} must lie in [0, 1); use 0.05")
        _require(all(0 <= i < v for i in bos), f"bos={bos} is not ids below {v}; give the tokenizer's own")

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

    @functools.cached_property
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
    def is_on_grid(self) -> bool:
        """Whether log-probabilities are stored as levels (see `grid`), and not as floats."""
        return self.store == "topk" and self.logprob_bits < 16

    @functools.cached_property
    def table(self) -> dict[str, Field]:
        """What a shard of this cache holds, by name."""
        t, k, n, draws = self.seq_len, self.top_k, len(self.temperatures), self.draws
        topk, masses, entropies = self.store == "topk", ((t, n), "f4"), ((t, n), "f2")
        logprobs = ((t, k), "f2" if self.logprob_bits == 16 else "f4")
        levels = ((t, k - 1), self.logprob_bits)
        logits = ((t, self.vocab_size), "f4")
        every = {
            "input_ids": Field(True, ((t,), "i4"), ((t,), "i4")),
            "lengths": Field(True, ((), "i4"), ((), "i4")),
            "starts": Field(self.packing == "documents", ((t,), "?"), ((t,), 1)),
            "held_out": Field(self.eval_fraction, ((), "?"), ((), "u1")),
            "answer": Field(self.answers, ((t,), "?"), ((t,), 1)),
            "topk_ids": Field(topk, ((t, k), "i8"), ((t, k), self.id_bits)),
            "topk_logprobs": Field(topk, logprobs, levels if self.is_on_grid else logprobs),
            "largest_gap": Field(self.is_on_grid, None, ((t,), "f2")),
            "tail": Field(topk, masses, masses),
            "draw_runs": Field(draws, None, ((t, draws), 1)),
            "draw_ids": Field(draws, ((t, draws), "i8"), None),
            "draw_ids_ends": Field(draws, None, ((), "i8")),
            "draw_ratios": Field(self.weighed, ((t, draws, len(self.weighed)), "u1"), None),
            "draw_ratios_ends": Field(self.weighed, None, ((), "i8")),
            "entropy": Field(self.store == "sampled", entropies, entropies),
            "tail_entropy": Field(self.tail_draws, entropies, entropies),
            "logits": Field(self.store == "full", logits, logits),
        }
        return {name: field for name, field in every.items() if field.is_there}

    @property
    def streams(self) -> tuple[str, ...]:
        """Tensors uint8 [bytes of all rows] of a shard; the ends of its rows are int64 [R] under `ends_name`."""
        return tuple(name for name, field in self.table.items() if field.stored is None)

    def tensors(self, rows: int) -> Specs:
        """Name -> (shape, dtype) of the tensors of a shard of so many rows, but for its `streams`: encoded fields."""
        found: Specs = {}
        for name, (_, _, stored) in self.table.items():
            if stored is not None:
                shape, kind = stored
                if isinstance(kind, int):
                    shape, kind = (-(-math.prod(shape) * kind // 8),), "u1"
                found[name] = (rows, *shape), np.dtype(kind)
        return found

    def fields(self, rows: int) -> Specs:
        """Name -> (shape, dtype) of what so many rows hold, as it is built and read."""
        built = {name: field.built for name, field in self.table.items()}
        return {name: ((rows, *spec[0]), np.dtype(spec[1])) for name, spec in built.items() if spec is not None}

    def to_json(self) -> dict[str, Any]:
        """The plain form, as it stands in manifest.json, less the digest of that file."""
        return {**dataclasses.asdict(self), "temperatures": list(self.temperatures)}

    @classmethod
    def read(cls, path: Location) -> CacheManifest:
        """Read the file; CacheError where it cannot be read or understood, FileNotFoundError where there is none."""
        data = read_sealed(path, SCHEMA, 2**26)
        try:
            return cls(**data)
        except (TypeError, ValueError) as error:
            raise CacheError(f"{str(path)!r} is damaged ({error}); {_RESTORE}.") from error


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


def read_sealed(path: Location, schema: str, most_bytes: int) -> dict[str, Any]:
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
