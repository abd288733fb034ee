"""From a chunk of a teacher's logits to what is kept of it: candidates, draws, or all logits.

The mathematics of draws is `draws`'; the loop over rows, and what becomes of files, a cache's.

Legend: B batch, T position, V vocabulary, K candidates, N draws, m temperatures with ratios, H hidden, S flattened
token rows (B*T), n temperatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qat_lora.kd.draws import draw, ratio_codes
from qat_lora.kd.largest import largest
from qat_lora.kd.targets import TargetSpec

# float16 holds it, exp of it is 0: a token that the teacher forbids (logit -inf) stays a finite number.
LEAST_LOGPROB = -1.0e4
NEAR_NUMBERS = 2**17  # half a megabyte


def reduced(
    hidden_BTH: Tensor,
    head: Callable[[Tensor], Tensor],
    spec: TargetSpec,
    chunk_tokens: int,
    *,
    chance: Tensor | None = None,
    proposal: float = 1.0,
) -> dict[str, Tensor]:
    """What is kept of a batch, [B * T, ...] on its device.

    Args:
        hidden_BTH: last hidden states.
        head: hidden ``[c, H]`` -> logits ``[c, V]``.
        spec: says what is kept.
        chunk_tokens: token rows per call of `head`.
        chance: where draws are kept, random numbers ``[B, T, 1 + N * m]`` (see `drawn_rows`).
        proposal: the temperature to draw at.
    """
    hidden = hidden_BTH.flatten(0, 1).split(chunk_tokens)
    numbers = [None] * len(hidden) if chance is None else chance.flatten(0, 1).split(chunk_tokens)
    chunks = []
    for hidden_cH, chance_c in zip(hidden, numbers, strict=True):
        logits_cV = head(hidden_cH)
        if logits_cV.shape[-1] != spec.vocab_size:
            raise ValueError(f"the cache is of vocab_size={spec.vocab_size}, got {logits_cV.shape[-1]} logits")
        chunks.append(_reduced(logits_cV.float(), spec, chance_c, proposal))
    return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}


def _reduced(logits_cV: Tensor, spec: TargetSpec, chance: Tensor | None, proposal: float) -> dict[str, Tensor]:
    if spec.store == "full":
        return {"logits": logits_cV}
    found = {} if spec.store == "sampled" else topk_rows(logits_cV, spec.top_k, spec.temperatures)
    if chance is None:
        return found
    of_draws = (chance, spec.samples or spec.tail_draws, proposal, spec.temperatures)
    return with_tail_draws(found, logits_cV, *of_draws) if found else drawn_rows(logits_cV, *of_draws)


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
