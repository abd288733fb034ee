"""The one reader of KD caches.

Owns: checks on opening, rows as tensors, the split, and the endless stream of batches, whose order is a pure
function of (seed, epoch) and of nothing else. Does not own where a shard's bytes come from (`shards`) or what rows mean
at a temperature (`qat_lora.kd.targets`).

Legend: B batch, T position, V vocabulary, K candidates, N draws, n temperatures, m of them with ratios, R rows, W
ranks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from qat_lora.cache.bits import Array
from qat_lora.cache.codec import AS_STORED, decoded
from qat_lora.cache.copies import DiskCache
from qat_lora.cache.index import fractions, load_cache
from qat_lora.cache.manifest import Arrays
from qat_lora.cache.shards import ShardReader, fits_in_memory
from qat_lora.errors import CacheError, CacheMismatch, ConfigError
from qat_lora.kd.positions import document_positions
from qat_lora.kd.targets import check_top_k
from qat_lora.kd.vocabulary import differ_in_padding, without_ids_from
from qat_lora.urls import Location, Url, location

logger = logging.getLogger(__name__)

Split: TypeAlias = Literal["all", "train", "eval"]
Batch: TypeAlias = dict[str, Tensor]

UNTAGGED_FRACTION = 0.05  # of rows that no build has divided into training and held-out documents


class KDCacheDataset(Dataset[Batch]):
    """Rows of a finished KD cache, one by one or as the stream of batches of one rank.

    Args:
        path: the cache's directory, or its URL, whose shards are fetched to the local disk when they are needed.
        rank: which of `world_size` equal readers this one is.
        world_size: how many there are.
        preload: read all rows into memory now; else rows are read when needed. None: where the ranks of this host have
            the memory for it. Either way the sha256 of a shard is checked before the first of its rows is used.
        seed: of the row order.
        split: ``all`` rows, or one side: rows that are tagged as held out, or those that are not. In a cache without
            tags the side of a row follows from its content.
        eval_fraction: where rows have no tags, about which part of them ``eval`` gets, one row at least.
        shuffle_shards: shuffle rows within windows of so many shards, which are in random order themselves, so that few
            shards are needed at a time; 0 shuffles over the whole cache.
        disk_cache_gb: see `DiskCache`.
    """

    def __init__(
        self,
        path: Location | str,
        *,
        rank: int = 0,
        world_size: int = 1,
        preload: bool | None = False,
        seed: int = 0,
        split: Split = "all",
        eval_fraction: float = 0.0,
        shuffle_shards: int = 0,
        disk_cache_gb: float = 0.0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must lie in 0..{world_size - 1}, but rank={rank}; rank counts from 0.")
        if shuffle_shards < 0:
            raise ConfigError(f"shuffle_shards={shuffle_shards} is no number of shards; use 0 or more.")
        self.path, self.shuffle_shards = location(path), shuffle_shards
        self.index = load_cache(self.path)
        self.manifest = self.index.manifest
        self.index.check_complete(self.path)
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.vocab_size = self.manifest.vocab_size
        disk = DiskCache(disk_cache_gb) if isinstance(self.path, Url) else None
        if preload is None:
            preload = fits_in_memory(self.index.size_bytes, world_size)
            how = "read into memory" if preload else "too large for memory: rows are read when needed"
            logger.info("%s is %s", self.path, how)
        if disk is not None and not preload:
            self._say_what_must_fit(disk)
        self._shards = ShardReader(self.path, self.index, disk=disk, preload=preload)
        self._rows = self._split_rows(split, eval_fraction)
        self._orders: dict[int, Array] = {}

    def __len__(self) -> int:
        """Rows of the split, over all ranks."""
        return len(self._rows)

    def __getitem__(self, row: int) -> Batch:
        """Return one row of the split.

        int64: ``input_ids`` [T], ``length`` []. By store, topk: int64 ``topk_ids`` [T, K], float32 ``topk_logprobs``
        [T, K], ``tail`` [T, n]. sampled: int64 ``draw_ids`` [T, N], float32 ``entropy`` [T, n], and
        where there are ratios (see `draws`) int64 ``draw_ratios`` [T, N, m]. full: float32 ``logits`` [T, V].
        With packing ``documents`` also int64 ``position_ids`` [T], which begin anew with each document.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a split of {len(self)} rows")
        return {name: x[0] for name, x in self._read(self._rows[[row]]).items()}

    def part(self, split: Split, eval_fraction: float = UNTAGGED_FRACTION) -> KDCacheDataset:
        """Return one side of a split of this cache, which shares its files or memory."""
        other = copy.copy(self)
        other._rows = self._split_rows(split, eval_fraction)
        other._orders = {}
        return other

    def for_vocabulary(self, vocab_size: int) -> KDCacheDataset:
        """Return this cache with no id at or beyond `vocab_size` in its rows, for a student that has no more.

        The probability of candidates that are left out joins the tail; see `qat_lora.kd.vocabulary`.
        """
        other = copy.copy(self)
        other.vocab_size = min(vocab_size, self.manifest.vocab_size)
        return other

    def batches(self, batch_size: int, *, position: int = 0) -> Iterator[Batch]:
        """Yield this rank's micro-batches for ever, from micro-batch `position` on.

        The stream of rows is one seeded permutation per epoch, laid end to end. Micro-batch m of all ranks
        together covers its places m*W*B up to (m+1)*W*B, and rank r takes the r-th B of them: no row is lost
        or repeated within an epoch, all ranks see equally many batches, and with W*B kept the stream does not
        depend on W.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size must be positive, but batch_size={batch_size}; use 1 or more.")
        # As far ahead as a shard lasts, or a window of them, so that the next one is on its way when it begins.
        ahead = min(max(1, self.shuffle_shards) * self.manifest.rows_per_shard, len(self))
        lead = ahead // (batch_size * self.world_size) + 1
        while True:
            if isinstance(self.path, Url):
                self._shards.expect(self.batch_rows(batch_size, position, lead))
            yield self._read(self.batch_rows(batch_size, position))
            position += 1

    def batch_rows(self, batch_size: int, position: int, count: int = 1) -> Array:
        """Return which rows of the cache this rank's micro-batch `position` holds, and the `count - 1` after it."""
        firsts = (np.arange(position, position + count) * self.world_size + self.rank) * batch_size
        places = (firsts[:, None] + np.arange(batch_size)).reshape(-1)
        epochs, places = np.divmod(places, len(self))
        rows = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs).tolist():
            rows[epochs == epoch] = self._order(epoch)[places[epochs == epoch]]
        return rows

    def eval_batches(self, batch_size: int, *, rows: int | None = None) -> Iterator[Batch]:
        """Yield this rank's part of the split, or of its first `rows` rows, once, in order, in batches of one size.

        The last ones are filled up with rows of length 0, which no mask counts: ranks see equally many.
        """
        chosen = self._rows[:rows]
        step = batch_size * self.world_size
        for start in range(self.rank * batch_size, -(-len(chosen) // step) * step, step):
            if isinstance(self.path, Url):
                self._shards.expect(chosen[start : start + batch_size + self.manifest.rows_per_shard])
            picked = chosen[start : start + batch_size]
            missing = batch_size - len(picked)
            batch = self._read(np.concatenate([picked, np.repeat(chosen[:1], missing)]))
            batch["length"][len(picked) :] = 0
            yield batch

    def require(
        self,
        *,
        seq_len: int | None = None,
        top_k: int | None = None,
        temperature: float | None = None,
        vocab_size: int | None = None,
        tokenizer_size: int | None = None,
        teacher_digest: str | None = None,
        tokenizer_digest: str | None = None,
        bos: tuple[int, ...] | None = None,
    ) -> None:
        """Raise CacheMismatch, showing both values, unless the cache serves what is given.

        Fewer candidates than stored are served by `targets(..., top_k=)`. Vocabularies may differ in padding, given the
        size of the tokenizer that both sides have (see `for_vocabulary`); the student is then another model than the
        teacher, and `teacher_digest`, of weights, is not compared. A teacher that was quantised on loading counts as
        one that was not. All else must be equal.
        """
        manifest = self.manifest
        if vocab_size not in (None, manifest.vocab_size):
            self._require_padding(vocab_size, tokenizer_size, tokenizer_digest)
            teacher_digest = None
        table: tuple[tuple[str, Any, Any, str], ...] = (
            ("seq_len", seq_len, manifest.seq_len, "build a cache with that sequence length or train with the cache's"),
            (
                "tokenizer_digest", tokenizer_digest, manifest.tokenizer_digest,
                "use the tokenizer that the cache was built with or build one with this tokenizer",
            ),
            (
                "teacher_digest", teacher_digest, manifest.teacher_weights,
                "use the teacher that the cache was built from or build one from this teacher",
            ),
            (
                "bos", None if manifest.bos is None else bos, manifest.bos,
                "the model expects these ids before every text: build the cache again with this version",
            ),
        )  # fmt: skip
        for name, wanted, stored, fix in table:
            if wanted not in (None, stored):
                raise self._mismatch(name, wanted, fix)
        if top_k is not None:
            check_top_k(manifest.target_spec, top_k, whose=f"The KD cache {str(self.path)!r}")
        if temperature not in (None, *manifest.temperatures):
            raise CacheMismatch(
                f"The KD cache {str(self.path)!r} stores temperatures {list(manifest.temperatures)}, "
                f"but the run needs temperature={temperature}; use one of these or build a cache with it."
            )

    def _require_padding(self, vocab_size: int, tokenizer_size: int | None, tokenizer_digest: str | None) -> None:
        """Raise CacheMismatch unless the vocabularies differ in nothing but padding behind one tokenizer's ids."""
        if tokenizer_size is None:
            reason = ""
        elif tokenizer_digest not in (None, self.manifest.tokenizer_digest):
            reason = "; their tokenizers differ, so this is more than padding"
        elif not differ_in_padding(vocab_size, self.manifest.vocab_size, tokenizer_size):
            smaller = min(vocab_size, self.manifest.vocab_size)
            reason = f"; {smaller} cannot hold the tokenizer's {tokenizer_size} ids, so this is more than padding"
        else:
            return
        fix = "use the model that the cache was built for or build one for this model"
        raise self._mismatch("vocab_size", vocab_size, fix, reason)

    def _mismatch(self, name: str, wanted: Any, fix: str, reason: str = "") -> CacheMismatch:
        return CacheMismatch(
            f"The KD cache {str(self.path)!r} (teacher {self.manifest.teacher!r}) has "
            f"{name}={getattr(self.manifest, name)!r}, but the run needs {name}={wanted!r}{reason}; {fix}."
        )

    def _order(self, epoch: int) -> Array:
        if epoch not in self._orders:
            # Two epochs are enough for a batch that straddles them. RandomState, not Generator: NumPy has
            # frozen its stream, and a position saved today must mean the same rows in years.
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = self._shuffled(np.random.RandomState([self.seed % 2**32, epoch]))
        return self._orders[epoch]

    def _shuffled(self, source: np.random.RandomState) -> Array:
        """All rows of the split, as `shuffle_shards` says."""
        if not self.shuffle_shards:
            return source.permutation(self._rows)
        shards = self._rows // self.manifest.rows_per_shard
        places = np.empty(self.manifest.shard_count, np.int64)
        places[source.permutation(self.manifest.shard_count)] = np.arange(self.manifest.shard_count)
        windows = places[shards] // self.shuffle_shards
        return self._rows[np.lexsort((source.permutation(len(self._rows)), windows))]

    def _say_what_must_fit(self, disk: DiskCache) -> None:
        """Warn where the order of rows would fetch shards again and again."""
        largest = max(shard.size_bytes for shard in self.index.shards)
        needed = min(2 * self.shuffle_shards or self.manifest.shard_count, self.manifest.shard_count)
        if (fitting := disk.capacity(largest)) < needed:
            logger.warning(
                "the order of rows needs %d shards of %s at a time (%.1f GB), but the disk cache holds %d, so they "
                "will be fetched many times; raise --disk-cache-gb or set --shuffle-shards to at most %d",
                needed, self.path, needed * largest / 1e9, fitting, max(1, fitting // 2),
            )  # fmt: skip

    def _split_rows(self, split: Split, eval_fraction: float) -> Array:
        rows, tagged = np.arange(self.manifest.rows), self.manifest.eval_fraction
        if split not in get_args(Split) or not 0.0 <= eval_fraction < 1.0:
            raise ConfigError(
                "A split needs split 'all', 'train' or 'eval' and eval_fraction in [0, 1), but "
                f"split={split!r} and eval_fraction={eval_fraction}; change these."
            )
        if split == "all" or (split == "train" and not eval_fraction and not tagged):
            return rows
        if tagged:
            is_eval = self.index.held_out()
        else:
            of_rows = fractions(self.index.row_keys())
            is_eval = of_rows < eval_fraction
            logger.info(
                "%s does not tag held-out rows, so they are chosen by the digest of rows: a held-out row may share a "
                "document with a training row; build a cache with --eval-fraction to split by document",
                self.path,
            )
            if eval_fraction:  # a small cache may have no row below: it holds out the lowest
                is_eval[of_rows.argmin()] = True
        chosen = rows[is_eval if split == "eval" else ~is_eval]
        if len(chosen) == 0:
            raise CacheError(
                f"The {split} split of {str(self.path)!r} is empty with eval_fraction={tagged or eval_fraction} of "
                f"{len(rows)} rows; change eval_fraction or build a cache with more rows."
            )
        return chosen

    def _read(self, rows: Array) -> Batch:
        tensors = self._shards.read(rows)
        self._check_finite(rows, tensors)
        try:
            arrays = decoded(self.manifest, tensors)
        except (ValueError, IndexError) as error:
            raise CacheError(
                f"A row of {rows.tolist()[:8]} of {str(self.path)!r} is damaged ({error}); `qat-lora cache info "
                "--verify` names the file."
            ) from None
        self._check_ids(rows, arrays)
        arrays = {name: x for name, x in arrays.items() if name not in (*AS_STORED, "held_out")}
        arrays["length"] = arrays.pop("lengths")
        if self.vocab_size < self.manifest.vocab_size:
            arrays = without_ids_from(self.vocab_size, arrays, self.manifest.temperatures)
        if "starts" in arrays:
            arrays["position_ids"] = document_positions(arrays.pop("starts"))
        return {name: torch.from_numpy(_handed_out(x)) for name, x in arrays.items()}

    def _check_finite(self, rows: Array, tensors: Arrays) -> None:
        """Raise CacheError at a stored number that is none: the loss would be none either."""
        for name, x in tensors.items():
            if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
                wrong = ~np.isfinite(x) & ((name != "logits") | (x != -np.inf))  # a logit of -inf forbids a token
                self._refuse(rows, name, x, wrong, "the teacher's numbers are finite")

    def _check_ids(self, rows: Array, fields: Arrays) -> None:
        """Raise CacheError at an id out of range: a silent wrong gather on a TPU, a device-side assertion on a GPU."""
        size, most = self.manifest.vocab_size, self.manifest.seq_len
        limits = {"input_ids": self.vocab_size, "topk_ids": size, "draw_ids": size, "lengths": most + 1}
        for name in limits.keys() & fields.keys():
            x, limit = fields[name], limits[name]
            if x.min() < 0 or x.max() >= limit:
                fact = f"rows have {most} tokens" if name == "lengths" else f"the vocabulary has {limit} tokens"
                self._refuse(rows, name, x, (x < 0) | (x >= limit), fact)

    def _refuse(self, rows: Array, name: str, x: Array, wrong: Array, fact: str) -> None:
        if wrong.any():
            row = rows[wrong.reshape(len(rows), -1).any(1)][0]
            raise CacheError(
                f"Row {row} of {str(self.path)!r} holds the {name} value {x[wrong][0]}, but {fact}; build the cache "
                "again."
            )


def _handed_out(x: Array) -> Array:
    if x.dtype == np.bool_:
        return x
    return x.astype(np.int64 if np.issubdtype(x.dtype, np.integer) else np.float32, copy=False)
