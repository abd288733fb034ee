"""Between the fields of a cache's rows and the tensors that a shard stores of them.

Owns which encoding a field has: ids in as many bits as the vocabulary needs, log-probabilities on a grid (`grid`),
draws as runs (`bits`). Ids, draws and floats are exact both ways, but for draws behind the end of a row, which become
0. What the tensors are called, and their shapes and dtypes, is the manifest's `table`.

Legend: R rows, T positions of a row, K candidates, N draws, m temperatures with ratios, P bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from qat_lora.cache.bits import Array, from_runs, pack, run_ends, runs_of, to_runs, unpack
from qat_lora.cache.manifest import Arrays, CacheManifest, ends_name
from qat_lora.kd.grid import expected_kl, from_gaps, to_gaps

AS_STORED = ("levels", "largest_gap")  # what `decoded` adds to the fields


def encoded(manifest: CacheManifest, fields: Arrays) -> dict[str, Array]:
    """The tensors of a shard, those of `manifest.tensors` and its streams, for the fields of some rows.

    Log-probabilities that come with what `decoded` had them from are stored as they were, bit for bit.
    """
    found = dict(fields)
    if "levels" in found:
        found["topk_logprobs"] = found.pop("levels")
    elif manifest.is_on_grid:
        found["topk_logprobs"], found["largest_gap"] = to_gaps(fields["topk_logprobs"], manifest.logprob_bits)
    if manifest.draws:
        ids_RTN = _blank_padding(fields["draw_ids"], fields["lengths"])
        ends_RTN = found["draw_runs"] = run_ends(ids_RTN)
        found |= _stream("draw_ids", to_runs(ids_RTN, ends_RTN, manifest.id_bits))
    if manifest.weighed:
        codes_RTNm = _blank_padding(fields["draw_ratios"], fields["lengths"])
        rows = [codes_TNm[ends_TN].ravel() for codes_TNm, ends_TN in zip(codes_RTNm, ends_RTN, strict=True)]
        found |= _stream("draw_ratios", rows)
    for name, (_, _, stored) in manifest.table.items():
        if stored is not None:
            x, kind = found[name], stored[1]
            found[name] = pack(x.reshape(len(x), -1), kind) if isinstance(kind, int) else x.astype(kind, copy=False)
    return found


def decoded(manifest: CacheManifest, tensors: Arrays) -> dict[str, Array]:
    """The fields that `encoded` was given; of `streams` [R, P] each row's bytes, filled up to the longest row's.

    Where log-probabilities lie on a grid, with their ``levels`` uint8 [R, T, K - 1] and ``largest_gap`` [R, T].
    """
    found = {name: unpacked(manifest, tensors, name) for name in manifest.table}
    if manifest.is_on_grid:
        found["levels"] = found["topk_logprobs"]
        found["topk_logprobs"] = _from_grid(manifest, tensors, found["levels"])
    if manifest.draws:
        run_RX = runs_of(found["draw_runs"])
        found["draw_ids"] = from_runs(run_RX, tensors["draw_ids"], manifest.id_bits)
    if manifest.weighed:
        codes_RXm = tensors["draw_ratios"].reshape(len(run_RX), -1, len(manifest.weighed))
        found["draw_ratios"] = np.take_along_axis(codes_RXm, run_RX[..., None], axis=1)
    rows = len(tensors["lengths"])
    for name, (shape, dtype) in manifest.fields(rows).items():
        found[name] = found[name].reshape(shape).astype(dtype, copy=False)
    return {name: x for name, x in found.items() if name in (*manifest.fields(rows), *AS_STORED)}


def unpacked(manifest: CacheManifest, tensors: Arrays, name: str) -> Array:
    """A stored tensor [R, ...], without packing."""
    x, (shape, kind) = tensors[name], manifest.table[name].stored or ((), "u1")
    return unpack(x, kind, math.prod(shape)).reshape(len(x), *shape) if isinstance(kind, int) else x


def _from_grid(manifest: CacheManifest, tensors: Arrays, levels: Array) -> Array:
    return from_gaps(levels, tensors["largest_gap"], manifest.logprob_bits, tensors["tail"][..., 0])


def joined(manifest: CacheManifest, pieces: Sequence[Arrays]) -> dict[str, Array]:
    """The tensors of all rows of several pieces of a shard, each as `encoded` gives them."""
    found = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    for name in manifest.streams:
        lengths = [np.diff(piece[ends_name(name)], prepend=0) for piece in pieces]
        found[ends_name(name)] = np.cumsum(np.concatenate(lengths), dtype=np.int64)
    return found


def rows_of(manifest: CacheManifest, tensors: Any, first: int, stop: int) -> dict[str, Array]:
    """Rows of a shard's tensors, which are sliced, as `decoded` takes them."""
    found = {name: tensors[name][first:stop] for name in manifest.tensors(1)}
    for name in manifest.streams:
        ends = found[ends_name(name)].tolist()
        begin = int(tensors[ends_name(name)][first - 1 : first][0]) if first else 0
        if sorted([begin, *ends]) != [begin, *ends]:
            raise ValueError(f"{ends_name(name)} does not ascend")
        data = tensors[name][begin : ends[-1]] if ends[-1] > begin else np.empty(0, np.uint8)
        if len(data) != ends[-1] - begin:
            raise ValueError(f"{name} ends before its rows")
        found[name] = _side_by_side([data[a - begin : b - begin] for a, b in itertools.pairwise([begin, *ends])])
    return found


