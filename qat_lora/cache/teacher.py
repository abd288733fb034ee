"""From a teacher's logits to the rows of a KD cache.

Owns the reduction of logits to what is stored and the loop of a build. The model comes as a function and a
head, so nothing here knows transformers; digests, files and resumption belong to `format` and `writer`.

Legend: B batch, T position, V vocabulary, K candidates, N draws, m temperatures with ratios, H hidden, S flattened
token rows (B*T), R rows of a shard, n temperatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat_lora.cache.documents import document_positions
from qat_lora.cache.format import CacheManifest
from qat_lora.cache.largest import largest
from qat_lora.cache.writer import CacheWriter
from qat_lora.data.rows import TokenRows
from qat_lora.errors import ModelError
from qat_lora.kd.draws import drawn_rows, uniforms

# float16 holds it, exp of it is 0: a token that the teacher forbids (logit -inf) stays a finite number.
LEAST_LOGPROB = -1.0e4

Progress = Callable[[int, int], None]


def topk_rows(logits_SV: Tensor, k: int, temperatures: Sequence[float]) -> dict[str, Tensor]:
    """Reduce logits to what a cache stores of them.

    Returns:
        ``topk_ids`` [S, k] int64 in descending order of probability; ``topk_logprobs`` [S, k], at T = 1 under
        the softmax over V; ``lse`` [S, n], log-sum-exp of logits / T per temperature; ``tail`` [S, n], the
        probability at T of all that is not stored.
    """
    logits_SV = logits_SV.float()
    top_SK, ids_SK = largest(logits_SV, k)
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
    hidden_fn: Callable[..., Tensor],
    head: Callable[[Tensor], Tensor],
    blocks: TokenRows,
    writer: CacheWriter,
    *,
    batch_size: int,
    chunk_tokens: int = 256,
    device: torch.device | str = "cpu",
    mark_step: Callable[[], None] = lambda: None,
    meet: Callable[[], None] = lambda: None,
    progress: Progress | None = None,
) -> None:
    """Run the teacher over the rows of all shards that `writer` has yet to write.

    Args:
        hidden_fn: input_ids ``[B, T]`` int64 on `device` -> last hidden states ``[B, T, H]``; with packing
            ``documents`` it is given position_ids, int64 ``[B, T]``, as well.
        head: hidden ``[c, H]`` -> logits ``[c, V]`` (a `Head`, say); called for `chunk_tokens` rows at a
            time, so no [B, T, V] exists.
        blocks: the token rows, as many as the manifest says.
        writer: says which shards are to be built, and writes them; `writer.finish` is left to the caller.
        batch_size: rows per call of `hidden_fn`. Batches never cross shards, and the last one of a shard is
            filled up by repeating a row: the model sees one shape, and a resumed build makes the same files.
        chunk_tokens: token rows per call of `head`.
        device: where input ids are sent.
        mark_step: called when a batch is traced, before it is read, so that a lazy device runs it as one graph.
        meet: called after each shard, `writer.rounds` times on every rank. Ranks that wait for each other here never
            drift further apart than one shard takes, however long the build.
        progress: called with (rows done, rows in all) after each batch; both count this writer's own rows.
    """
    manifest = writer.manifest
    _check_rows(blocks, manifest)
    done, total, own = writer.rows_done, writer.rows, writer.missing
    for index in own:
        rows = manifest.shard_rows(index)
        arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in manifest.fields(len(rows)).items()}
        arrays["input_ids"][:] = blocks.input_ids_RT[rows.start : rows.stop]
        arrays["lengths"][:] = blocks.length_R[rows.start : rows.stop]
        inputs = [arrays["input_ids"]]
        if blocks.starts_RT is not None:
            arrays["starts"][:] = blocks.starts_RT[rows.start : rows.stop]
            inputs.append(document_positions(arrays["starts"]))
        for first in range(0, len(rows), batch_size):
            batch = slice(first, min(first + batch_size, len(rows)))
            inputs_BT = [_filled(x[batch].astype(np.int64), batch_size).to(device) for x in inputs]
            chance = _chance(manifest, rows[batch], batch_size, device)
            stored = stored_of(hidden_fn(*inputs_BT), head, manifest, chunk_tokens, chance=chance)
            mark_step()
            for name, x_S in stored.items():
                # The only host read of the loop: results go to the array that becomes the shard.
                arrays[name][batch] = x_S.cpu().unflatten(0, (batch_size, -1))[: batch.stop - batch.start].numpy()
                _check_numbers(name, arrays[name][batch], rows[batch])
            if progress is not None:
                progress(done + batch.stop, total)
        done += len(rows)
        writer.write_shard(index, arrays)
        meet()
    for _ in range(writer.rounds - len(own)):  # the last round has no shard for this rank
        meet()


def _check_numbers(name: str, x_BT: np.ndarray[Any, Any], rows: range) -> None:
    """Raise ModelError where the teacher computes no numbers: a student would learn nonsense in silence."""
    if name in ("lse", "entropy", "logits") and np.isnan(x_BT).any():
        place = np.argwhere(np.isnan(x_BT))[0]
        raise ModelError(
            f"The teacher's logits are NaN at row {rows[int(place[0])]}, position {place[1]}; use --dtype fp32, or "
            "another teacher."
        )


def _check_rows(blocks: TokenRows, manifest: CacheManifest) -> None:
    if tuple(blocks.input_ids_RT.shape) != (manifest.rows, manifest.seq_len):
        raise ValueError(
            f"the manifest says {(manifest.rows, manifest.seq_len)} tokens, got {tuple(blocks.input_ids_RT.shape)}"
        )
    if (blocks.starts_RT is not None) != (manifest.packing == "documents"):
        raise ValueError(f"the manifest says packing={manifest.packing!r}, which the rows' starts do not fit")


def _filled(rows: np.ndarray[Any, Any], batch_size: int) -> Tensor:
    """The rows of a batch, the last one repeated as often as rows are missing."""
    return torch.from_numpy(np.concatenate([rows, np.repeat(rows[-1:], batch_size - len(rows), axis=0)]))


def _chance(manifest: CacheManifest, rows: range, batch_size: int, device: torch.device | str) -> Tensor | None:
    """The random numbers of a batch, [B, T, 1 + N * m], where its store takes any."""
    if manifest.store != "sampled":
        return None
    count = 1 + manifest.samples * len(manifest.weighed)
    return _filled(uniforms(manifest.sampling_seed, rows, manifest.seq_len, count), batch_size).to(device)


def stored_of(
    hidden_BTH: Tensor,
    head: Callable[[Tensor], Tensor],
    manifest: CacheManifest,
    chunk_tokens: int,
    *,
    chance: Tensor | None = None,
) -> dict[str, Tensor]:
    """What is stored of a batch, [B * T, ...] on its device; draws need random numbers [B, T, 1 + N * m]."""
    hidden = hidden_BTH.flatten(0, 1).split(chunk_tokens)
    numbers = [None] * len(hidden) if chance is None else chance.flatten(0, 1).split(chunk_tokens)
    chunks = []
    for hidden_cH, chance_c in zip(hidden, numbers, strict=True):
        logits_cV = head(hidden_cH)
        _check_width(logits_cV, manifest)
        chunks.append(_reduced(logits_cV, manifest, chance_c))
    return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}


def _reduced(logits_cV: Tensor, manifest: CacheManifest, chance: Tensor | None) -> dict[str, Tensor]:
    if chance is not None:
        return drawn_rows(logits_cV, chance, manifest.samples, manifest.proposal_temperature, manifest.temperatures)
    if manifest.store == "full":
        return {"logits": logits_cV.float()}
    return topk_rows(logits_cV, manifest.top_k, manifest.temperatures)


def _check_width(logits_cV: Tensor, manifest: CacheManifest) -> None:
    if logits_cV.shape[-1] != manifest.vocab_size:
        raise ValueError(f"the manifest says vocab_size={manifest.vocab_size}, the head gives {logits_cV.shape[-1]}")


def _divided(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature
