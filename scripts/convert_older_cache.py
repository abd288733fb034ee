"""Convert a cache of the older layout, `shard_*.pt` of raw logits and `meta.json`, into one that the package reads.

    python scripts/convert_older_cache.py old_cache --teacher Qwen/Qwen3-0.6B --output caches/mine

A shard is a dict of tensors: input_ids and attention_mask ``[N, L]``, topk_idx and topk_logits ``[N, P, K]``, and
maybe rand_idx and rand_logits ``[N, P, m]``, of ids drawn evenly from the vocabulary with replacement. P is L - 1 (the
last position's prediction was dropped) or L. Logits are those of the teacher, before any softmax, mostly in float16.

What it lacks is the log-sum-exp over the vocabulary, without which no logit is a probability. It is estimated from the
samples: with C the candidates, and J the m_J samples that are no candidates,

    Z = sum_{v in C} exp(z_v / T) + (V - K) / m_J * sum_{j in J} exp(z_j / T),    lse_T = log Z

J is drawn evenly from the V - K others, so Z is unbiased; log Z is too low by about Var(Z) / (2 Z^2). Its standard
error is (V - K) s / (sqrt(m_J) Z), with s the standard deviation of exp(z_j / T) over J. Where few large
weights make most of a tail, m samples mostly miss them: then most tails are too small, a few much too large, and s is
too small with the tail. Where all samples are candidates (a tiny vocabulary), the tail is taken as 0.

Legend: N rows, L tokens of a row in the older cache, T positions of a row in the new one, K candidates, m samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qat_lora import models
from qat_lora.cache import CacheIndex, CacheManifest, row_keys, source_digest
from qat_lora.cache.operations import Progress, check_apart, joined, narrowed, narrower, rewrite
from qat_lora.cli.progress import counted
from qat_lora.errors import CacheError, CacheMismatch, ConfigError, QatLoraError
from qat_lora.kd.reduce import LEAST_LOGPROB

ROWS_AT_ONCE = 16  # whose logits become float64, and whose samples are looked up among the candidates

Array = np.ndarray[Any, Any]


def main(argv: list[str] | None = None) -> int:
    """Convert what the command line names; 0, or 2 for a user's mistake."""
    parser = argparse.ArgumentParser("convert_older_cache.py", description="Convert a cache of the older layout.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of the older cache")
    parser.add_argument("--output", type=Path, required=True, help="folder of the new one; half-written, it is resumed")
    parser.add_argument("--teacher", default="", help="the model that it was built from, for the digests that it lacks")
    parser.add_argument("--top-k", type=int, default=0, help="teacher candidates per position [all that are there]")
    parser.add_argument("--temperatures", type=numbers, default=(1.0,), help="to serve, such as 1,2 [1.0]")
    parser.add_argument("--logprob-bits", type=int, default=5, help="of a candidate's log-probability [5]")
    parser.add_argument("--rows-per-shard", type=int, default=0, help="rows per shard file [about 64 MB]")
    parser.add_argument(
        "--tail",
        choices=("estimated", "none"),
        default="estimated",
        help="the probability outside the candidates: estimated from uniform samples, or none, which renormalises over "
        "the candidates and is biased [estimated]",
    )
    args = parser.parse_args(argv)
    try:
        teacher = teacher_fields(args.directory, args.teacher)
        with counted("convert") as progress:
            index = convert_older(
                args.directory,
                args.output,
                **teacher,
                estimate_tail=args.tail == "estimated",
                top_k=args.top_k,
                temperatures=args.temperatures,
                logprob_bits=args.logprob_bits,
                rows_per_shard=args.rows_per_shard,
                progress=progress,
            )
    except QatLoraError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {index.rows} rows of {index.manifest.seq_len} tokens, {index.manifest.source}")
    return 0


def numbers(text: str) -> tuple[float, ...]:
    """The numbers of a list with commas."""
    return tuple(float(number) for number in text.split(","))


def teacher_fields(folder: Path, teacher: str) -> dict[str, Any]:
    """What the older layout does not say of the teacher, from the model itself, as a manifest's fields."""
    if not teacher:
        raise ConfigError(
            f"{folder} does not say which weights and tokenizer it was built with, only "
            f"{read_meta(folder).get('teacher_model')!r}; give --teacher, the folder or hub id of that model, whose "
            "digests are then recorded."
        )
    identity = models.identify(teacher)
    return {
        "teacher": identity.name,
        "teacher_digest": identity.weights,
        "tokenizer_digest": identity.tokenizer,
        "vocab_size": identity.vocab_size,
        "tokenizer_size": identity.tokenizer_size,
    }


def convert_older(
    folder: Path,
    output: Path,
    *,
    vocab_size: int,
    estimate_tail: bool = True,
    top_k: int = 0,
    temperatures: tuple[float, ...] = (1.0,),
    logprob_bits: int = 5,
    rows_per_shard: int = 0,
    progress: Progress | None = None,
    **teacher: Any,
) -> CacheIndex:
    """Store a cache of the older layout as one of today, with the teacher that the caller answers for.

    A row keeps the positions of which there is a prediction: T = L - 1 where the last one was dropped. With
    `estimate_tail` the log-sum-exp is estimated from the samples, else it is that of the candidates alone, which makes
    every candidate too probable. The manifest says which (`normalizer`), its `source` how good the estimate is.
    `teacher` are the manifest's fields of that name, and those of the tokenizer.

    Raises CacheError where a file is missing, damaged or no such shard, CacheMismatch where meta.json names another
    vocabulary, ConfigError where there are no samples to estimate from.
    """
    check_apart([folder], output)
    rows = OlderRows(folder, vocab_size, temperatures, estimate_tail=estimate_tail)
    was = CacheManifest(
        **teacher,
        vocab_size=vocab_size,
        seq_len=rows.seq_len,
        top_k=rows.top_k,
        rows=rows.count,
        source=rows.described(),
        source_digest=source_digest(rows.keys(), rows.seq_len),
        temperatures=rows.temperatures,
        logprob_bits=32,
        normalizer=rows.normalizer,
    )
    wanted = narrower(was, folder, top_k=top_k, logprob_bits=logprob_bits)
    wanted = dataclasses.replace(wanted, rows_per_shard=rows_per_shard)  # 0: what fits a shard, once it is narrow
    return rewrite(lambda some: narrowed(rows.fields(some), was, wanted), wanted, output, progress)


class OlderRows:
    """The rows of a cache of the older layout, as fields of a cache of today; numbers are float32.

    Attributes:
        seq_len: T. top_k: K. samples: m, 0 where there are none.
        temperatures: 1.0 first.
        standard_error: of lse at T = 1, mean over the valid positions; 0 where it is not estimated.
        normalizer: as in a manifest.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        temperatures: tuple[float, ...] = (1.0,),
        *,
        estimate_tail: bool = True,
    ) -> None:
        """Read all shards once: their sizes, and how good the estimate is."""
        self.folder, self.vocab_size = folder, vocab_size
        self.temperatures = (1.0, *(t for t in dict.fromkeys(temperatures) if t != 1.0))
        self.meta = read_meta(folder)
        if (named := self.meta.get("vocab_size")) and named != vocab_size:
            raise CacheMismatch(
                f"{str(folder / 'meta.json')!r} has vocab_size={named}, but the teacher's is {vocab_size}; "
                f"give the --teacher that it was built from (meta.json says {self.meta.get('teacher_model')!r})."
            )
        self._paths, self._counts = shard_paths(folder), list[int]()
        errors, positions = 0.0, 0
        for path in self._paths:
            check_whole(path)
            shard = load(path)
            sizes = sizes_of(path, shard)
            if not self._counts:
                self.seq_len, self.top_k, self.samples = sizes
                self.normalizer = self._normalizer(estimate_tail)
            elif sizes != (self.seq_len, self.top_k, self.samples):
                raise CacheError(
                    f"{str(path)!r} has {sizes} positions, candidates and samples, {str(self._paths[0])!r} has "
                    f"{(self.seq_len, self.top_k, self.samples)}; keep the shards of one cache in a folder."
                )
            self._check_ids(path, shard)
            valid_NT = np.arange(self.seq_len) < lengths_of(path, shard, self.seq_len)[:, None]
            for some in slices(len(valid_NT)) if self.normalizer == "estimated" else ():
                error_NT = self._normalised(path, rows_in(shard, some))[1]
                errors += float(error_NT[valid_NT[some]].sum())
            positions += int(valid_NT.sum())
            self._counts.append(len(valid_NT))
        self.standard_error = errors / positions if positions else 0.0

    @property
    def count(self) -> int:
        """How many rows there are."""
        return sum(self._counts)

    def described(self) -> str:
        """Where the rows came from, and how far they can be trusted, as a manifest's `source`."""
        names = (self.meta.get(key) for key in ("dataset_name", "dataset_config_name", "dataset_split"))
        source = ":".join(str(name) for name in names if name) or self.folder.name
        how = {
            "exact": "all of the vocabulary",
            "estimated": f"log-sum-exp estimated from {self.samples} uniform ids per position, standard error "
            f"{self.standard_error:.4f} on average",
            "candidates": f"renormalised over {self.top_k} candidates, without a tail",
        }[self.normalizer]
        return f"{source} (converted from the older layout: {how})"

    def fields(self, rows: range) -> dict[str, Array]:
        """The fields ``[len(rows), ...]`` of some rows, whatever shards they lie in."""
        pieces, first = [], 0
        for path, count in zip(self._paths, self._counts, strict=True):
            inside = slice(max(rows.start - first, 0), max(min(rows.stop - first, count), 0))
            if inside.start < inside.stop:
                shard = rows_in(load(path), inside)  # mapped, so the rest of it takes no memory
                tokens = tokens_of(path, shard, self.seq_len)
                for some in slices(len(shard["input_ids"])):
                    pieces.append(rows_in(tokens, some) | self._normalised(path, rows_in(shard, some))[0])
            first += count
        return joined(pieces)

    def keys(self) -> Array:
        """The keys of all rows, uint64 ``[count]`` (see `qat_lora.cache.row_keys`)."""
        return np.concatenate([row_keys(tokens_of(path, load(path), self.seq_len)) for path in self._paths])

    def _normalizer(self, estimate_tail: bool) -> Any:
        """How the log-sum-exp becomes known; an error where it cannot be as was asked for."""
        if self.top_k > self.vocab_size:
            raise CacheMismatch(
                f"{str(self.folder)!r} has {self.top_k} candidates, more than the vocabulary of {self.vocab_size} "
                "tokens of the teacher; give the --teacher that it was built from."
            )
        if self.top_k == self.vocab_size:
            return "exact"
        if estimate_tail and not self.samples:
            raise ConfigError(
                f"{str(self.folder)!r} has no rand_idx and rand_logits, from which the probability outside its "
                f"{self.top_k} candidates could be estimated; build a cache from the teacher, or take --tail none, "
                "which renormalises over the candidates and is biased."
            )
        return "estimated" if estimate_tail else "candidates"

    def _normalised(self, path: Path, shard: dict[str, Array]) -> tuple[dict[str, Array], Array]:
        """Candidates and tail of a few rows, and the standard error of lse at T = 1 ``[N, T]``."""
        logits_NTK = shard["topk_logits"].astype(np.float64)
        order_NTK = np.argsort(-logits_NTK, axis=-1, kind="stable")
        ids_NTK = np.take_along_axis(shard["topk_idx"].astype(np.int64), order_NTK, -1)
        logits_NTK = np.take_along_axis(logits_NTK, order_NTK, -1)
        most_NT1 = logits_NTK[..., :1]
        if not np.isfinite(most_NT1).all():
            raise CacheError(f"{str(path)!r} has a position without a finite logit; build the cache again.")
        lse_at_one_NT1, tail, error_NT = most_NT1, [], np.zeros(logits_NTK.shape[:2])
        for temperature in self.temperatures:
            rest_NT = np.zeros(logits_NTK.shape[:2])
            if self.normalizer == "estimated":
                rest_NT, rest_error_NT = self._rest(path, shard, ids_NTK, logits_NTK, temperature)
            z_NT = np.exp((logits_NTK - most_NT1) / temperature).sum(-1) + rest_NT
            tail.append(rest_NT / z_NT)
            if temperature == 1.0:
                lse_at_one_NT1 = most_NT1 + np.log(z_NT)[..., None]
                if self.normalizer == "estimated":
                    error_NT = rest_error_NT / z_NT
        fields = {
            "topk_ids": ids_NTK,
            "topk_logprobs": np.maximum(logits_NTK - lse_at_one_NT1, LEAST_LOGPROB).astype(np.float32),
            "tail": np.stack(tail, -1).astype(np.float32),
        }
        return fields, error_NT

    def _rest(
        self, path: Path, shard: dict[str, Array], ids_NTK: Array, logits_NTK: Array, temperature: float
    ) -> tuple[Array, Array]:
        """Estimate the sum of exp((z_v - z_max) / T) over all but the candidates; with its standard error, [N, T]."""
        place_NT1 = np.arange(ids_NTK.shape[0] * ids_NTK.shape[1]).reshape(*ids_NTK.shape[:2], 1) * self.vocab_size
        drawn_NTm = shard["rand_idx"].astype(np.int64)
        other_NTm = ~np.isin(drawn_NTm + place_NT1, ids_NTK + place_NT1)
        logits_NTm = shard["rand_logits"].astype(np.float64)
        if (other_NTm & (logits_NTm > logits_NTK[..., -1:])).any():
            raise CacheError(
                f"{str(path)!r} has samples above the least of the candidates, which are then not the top "
                f"{self.top_k}; build the cache again."
            )
        weights_NTm = np.where(other_NTm, np.exp((logits_NTm - logits_NTK[..., :1]) / temperature), 0.0)
        count_NT = np.maximum(other_NTm.sum(-1), 1)
        mean_NT = weights_NTm.sum(-1) / count_NT
        squares_NT = np.where(other_NTm, (weights_NTm - mean_NT[..., None]) ** 2, 0.0).sum(-1)
        deviation_NT = np.sqrt(squares_NT / np.maximum(count_NT - 1, 1))
        others = self.vocab_size - self.top_k
        return others * mean_NT, others * deviation_NT / np.sqrt(count_NT)

    def _check_ids(self, path: Path, shard: dict[str, Array]) -> None:
        for name in ("input_ids", "topk_idx", "rand_idx"):
            ids = shard.get(name, np.zeros(1))
            if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
                raise CacheError(
                    f"{str(path)!r} holds {name} {ids.min()}..{ids.max()}, but the teacher's vocabulary has "
                    f"{self.vocab_size} tokens; give the --teacher that it was built from."
                )
        ordered = (np.sort(shard["topk_idx"][some], -1) for some in slices(len(shard["topk_idx"])))
        if any((ids_NTK[..., 1:] == ids_NTK[..., :-1]).any() for ids_NTK in ordered):
            raise CacheError(f"{str(path)!r} names a candidate twice at one position; build the cache again.")


