"""From a chunk of the teacher's logits to what a cache stores of it: candidates, draws, or all logits.

The loop over rows is `build`'s, the mathematics of draws `qat_lora.kd.draws`'.

Legend: B batch, T position, V vocabulary, K candidates, N draws, m temperatures with ratios, H hidden, S flattened
token rows (B*T), n temperatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat_lora.cache.largest import largest
from qat_lora.cache.manifest import CacheManifest
from qat_lora.errors import ModelError
from qat_lora.kd.draws import drawn_rows, uniforms

# float16 holds it, exp of it is 0: a token that the teacher forbids (logit -inf) stays a finite number.
LEAST_LOGPROB = -1.0e4


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


def random_numbers(manifest: CacheManifest, rows: range) -> np.ndarray[Any, Any] | None:
    """The random numbers of some rows, float32 [R, T, 1 + N * m], where their store takes any."""
    if manifest.store != "sampled":
        return None
    return uniforms(manifest.sampling_seed, rows, manifest.seq_len, 1 + manifest.samples * len(manifest.weighed))


def check_numbers(name: str, x_BT: np.ndarray[Any, Any], rows: range) -> None:
    """Raise ModelError where the teacher computes no numbers: a student would learn nonsense in silence."""
    if name in ("lse", "entropy"):
        wrong = ~np.isfinite(x_BT)
    elif name == "logits":  # -inf forbids a token
        wrong = np.isnan(x_BT) | (x_BT == np.inf)
    else:
        return
    if wrong.any():
        place = np.argwhere(wrong)[0]
        raise ModelError(
            f"The teacher's logits are NaN or infinite at row {rows[int(place[0])]}, position {place[1]}; use --dtype "
            "fp32, or another teacher."
        )


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
