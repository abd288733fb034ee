"""Building a cache: the loop over the teacher, and the thread that encodes and writes behind it.

The model comes as a function and a head, so nothing here knows transformers; what becomes of logits is `kd.reduce`'s,
what becomes of a folder `write`'s.

Legend: B batch, T position, V vocabulary, N draws, m temperatures with ratios, H hidden, R rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat_lora.cache.bits import Array
from qat_lora.cache.manifest import TOKEN_FIELDS, Arrays, CacheManifest
from qat_lora.cache.write import CacheWriter
from qat_lora.data.rows import TokenRows
from qat_lora.errors import ModelError
from qat_lora.kd.draws import uniforms
from qat_lora.kd.positions import document_positions
from qat_lora.kd.reduce import reduced

QUEUED_BATCHES = 8  # that the teacher may be ahead of what writes

Progress = Callable[[int, int], None]


def token_arrays(rows: TokenRows, manifest: CacheManifest, chosen: slice = slice(None)) -> dict[str, Array]:
    """The fields of rows that are known before the teacher has read them, by the names that a cache gives them."""
    names = {"input_ids": "input_ids_RT", "lengths": "length_R", "starts": "starts_RT", "held_out": "held_out_R"}
    found: dict[str, Array] = {}
    for name, (_, dtype) in manifest.fields(1).items():
        if name not in TOKEN_FIELDS:
            continue
        x = getattr(rows, names.get(name, "answer_RT"))
        if x is None:
            raise ValueError(f"the manifest says packing={manifest.packing!r}, but the rows lack {name}")
        found[name] = np.asarray(x[chosen], dtype=dtype)
    return found


@torch.no_grad()
def build_cache(
    hidden_fn: Callable[..., Tensor],
    head: Callable[[Tensor], Tensor],
    rows: TokenRows,
    writer: CacheWriter,
    *,
    batch_size: int,
    chunk_tokens: int = 256,
    device: torch.device | str = "cpu",
    mark_step: Callable[[], None] = lambda: None,
    barrier: Callable[[], None] = lambda: None,
    progress: Progress | None = None,
) -> None:
    """Run the teacher over the rows of all shards that `writer` has yet to write.

    A thread encodes, hashes and writes, a few batches behind; an error there ends the loop at the next batch.

    Args:
        hidden_fn: input_ids ``[B, T]`` int64 on `device` -> last hidden states ``[B, T, H]``; with packing
            ``documents`` it is given position_ids, int64 ``[B, T]``, as well.
        head: hidden ``[c, H]`` -> logits ``[c, V]``; called for `chunk_tokens` tokens, so no [B, T, V] exists.
        rows: as many as the manifest says.
        writer: says which shards are missing, and writes them; `writer.finish` is left to the caller.
        batch_size: rows per call of `hidden_fn`. Batches never cross shards; the last one of a shard is filled up.
        chunk_tokens: per call of `head`.
        device: where input ids are sent.
        mark_step: called when a batch is traced, before it is read.
        barrier: called `writer.rounds` + 1 times on every rank, after each shard and when all are written. Ranks that
            wait for each other here never drift further apart than one shard takes, however long the build.
        progress: called with (rows done, rows in all), this writer's own, after each batch.
    """
    manifest = writer.manifest
    _check_rows(rows, manifest)

    def fields_of(chosen: range) -> dict[str, Array]:
        fields = token_arrays(rows, manifest, slice(chosen.start, chosen.stop))
        positions = [document_positions(fields["starts"])] if "starts" in fields else []
        hidden_BTH = hidden_fn(*(_filled(x, batch_size).to(device) for x in (fields["input_ids"], *positions)))
        chance, proposal = _chance(manifest, chosen, batch_size, device), manifest.proposal_temperature
        found = reduced(hidden_BTH, head, manifest.target_spec, chunk_tokens, chance=chance, proposal=proposal)
        mark_step()
        return fields | _on_host(manifest, found, chosen, batch_size)

    done = writer.rows_done
    with _Behind() as behind:
        for turn in range(writer.rounds):
            index = writer.indices[turn] if turn < len(writer.indices) else -1
            if index in writer.missing:
                of_shard, pieces = manifest.shard_rows(index), list[tuple[Arrays, Arrays]]()
                starts = of_shard[::batch_size] if not writer.is_there(index) else ()  # another builder may be quicker
                for first in starts:
                    chosen = range(first, min(first + batch_size, of_shard.stop))
                    behind.do(_encode, writer, fields_of(chosen), pieces)
                    if progress is not None:
                        progress(done + chosen.stop - of_shard.start, writer.rows)
                if starts:
                    behind.do(writer.write_encoded, index, pieces)
                done += len(of_shard)
            barrier()
    barrier()


def _on_host(manifest: CacheManifest, stored: dict[str, Tensor], chosen: range, batch_size: int) -> dict[str, Array]:
    """What is stored of a batch as fields, checked: the only host read of the loop."""
    found = {}
    for name, x_S in stored.items():
        x_BT = x_S.cpu().unflatten(0, (batch_size, -1))[: len(chosen)].numpy()
        found[name] = x_BT.astype(manifest.fields(1)[name][1], copy=False)
        _check_numbers(name, found[name], chosen)
    return found


def _check_numbers(name: str, x_BT: Array, rows: range) -> None:
    """Raise ModelError where the teacher computes no numbers: a student would learn nonsense in silence."""
    if not np.issubdtype(x_BT.dtype, np.floating):
        return
    wrong = np.isnan(x_BT) | (x_BT == np.inf)
    if name != "logits":  # where -inf forbids a token
        wrong |= x_BT == -np.inf
    if wrong.any():
        place = np.argwhere(wrong)[0]
        raise ModelError(
            f"The teacher's logits are NaN or infinite at row {rows[int(place[0])]}, position {place[1]}; use --dtype "
            "fp32, or another teacher."
        )


def _encode(writer: CacheWriter, fields: Arrays, pieces: list[Any]) -> None:
    pieces.append(writer.encode(fields))


class _Behind:
    """A thread that does one thing after the other, at most `QUEUED_BATCHES` behind.

    An error in it is raised by the next call; an error outside lets it end what it was given.
    """

    def __enter__(self) -> _Behind:
        self._pool, self._waiting = ThreadPoolExecutor(1, "qat_lora-write"), deque[Future[None]]()
        return self

    def do(self, act: Callable[..., None], *args: Any) -> None:
        """Have it done; raises what went wrong with anything before."""
        while self._waiting and (self._waiting[0].done() or len(self._waiting) >= QUEUED_BATCHES):
            self._next()
        self._waiting.append(self._pool.submit(act, *args))

    def _next(self) -> None:
        try:
            self._waiting.popleft().result()
        except BaseException:
            self._pool.shutdown(wait=True, cancel_futures=True)
            raise

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            while kind is None and self._waiting:
                self._next()
        finally:
            self._pool.shutdown()


def _filled(rows: Array, batch_size: int) -> Tensor:
    """The rows of a batch, the last one repeated as often as rows are missing."""
    rows = rows.astype(np.int64) if np.issubdtype(rows.dtype, np.integer) else rows
    return torch.from_numpy(np.concatenate([rows, np.repeat(rows[-1:], batch_size - len(rows), axis=0)]))


def _chance(manifest: CacheManifest, rows: range, batch_size: int, device: torch.device | str) -> Tensor | None:
    """The random numbers of some rows, float32 [B, T, 1 + N * m], where their store takes any."""
    if not manifest.draws:
        return None
    count = 1 + manifest.draws * len(manifest.weighed)
    return _filled(uniforms(manifest.sampling_seed, rows, manifest.seq_len, count), batch_size).to(device)


def _check_rows(rows: TokenRows, manifest: CacheManifest) -> None:
    if tuple(rows.input_ids_RT.shape) != (manifest.rows, manifest.seq_len):
        raise ValueError(
            f"the manifest says {(manifest.rows, manifest.seq_len)} tokens, got {tuple(rows.input_ids_RT.shape)}"
        )
    if (rows.starts_RT is not None) != (manifest.packing == "documents"):
        raise ValueError(f"the manifest says packing={manifest.packing!r}, which the rows' starts do not fit")