def read_meta(folder: Path) -> dict[str, Any]:
    """What meta.json says; CacheError where it cannot be read."""
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CacheError(f"Cannot read {str(path)!r} ({error}); restore the file.") from None
    if not isinstance(meta, dict):
        raise CacheError(f"{str(path)!r} is no JSON object; restore the file.")
    return meta


def shard_paths(folder: Path) -> list[Path]:
    """All shards in order; CacheError where one between them is missing."""
    named = ((path.stem.removeprefix("shard_"), path) for path in folder.glob("shard_*.pt"))
    found = {int(number): path for number, path in named if number.isdigit()}
    if missing := sorted(set(range(max(found, default=0) + 1)) - set(found)):
        raise CacheError(f"{str(folder)!r} lacks shard_{missing[0]:05d}.pt; restore the file.")
    return [found[number] for number in sorted(found)]


def check_whole(path: Path) -> None:
    """Compare the checksums that torch.save leaves in its zip files; CacheError where one differs."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as stored:
            wrong = stored.testzip()
    except zipfile.BadZipFile as error:
        wrong = str(error)
    if wrong is not None:
        raise CacheError(f"{str(path)!r} is damaged (checksum of {wrong}); restore the file.")


def load(path: Path) -> dict[str, Array]:
    """The tensors of a shard, mapped where torch can, in the dtypes that they are stored in."""
    try:
        mapped = zipfile.is_zipfile(path)  # torch's first format was none
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise CacheError(f"{str(path)!r} cannot be read ({reason}), it is truncated or damaged; restore it.") from None
    needed = ("input_ids", "topk_idx", "topk_logits")
    if not isinstance(tensors, dict) or not all(isinstance(tensors.get(name), torch.Tensor) for name in needed):
        raise CacheError(f"{str(path)!r} is no shard of the older layout, which has {', '.join(needed)}; remove it.")
    named = {name: x for name, x in tensors.items() if isinstance(x, torch.Tensor)}
    return {name: (x.float() if x.dtype == torch.bfloat16 else x).numpy() for name, x in named.items()}


def sizes_of(path: Path, shard: dict[str, Array]) -> tuple[int, int, int]:
    """(T, K, m) of a shard; CacheError where its shapes do not fit each other."""
    shapes = {name: x.shape for name, x in shard.items()}
    rows, length = shapes["input_ids"] if len(shapes["input_ids"]) == 2 else (0, 0)
    top = shapes["topk_idx"]
    drawn = shapes.get("rand_idx", (*top[:2], 0))
    fits = (
        rows > 0
        and len(top) == len(drawn) == 3
        and top[0] == rows
        and top[1] in (length, length - 1)
        and top[1] > 0
        and top[2] > 0
        and shapes["topk_logits"] == top
        and drawn[:2] == top[:2]
        and (drawn[2] == 0 or shapes.get("rand_logits") == drawn)
        and shapes.get("attention_mask", (rows, length)) == (rows, length)
    )
    if not fits:
        shown = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise CacheError(f"{str(path)!r} has tensors that do not fit each other ({shown}); build the cache again.")
    return int(top[1]), int(top[2]), int(drawn[2])


def tokens_of(path: Path, shard: dict[str, Array], seq_len: int) -> dict[str, Array]:
    """The tokens of a shard's rows, as fields."""
    ids_NT = shard["input_ids"][:, :seq_len].astype(np.int32)
    return {"input_ids": ids_NT, "lengths": lengths_of(path, shard, seq_len)}


def lengths_of(path: Path, shard: dict[str, Array], seq_len: int) -> Array:
    """Valid positions of each row ``[N]``; CacheError where padding is not on the right."""
    if "attention_mask" not in shard:
        return np.full(len(shard["input_ids"]), seq_len, np.int32)
    mask_NL = shard["attention_mask"] != 0
    if (mask_NL[:, 1:] & ~mask_NL[:, :-1]).any():
        raise CacheError(f"{str(path)!r} has rows with padding before tokens, which cannot be stored; build it again.")
    return np.minimum(mask_NL.sum(1), seq_len).astype(np.int32)


def rows_in(arrays: dict[str, Array], some: slice) -> dict[str, Array]:
    """Some rows of arrays that lie beside each other."""
    return {name: x[some] for name, x in arrays.items()}


def slices(rows: int) -> list[slice]:
    """`ROWS_AT_ONCE` rows at a time."""
    return [slice(start, start + ROWS_AT_ONCE) for start in range(0, rows, ROWS_AT_ONCE)]


if __name__ == "__main__":
    sys.exit(main())