def batch_of(manifest: CacheManifest, pieces: Sequence[Arrays]) -> dict[str, Array]:
    """Rows from several places, each as `rows_of` gives them, one after the other."""
    if len(pieces) == 1:
        return dict(pieces[0])
    found = {name: np.concatenate([piece[name] for piece in pieces]) for name in manifest.tensors(1)}
    return found | {name: _side_by_side([row for piece in pieces for row in piece[name]]) for name in manifest.streams}


def sums_of(manifest: CacheManifest, tensors: Arrays, fields: Arrays) -> dict[str, Array]:
    """What `index.Shard` says of rows in numbers, at T = 1 over their valid tokens: float64 [R] each.

    `tensors` are the `encoded` ones. The entropy of candidates without draws counts the tail as
    one more, a lower bound of it.
    """
    is_token_RT = np.arange(manifest.seq_len) < fields["lengths"][:, None]
    tail_RT = kl_RT = np.zeros(is_token_RT.shape)
    if manifest.store == "sampled":
        entropy_RT = fields["entropy"][..., 0].astype(np.float64)
    else:
        if manifest.store == "full":
            z_RTV = fields["logits"].astype(np.float64)
            logp_RTK = z_RTV - np.logaddexp.reduce(z_RTV, axis=-1, keepdims=True)
        else:
            logp_RTK, tail_RT = tensors["topk_logprobs"], fields["tail"][..., 0].astype(np.float64)
            if manifest.is_on_grid:
                levels = unpacked(manifest, tensors, "topk_logprobs")
                logp_RTK = _from_grid(manifest, tensors, levels)
                kl_RT = expected_kl(levels, tensors["largest_gap"], manifest.logprob_bits, logp_RTK)
        entropy_RT = -(np.exp(logp_RTK) * np.maximum(logp_RTK, -1e4)).sum(-1, dtype=np.float64)  # 0 * -inf is none
        if manifest.tail_draws:
            entropy_RT += fields["tail_entropy"][..., 0]
        else:
            entropy_RT -= np.where(tail_RT > 0, tail_RT * np.log(np.maximum(tail_RT, np.finfo(np.float64).tiny)), 0.0)
    each = {"kept_mass": 1.0 - tail_RT, "entropy": entropy_RT, "grid_kl": kl_RT}
    return {name: np.where(is_token_RT, x_RT, 0.0).sum(-1) for name, x_RT in each.items()}


def _side_by_side(rows: Sequence[Array]) -> Array:
    """Rows of bytes as one array, filled up with 0 to the longest."""
    found = np.zeros((len(rows), max(map(len, rows))), np.uint8)
    for array, row in zip(found, rows, strict=True):
        array[: len(row)] = row
    return found


def _stream(name: str, rows: list[Array]) -> dict[str, Array]:
    return {name: np.concatenate(rows), ends_name(name): np.cumsum([len(row) for row in rows], dtype=np.int64)}


def _blank_padding(x: Array, lengths_R: Array) -> Array:
    """Zeros behind the end of a row, where a teacher's words mean nothing and need not be kept."""
    is_token_RT = np.arange(x.shape[1]) < lengths_R[:, None]
    return np.where(is_token_RT.reshape(*is_token_RT.shape, *[1] * (x.ndim - 2)), x, 0)
