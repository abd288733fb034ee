"""From a batch of the cache to what the losses take: targets at a temperature, labels, and masks.

Owns the algebra between the stored fields and p_T. Everything runs on the batch's device without a host read.

Legend: B batch, T position, K candidates, N draws, S flattened token rows (B*T).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qat_lora.config import Store
from qat_lora.errors import CacheMismatch
from qat_lora.kd.draws import ratio_of
from qat_lora.kd.losses import NEVER, SampledTarget, SparseTarget, Target


@dataclass(frozen=True)
class TargetSpec:
    """What the fields of a batch mean: all that `targets` has to know of where they come from.

    Attributes:
        store: what is kept of a distribution.
        vocab_size: V of the teacher.
        temperatures: that the fields serve, in the order of their last dimension; the first is 1.
        top_k: K, candidates per position; 0 where there are none.
        samples: N, draws per position from all of the vocabulary; 0 where there are none.
        weighed: which of the temperatures the draws serve by ratios, in the order of `draw_ratios`.
        tail_draws: draws per position from what is no candidate, beside the candidates; 0 where there are none.
    """

    store: Store
    vocab_size: int
    temperatures: tuple[float, ...] = (1.0,)
    top_k: int = 0
    samples: int = 0
    weighed: tuple[int, ...] = ()
    tail_draws: int = 0


def targets(batch: Mapping[str, Tensor], temperature: float, spec: TargetSpec, *, top_k: int | None = None) -> Target:
    """Return the teacher at `temperature` for every position of a batch, flattened to ``[S, ...]``.

    `top_k` keeps the most probable candidates only; the mass of the others joins the tail.
    """
    index = _temperature_index(spec, temperature)
    if top_k is not None:
        check_top_k(spec, top_k)
    if spec.store == "sampled":
        return SampledTarget(*_draws(batch, index, spec), batch["entropy"][..., index].flatten())
    if spec.store == "full":
        logp_SV = torch.log_softmax(batch["logits"].flatten(0, 1) / temperature, dim=-1)
        return SparseTarget(torch.arange(logp_SV.shape[-1], device=logp_SV.device).expand_as(logp_SV), logp_SV)
    return _topk(batch, index, spec, spec.top_k if top_k is None else top_k)


def check_top_k(spec: TargetSpec, top_k: int, *, whose: str = "The KD cache") -> None:
    """Raise CacheMismatch unless the cache can give so many candidates."""
    if spec.store != "topk":
        raise CacheMismatch(
            f"{whose} has store={spec.store!r}, which has no candidates to choose from, but top_k={top_k} was "
            "asked for; leave top_k at 0 or build a cache with --store topk."
        )
    if spec.tail_draws and top_k != spec.top_k:
        raise CacheMismatch(
            f"{whose} has {spec.tail_draws} draws from all but its {spec.top_k} candidates, which say nothing of "
            f"candidates left out, but top_k={top_k} was asked for; leave top_k at 0 or build a cache with {top_k}."
        )
    if not 1 <= top_k <= spec.top_k:
        raise CacheMismatch(
            f"{whose} stores top_k={spec.top_k} candidates, but top_k={top_k} was asked for; "
            f"set top_k to 1..{spec.top_k} or build a cache with more."
        )


def _topk(batch: Mapping[str, Tensor], index: int, spec: TargetSpec, k: int) -> Target:
    """Candidates at a temperature: ``log p_T(k) = log p_1(k) / T + c``, where c makes the stored p_T sum to 1 - tail_T.

    At T = 1, too: log-probabilities are rounded, and the little mass that this makes or takes would be read as tail.
    """
    logp_BTK = batch["topk_logprobs"] / spec.temperatures[index]
    stored_BT1 = torch.log1p(-batch["tail"][..., index : index + 1])
    logp_BTK = logp_BTK + (stored_BT1 - logp_BTK.logsumexp(-1, keepdim=True))
    candidates = SparseTarget(batch["topk_ids"][..., :k].flatten(0, 1), logp_BTK[..., :k].flatten(0, 1))
    return _with_tail(candidates, batch, index, spec) if spec.tail_draws else candidates


def _with_tail(candidates: SparseTarget, batch: Mapping[str, Tensor], index: int, spec: TargetSpec) -> SampledTarget:
    """Candidates, each weighing its probability, and draws that share the tail's: K + N draws with weights."""
    logp_SK = candidates.logprobs_SK.clamp(min=NEVER)
    ids_SN, weights_SN = _draws(batch, index, spec)
    return SampledTarget(
        torch.cat([candidates.ids_SK, ids_SN], dim=1),
        torch.cat([logp_SK.exp(), weights_SN * batch["tail"][..., index].flatten()[:, None]], dim=1),
        batch["tail_entropy"][..., index].flatten() - (logp_SK.exp() * logp_SK).sum(-1),
    )


def _draws(batch: Mapping[str, Tensor], index: int, spec: TargetSpec) -> tuple[Tensor, Tensor]:
    """The ids of draws and their weights [S, N], p_T / p_proposal / N."""
    ids_SN = batch["draw_ids"].flatten(0, 1)
    weights_SN = torch.full(ids_SN.shape, 1.0 / ids_SN.shape[1], device=ids_SN.device)
    if index in spec.weighed:
        codes_SN = batch["draw_ratios"][..., spec.weighed.index(index)].flatten(0, 1)
        weights_SN = weights_SN * ratio_of(codes_SN)
    return ids_SN, weights_SN


def position_mask(lengths_B: Tensor, seq_len: int) -> Tensor:
    """Return ``[B, T]`` bool: positions that hold a token (t < length), where the teacher counts."""
    return torch.arange(seq_len, device=lengths_B.device) < lengths_B[:, None]


def label_mask(lengths_B: Tensor, seq_len: int, position_ids_BT: Tensor | None = None) -> Tensor:
    """Return ``[B, T]`` bool: positions whose next token is known (t + 1 < length).

    Where positions begin anew in a row, what follows the last token of a document is another's and no label.
    """
    known_BT = torch.arange(1, seq_len + 1, device=lengths_B.device) < lengths_B[:, None]
    return known_BT if position_ids_BT is None else known_BT & (next_tokens(position_ids_BT) != 0)


def counted_masks(batch: Mapping[str, Tensor], *, answers_only: bool = False) -> tuple[Tensor, Tensor]:
    """Return which positions ``[B, T]`` count against the teacher, and which against the next token.

    With `answers_only` both are those whose next token is an answer's, as the batch's ``answer`` ``[B, T]`` says.
    """
    row_length = batch["input_ids"].shape[1]
    has_label_BT = label_mask(batch["length"], row_length, batch.get("position_ids"))
    if not answers_only:
        return position_mask(batch["length"], row_length), has_label_BT
    counted_BT = has_label_BT & (next_tokens(batch["answer"]) != 0)
    return counted_BT, counted_BT


def next_tokens(input_ids_BT: Tensor) -> Tensor:
    """Return the labels ``[B, T]``, the token after each (`label_mask` drops the last, which has none)."""
    return torch.cat([input_ids_BT[:, 1:], input_ids_BT[:, -1:]], dim=1)


def _temperature_index(spec: TargetSpec, temperature: float) -> int:
    if temperature not in spec.temperatures:
        raise CacheMismatch(
            f"The KD cache stores temperatures {list(spec.temperatures)}, but temperature={temperature} "
            "was asked for; use one of these or build a cache with it."
        )
    return spec.temperatures.index(temperature)
