"""From a chunk of the teacher's logits to what a cache stores of it: candidates, draws, or all logits.

The loop over rows is `build`'s (`teacher`), the mathematics of draws `qat_lora.kd.draws`'.

Legend: B batch, T position, V vocabulary, K candidates, N draws, m temperatures with ratios, H hidden, S flattened
token rows (B*T), n temperatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from qat_lora.cache.largest import largest
from qat_lora.cache.manifest import CacheManifest
from qat_lora.errors import ModelError
from qat_lora.kd.draws import draw, ratio_codes, uniforms

# float16 holds it, exp of it is 0: a token that the teacher forbids (logit -inf) stays a finite number.
LEAST_LOGPROB = -1.0e4
NEAR_NUMBERS = 2**17  # half a megabyte


def stored_of(
    hidden_BTH: Tensor,
    head: Callable[[Tensor], Tensor],
    manifest: CacheManifest,
    chunk_tokens: int,
    *,
    chance: Tensor | None = None,
) -> dict[str, Tensor]:
    """What is stored of a batch, [B * T, ...] on its device.

    Args:
        hidden_BTH: last hidden states.
        head: hidden ``[c, H]`` -> logits ``[c, V]``.
        manifest: says what is stored.
        chunk_tokens: token rows per call of `head`.
        chance: where the store has draws, the batch's `random_numbers`.
    """
    hidden = hidden_BTH.flatten(0, 1).split(chunk_tokens)
    numbers = [None] * len(hidden) if chance is None else chance.flatten(0, 1).split(chunk_tokens)
    chunks = []
    for hidden_cH, chance_c in zip(hidden, numbers, strict=True):
        logits_cV = head(hidden_cH)
        if logits_cV.shape[-1] != manifest.vocab_size:
            raise ValueError(f"the manifest says vocab_size={manifest.vocab_size}, got {logits_cV.shape[-1]} logits")
        chunks.append(_reduced(logits_cV.float(), manifest, chance_c))
    return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}


def random_numbers(manifest: CacheManifest, rows: range) -> np.ndarray[Any, Any] | None:
    """The random numbers of some rows, float32 [R, T, 1 + N * m], where their store takes any."""
    if not manifest.draws:
        return None
    return uniforms(manifest.sampling_seed, rows, manifest.seq_len, 1 + manifest.draws * len(manifest.weighed))


def check_numbers(name: str, x_BT: np.ndarray[Any, Any], rows: range) -> None:
    """Raise ModelError where the teacher computes no numbers: a student would learn nonsense in silence."""
    if name in ("topk_logprobs", "tail", "entropy", "tail_entropy"):
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


def topk_rows(logits_SV: Tensor, k: int, temperatures: Sequence[float]) -> dict[str, Tensor]:
    """Reduce logits to candidates.

    Returns:
        ``topk_ids`` [S, k] int64 in descending order of probability; ``topk_logprobs`` [S, k], at T = 1 under
        the softmax over V; ``tail`` [S, n], the probability at each temperature of all that is not stored.
    """
    logits_SV = logits_SV.float()
    top_SK, ids_SK = largest(logits_SV, k)
    below_SK = top_SK - top_SK[:, :1]  # the best candidate, log p_T of which comes from a fused kernel
    logp = {}
    for t in dict.fromkeys((1.0, *temperatures)):
        scaled_SV = logits_SV if t == 1.0 else logits_SV / t
        logp[t] = below_SK / t - _surprise(scaled_SV, ids_SK[:, 0])[:, None]
    # k = V has no tail, and rounding must not invent one
    has_tail = float(k < logits_SV.shape[-1])
    tails = [(1.0 - logp[t].exp().sum(-1)).clamp(min=0.0) * has_tail for t in temperatures]
    return {
        "topk_ids": ids_SK,
        "topk_logprobs": logp[1.0].clamp(min=LEAST_LOGPROB),
        "tail": torch.stack(tails, dim=-1),
    }


def _surprise(logits_SV: Tensor, ids_S: Tensor) -> Tensor:
    """-log softmax at one id of each row. On a CPU some rows at a time, whose exponentials stay near the processor."""
    rows = max(1, NEAR_NUMBERS // logits_SV.shape[1]) if logits_SV.device.type == "cpu" else len(logits_SV)
    pairs = zip(logits_SV.split(rows), ids_S.split(rows), strict=True)
    return torch.cat([F.cross_entropy(z, ids, reduction="none") for z, ids in pairs])


def drawn_rows(
    logits_SV: Tensor, chance: Tensor, samples: int, proposal: float, temperatures: Sequence[float]
) -> dict[str, Tensor]:
    """Reduce logits to draws.

    Args:
        logits_SV: ``[S, V]``; what is -inf is never drawn.
        chance: ``[S, 1 + N * m]`` float32 in [0, 1), for the draws and for rounding their ratios.
        samples: N.
        proposal: the temperature to draw at.
        temperatures: n of them; m are not the proposal.

    Returns:
        ``draw_ids`` [S, N] int64, ascending; ``entropy`` [S, n], of the teacher in nats at each temperature; and where
        m is not 0, ``draw_ratios`` [S, N, m] uint8, p_temperature / p_proposal of each draw (see `ratio_of`). Of equal
        draws the last one's ratio is kept.
    """
    logits_SV = logits_SV.float()
    logp = {t: F.log_softmax(logits_SV / t, dim=-1) for t in dict.fromkeys((proposal, *temperatures))}
    p = {t: x.exp() for t, x in logp.items()}
    ids_SN = draw(p[proposal], chance[:, 0], samples)
    # where p is 0 its logarithm may be -inf, and their product is none
    entropies = [-(p[t] * logp[t].clamp(min=LEAST_LOGPROB)).sum(-1) for t in temperatures]
    of_draws = {t: x.gather(-1, ids_SN) for t, x in logp.items()}
    ratios = [of_draws[t] - of_draws[proposal] for t in temperatures if t != proposal]
    found = {"draw_ids": ids_SN, "entropy": torch.stack(entropies, dim=-1)}
    if ratios:
        chance_SNm = chance[:, 1:].unflatten(-1, (samples, len(ratios)))
        found["draw_ratios"] = ratio_codes(torch.stack(ratios, dim=-1), chance_SNm)
    return found


def with_tail_draws(
    found: dict[str, Tensor],
    logits_SV: Tensor,
    chance: Tensor,
    samples: int,
    proposal: float,
    temperatures: Sequence[float],
) -> dict[str, Tensor]:
    """Add draws from the tail to what `topk_rows` gives of logits; K < V.

    They are `drawn_rows` of the distribution restricted to non-candidates. ``tail_entropy`` [S, n] is the tail's share
    of the teacher's entropy: - sum_v p_T(v) log p_T(v) over the non-candidates.
    """
    best_S1 = logits_SV.gather(-1, found["topk_ids"][:, :1])
    least_SV = (logits_SV - best_S1).clamp(min=LEAST_LOGPROB)  # finite, even if all of the tail is -inf
    drawn = drawn_rows(least_SV.scatter(-1, found["topk_ids"], -torch.inf), chance, samples, proposal, temperatures)
    tail_Sn, entropy_Sn = found["tail"], drawn.pop("entropy")
    log_tail_Sn = tail_Sn.clamp(min=torch.finfo(torch.float32).tiny).log()
    return found | drawn | {"tail_entropy": tail_Sn * (entropy_Sn - log_tail_Sn)}


def _reduced(logits_cV: Tensor, manifest: CacheManifest, chance: Tensor | None) -> dict[str, Tensor]:
    if manifest.store == "full":
        return {"logits": logits_cV}
    draws = (manifest.draws, manifest.proposal_temperature, manifest.temperatures)
    if manifest.store == "sampled":
        assert chance is not None
        return drawn_rows(logits_cV, chance, *draws)
    found = topk_rows(logits_cV, manifest.top_k, manifest.temperatures)
    return found if chance is None else with_tail_draws(found, logits_cV, chance, *draws)
