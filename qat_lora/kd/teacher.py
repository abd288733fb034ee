"""From a teacher's logits to the rows of a KD cache.

Owns the reduction of logits to what is stored and the loop of a build. The model comes as a function and a
head, so nothing here knows transformers; digests, files and resumption belong to `format` and `writer`.

Legend: B batch, T position, V vocabulary, K candidates, H hidden, S flattened token rows (B*T), R rows of a
shard, n temperatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from qat_lora.kd.format import CacheManifest
from qat_lora.kd.writer import CacheWriter

# float16 holds it, exp of it is 0: a token that the teacher forbids (logit -inf) stays a finite number.
LEAST_LOGPROB = -1.0e4

Progress = Callable[[int, int], None]


class TokenRows(Protocol):
    """Token rows of one length, right-padded (`qat_lora.data.Blocks` is one)."""

    @property
    def input_ids_RT(self) -> Tensor:
        """``[R, T]`` token ids."""

    @property
    def lengths_R(self) -> Tensor:
        """``[R]`` valid tokens per row."""


def topk_rows(logits_SV: Tensor, k: int, temperatures: Sequence[float]) -> dict[str, Tensor]:
    """Reduce logits to what a cache stores of them.

    Returns:
        ``topk_ids`` [S, k] int64 in descending order of probability; ``topk_logprobs`` [S, k], at T = 1 under
        the softmax over V; ``lse`` [S, n], log-sum-exp of logits / T per temperature; ``tail`` [S, n], the
        probability at T of all that is not stored.
    """
    logits_SV = logits_SV.float()
    top_SK, ids_SK = logits_SV.topk(k, dim=-1, sorted=True)
    lse_Sn = torch.stack([_divided(logits_SV, t).logsumexp(-1) for t in temperatures], dim=-1)
    # k = V has no tail, and rounding must not invent one.
    tails = [
        (1.0 - (_divided(top_SK, t) - lse_Sn[:, i, None]).exp().sum(-1)).clamp(min=0.0)
        if k < logits_SV.shape[-1]
        else torch.zeros_like(lse_Sn[:, i])
        for i, t in enumerate(temperatures)
    ]
    lse_S1 = lse_Sn[:, :1] if temperatures[0] == 1.0 else logits_SV.logsumexp(-1, keepdim=True)
    return {
        "topk_ids": ids_SK,
        "topk_logprobs": (top_SK - lse_S1).clamp(min=LEAST_LOGPROB),
        "lse": lse_Sn,
        "tail": torch.stack(tails, dim=-1),
    }


@torch.no_grad()
def build_cache(
    hidden_fn: Callable[[Tensor], Tensor],
    head: Callable[[Tensor], Tensor],
    blocks: TokenRows,
    writer: CacheWriter,
    *,
    batch_size: int,
    chunk_tokens: int = 256,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> CacheManifest:
    """Run the teacher over all rows that `writer` still lacks, and return the finished manifest.

    Args:
        hidden_fn: input_ids ``[B, T]`` int64 on `device` -> last hidden states ``[B, T, H]``.
        head: hidden ``[c, H]`` -> logits ``[c, V]`` (a `Head`, say); called for `chunk_tokens` rows at a
            time, so no [B, T, V] exists.
        blocks: the token rows, as many as the manifest says.
        writer: says where to start; an interrupted build goes on there.
        batch_size: rows per call of `hidden_fn`. Batches never cross shards, and the last one of a shard is
            filled up by repeating a row: the model sees one shape, and a resumed build makes the same files.
        chunk_tokens: token rows per call of `head`.
        device: where input ids are sent.
        progress: called with (rows done, rows in all) after each batch.
    """
    manifest = writer.manifest
    if tuple(blocks.input_ids_RT.shape) != (manifest.rows, manifest.seq_len):
        raise ValueError(
            f"the manifest says {(manifest.rows, manifest.seq_len)} tokens, got {tuple(blocks.input_ids_RT.shape)}"
        )
    for index in range(writer.next_shard, manifest.shard_count):
        rows = manifest.shard_rows(index)
        arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in manifest.tensors(len(rows)).items()}
        arrays["input_ids"][:] = blocks.input_ids_RT[rows.start : rows.stop].numpy()
        arrays["lengths"][:] = blocks.lengths_R[rows.start : rows.stop].numpy()
        for first in range(0, len(rows), batch_size):
            batch = slice(first, min(first + batch_size, len(rows)))
            hidden_BTH = hidden_fn(_batch(arrays["input_ids"][batch], batch_size).to(device))
            _fill(arrays, batch, hidden_BTH, head, manifest, chunk_tokens)
            if progress is not None:
                progress(rows.start + batch.stop, manifest.rows)
        writer.write_shard(index, arrays)
    return writer.finish()


def _batch(input_ids_BT: np.ndarray[Any, Any], batch_size: int) -> Tensor:
    missing = batch_size - len(input_ids_BT)
    if missing > 0:
        input_ids_BT = np.concatenate([input_ids_BT, np.repeat(input_ids_BT[-1:], missing, axis=0)])
    return torch.from_numpy(input_ids_BT.astype(np.int64))


def _fill(
    arrays: dict[str, np.ndarray[Any, Any]],
    batch: slice,
    hidden_BTH: Tensor,
    head: Callable[[Tensor], Tensor],
    manifest: CacheManifest,
    chunk_tokens: int,
) -> None:
    tokens = (batch.stop - batch.start) * manifest.seq_len
    hidden_SH = hidden_BTH.reshape(-1, hidden_BTH.shape[-1])
    for start in range(0, tokens, chunk_tokens):
        # A whole chunk is computed where there is one, and cut afterwards: one shape for the head as well.
        logits_cV = head(hidden_SH[start : start + chunk_tokens])
        _check_width(logits_cV, manifest)
        stop = min(start + chunk_tokens, tokens)
        for name, rows in topk_rows(logits_cV, manifest.top_k, manifest.temperatures).items():
            # The only host read of the loop: results go to the array that becomes the shard.
            target = arrays[name][batch].reshape(tokens, -1)
            target[start:stop] = rows[: stop - start].cpu().numpy()


def _check_width(logits_cV: Tensor, manifest: CacheManifest) -> None:
    if logits_cV.shape[-1] != manifest.vocab_size:
        raise ValueError(f"the manifest says vocab_size={manifest.vocab_size}, the head gives {logits_cV.shape[-1]}")


def _divided(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature
