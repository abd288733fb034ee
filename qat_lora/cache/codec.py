"""Between the fields of a cache's rows and the tensors that a shard stores of them.

Owns which encoding a field has: ids in as many bits as the vocabulary needs, log-probabilities on a grid (`gaps`),
draws as runs (`draws`). Ids, draws and floats are exact both ways, but for draws behind the end of a row, which become
0. What the tensors are called, and their shapes and dtypes, is `format`'s.

Legend: R rows, T positions of a row, K candidates, N draws, m temperatures with ratios, P bytes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from qat_lora.cache.format import GRID_BITS, Arrays, CacheManifest, ends_name
from qat_lora.cache.gaps import from_gaps, to_gaps
from qat_lora.kd.bits import pack, unpack
from qat_lora.kd.draws import from_runs, run_ends, runs_of, to_runs

Array: TypeAlias = "np.ndarray[Any, Any]"


AS_STORED = ("levels", "largest_gap")  # what `decoded` adds to the fields


def encoded(manifest: CacheManifest, fields: Arrays) -> dict[str, Array]:
    """The tensors of a shard, those of `manifest.tensors` and its streams, for the fields of some rows.

    Log-probabilities that come with what `decoded` had them from are stored as they were, bit for bit.
    """
    found = dict(fields)
    if manifest.packing == "documents":
        found["starts"] = pack(fields["starts"], 1)
    if manifest.store == "topk":
        found["topk_ids"] = pack(_in_rows(fields["topk_ids"]), manifest.id_bits)
        if manifest.logprob_bits in GRID_BITS:
            if "levels" in found:
                levels = found.pop("levels")
            else:
                levels, found["largest_gap"] = to_gaps(fields["topk_logprobs"], manifest.logprob_bits)
            found["topk_logprobs"] = pack(_in_rows(levels), manifest.logprob_bits)
    elif manifest.store == "sampled":
        ids_RTN = _blank_padding(fields["draw_ids"], fields["lengths"])
        found["draw_runs"], rows = to_runs(ids_RTN, manifest.id_bits)
        found |= _stream("draw_ids", rows)
        if manifest.weighed:
            ends = run_ends(ids_RTN)
            codes_RTNm = _blank_padding(fields["draw_ratios"], fields["lengths"])
            rows = [codes_TNm[ends_TN].ravel() for codes_TNm, ends_TN in zip(codes_RTNm, ends, strict=True)]
            found |= _stream("draw_ratios", rows)
    return found


def decoded(manifest: CacheManifest, tensors: Arrays) -> dict[str, Array]:
    """The fields that `encoded` was given; of `streams` [R, P] each row's bytes, filled up to the longest row's.

    Where log-probabilities lie on a grid, with their ``levels`` uint8 [R, T, K - 1] and ``largest_gap`` [R, T].
    """
    found = {name: x for name, x in tensors.items() if name in manifest.fields(1)}
    rows, length = found["input_ids"].shape
    if manifest.packing == "documents":
        found["starts"] = unpack(tensors["starts"], 1, length).astype(bool)
    if manifest.store == "topk":
        count = length * manifest.top_k
        ids_RX = unpack(tensors["topk_ids"], manifest.id_bits, count).astype(np.int64)
        found["topk_ids"] = ids_RX.reshape(rows, length, -1)
        found["topk_logprobs"] = decoded_logprobs(manifest, tensors)
        if manifest.logprob_bits in GRID_BITS:
            found |= {"levels": decoded_levels(manifest, tensors), "largest_gap": tensors["largest_gap"]}
    elif manifest.store == "sampled":
        run_RX = runs_of(tensors["draw_runs"], length, manifest.samples)
        ids_RX = from_runs(run_RX, tensors["draw_ids"], manifest.id_bits)
        found["draw_ids"] = ids_RX.reshape(rows, length, -1)
        if manifest.weighed:
            codes_RXm = tensors["draw_ratios"].reshape(rows, -1, len(manifest.weighed))
            codes = np.take_along_axis(codes_RXm, run_RX[..., None], axis=1)
            found["draw_ratios"] = codes.reshape(rows, length, manifest.samples, -1)
    return found


def decoded_logprobs(manifest: CacheManifest, tensors: Arrays) -> Array:
    """The log-probabilities [R, T, K] of candidates, from the tensors of some rows that have to do with them."""
    bits = manifest.logprob_bits
    if bits not in GRID_BITS:
        return tensors["topk_logprobs"]
    return from_gaps(decoded_levels(manifest, tensors), tensors["largest_gap"], bits, tensors["tail"][..., 0])


def decoded_levels(manifest: CacheManifest, tensors: Arrays) -> Array:
    """The levels uint8 [R, T, K - 1] of log-probabilities on a grid."""
    stored, gaps = tensors["topk_logprobs"], manifest.top_k - 1
    levels_RX = unpack(stored, manifest.logprob_bits, manifest.seq_len * gaps).astype(np.uint8)
    return levels_RX.reshape(len(stored), manifest.seq_len, gaps)


def _in_rows(x: Array) -> Array:
    """[R, ...] -> [R, values]."""
    return x.reshape(len(x), int(np.prod(x.shape[1:])))


def _stream(name: str, rows: list[Array]) -> dict[str, Array]:
    return {name: np.concatenate(rows), ends_name(name): np.cumsum([len(row) for row in rows], dtype=np.int64)}


def _blank_padding(x: Array, lengths_R: Array) -> Array:
    """Zeros behind the end of a row, where a teacher's words mean nothing and need not be kept."""
    is_token_RT = np.arange(x.shape[1]) < lengths_R[:, None]
    return np.where(is_token_RT.reshape(*is_token_RT.shape, *[1] * (x.ndim - 2)), x, 0)
