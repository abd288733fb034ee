"""Distillation losses on logits.

Owns the formulas, and knows nothing of caches, of the head (`head`), or of how losses are weighted and averaged.

Every loss is a `LossSum`: a float32 sum and a float32 count. One place (the training step) divides, so micro-batches,
ranks and padding cannot change a gradient. No loss reads a tensor on the host, and no shape depends on data.

Legend: B batch, T position, V vocabulary, K candidates, N draws, S flattened token rows (B*T).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from qat_lora.config import Support
from qat_lora.models.lean.products import accurate

# Stands in for -inf where -inf would turn 0 * log 0 into NaN; exp of it is exactly 0 at any sensible temperature.
NEVER = -1.0e30


class LossSum(NamedTuple):
    """A loss before its division: its sum over the positions that count, and how many these are."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # tuple.count is given up for the word that everyone uses


class SparseTarget(NamedTuple):
    """The teacher at K candidates per token row, at one temperature.

    Attributes:
        ids_SK: int64, distinct within a row, in any order.
        logprobs_SK: float32 log p_T of each candidate under the teacher's softmax over the FULL vocabulary.
    """

    ids_SK: Tensor
    logprobs_SK: Tensor


class SampledTarget(NamedTuple):
    """The teacher as N tokens with weights per token row, at one temperature: draws, or candidates and draws.

    Attributes:
        ids_SN: int64, in any order, equal ones included.
        weights_SN: float32; the mean over draws of a token's sum of weights is its probability. They need not sum to 1.
        entropy_S: float32, the teacher's, in nats.
    """

    ids_SN: Tensor
    weights_SN: Tensor
    entropy_S: Tensor


Target: TypeAlias = SparseTarget | SampledTarget


def soft_ce(student_logits: Tensor, teacher_logits: Tensor, temperature: float, mask: Tensor | None = None) -> LossSum:
    """Sum of T^2 * -sum_v p_T(v) log q_T(v), with p the teacher's and q the student's softmax of logits / T.

    Args:
        student_logits: ``[..., V]``.
        teacher_logits: ``[..., V]``, a constant.
        temperature: T > 0. T^2 keeps the gradient's size about the same at every T.
        mask: ``[...]`` bool, the positions that count; all of them if None.
    """
    _same_shape("student_logits", student_logits, "teacher_logits", teacher_logits)
    teacher = F.softmax(accurate(teacher_logits).detach() / temperature, dim=-1)
    logq = F.log_softmax(accurate(student_logits) / temperature, dim=-1)
    loss = (teacher * logq).sum(-1) * -(temperature**2)
    if mask is None:
        mask = torch.ones(loss.shape, dtype=torch.bool, device=loss.device)
    return _masked_sum(loss, mask)


def kd_soft_ce(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Mean over positions of T^2 * CE(softmax(teacher / T), softmax(student / T)), of logits ``[..., V]``."""
    total, count = soft_ce(student_logits, teacher_logits, temperature)
    return total / count


def sparse_kl(
    student_logits_SV: Tensor,
    target: SparseTarget,
    mask_S: Tensor,
    *,
    temperature: float,
    support: Support = "full",
    picked_SK: Tensor | None = None,
) -> LossSum:
    """Sum over counted rows of T^2 * KL(teacher || student) from K candidates per row.

    ``full``: q is normalised over the whole vocabulary, and what the teacher gave to other tokens, t = 1 - sum_k p_k,
    is one bucket: ``sum_k p_k (log p_k - log q_k) + t (log t - log q_tail)``. It is a lower bound of the KL over the
    vocabulary, and equals it where K = V.

    ``candidates``: p and q are both renormalised over the K candidates. Biased: the student hears nothing of the mass
    that it gives to all other tokens.

    Args:
        student_logits_SV: ``[S, V]``, any float dtype.
        target: the teacher, at this temperature.
        mask_S: ``[S]`` bool, the rows that count.
        temperature: T > 0.
        support: see above.
        picked_SK: the logits at the candidates, where they were computed apart (see `chunked_head_loss`). Nothing is
            then gathered or scattered, which a TPU does badly; the tail's mass is the whole less the candidates', with
            an error of 1e-7 of the whole.
    """
    _same_shape("target.ids_SK", target.ids_SK, "target.logprobs_SK", target.logprobs_SK)
    _same_rows(student_logits_SV, target.ids_SK, mask_S)
    u_SV = accurate(student_logits_SV)
    u_SK = u_SV.gather(-1, target.ids_SK) if picked_SK is None else picked_SK
    if temperature != 1.0:
        u_SV, u_SK = u_SV / temperature, u_SK / temperature
    logp_SK = accurate(target.logprobs_SK).detach().clamp(min=NEVER)
    if support == "candidates":
        loss_S = _kl(F.log_softmax(logp_SK, dim=-1), F.log_softmax(u_SK, dim=-1))
    elif u_SK.shape[-1] == u_SV.shape[-1]:
        # k = V: there is no tail, and log q of an empty bucket must not be computed.
        loss_S = _kl(logp_SK, F.log_softmax(u_SK, dim=-1))
    else:
        # The tail's log-sum-exp runs over the non-candidates: 1 - sum_k q_k would cancel where the tail is small.
        apart = picked_SK is not None
        lse_tail_S = _lse_less(u_SV, u_SK) if apart else u_SV.scatter(-1, target.ids_SK, NEVER).logsumexp(-1)
        loss_S = _tail_bucket_kl(lse_tail_S, u_SK, logp_SK)
    return _masked_sum(loss_S * temperature**2, mask_S)


def sampled_kl(
    student_logits_SV: Tensor,
    target: SampledTarget,
    mask_S: Tensor,
    *,
    temperature: float,
    picked_SN: Tensor | None = None,
) -> LossSum:
    """Sum over counted rows of T^2 * (sum_n w_n * -log q(v_n) - H(p)), whose mean over draws is T^2 * KL(p || q).

    So is its gradient, that of full distillation: T * (sum_n w_n * q - sum_n w_n * e_(v_n)), where weights are left as
    they are; normalised, they would bring a bias back. (arXiv:2503.16870; the weights are importance sampling's.)
    Arguments as for `sparse_kl`.
    """
    _same_shape("target.ids_SN", target.ids_SN, "target.weights_SN", target.weights_SN)
    _same_rows(student_logits_SV, target.ids_SN, mask_S)
    u_SV = accurate(student_logits_SV) / temperature
    u_SN = u_SV.gather(-1, target.ids_SN) if picked_SN is None else picked_SN / temperature
    surprise_SN = u_SV.logsumexp(-1, keepdim=True) - u_SN
    loss_S = (target.weights_SN * surprise_SN).sum(-1) - target.entropy_S
    return _masked_sum(loss_S * temperature**2, mask_S)


def distillation(
    student_logits_SV: Tensor,
    target: Target,
    mask_S: Tensor,
    *,
    temperature: float,
    support: Support = "full",
    picked: Tensor | None = None,
) -> LossSum:
    """The loss for a target, whatever its kind: `sparse_kl` or `sampled_kl`."""
    if isinstance(target, SampledTarget):
        return sampled_kl(student_logits_SV, target, mask_S, temperature=temperature, picked_SN=picked)
    return sparse_kl(student_logits_SV, target, mask_S, temperature=temperature, support=support, picked_SK=picked)


def hard_top1(
    student_logits_SV: Tensor, ids_SK: Tensor, scores_SK: Tensor, mask_S: Tensor, *, picked_SK: Tensor | None = None
) -> LossSum:
    """Sum of -log q(v*), where v* is the teacher's best candidate by score and q the student at T = 1.

    Scores are log-probabilities or probabilities; `picked_SK` as for `sparse_kl`.
    """
    _same_rows(student_logits_SV, ids_SK, mask_S)
    best_S1 = scores_SK.argmax(dim=-1, keepdim=True)
    picked_S = None if picked_SK is None else picked_SK.gather(-1, best_S1).squeeze(-1)
    return next_token_ce(student_logits_SV, ids_SK.gather(-1, best_S1).squeeze(-1), mask_S, picked_S=picked_S)


def next_token_ce(
    student_logits_SV: Tensor, labels_S: Tensor, mask_S: Tensor, *, picked_S: Tensor | None = None
) -> LossSum:
    """Sum of -log q(label) at T = 1; a label where `mask_S` is False may be anything, -100 included.

    `picked_S` are the logits at the labels, where they were computed apart.
    """
    _same_rows(student_logits_SV, labels_S, mask_S)
    if picked_S is not None:
        return _masked_sum(accurate(student_logits_SV).logsumexp(-1) - picked_S, mask_S)
    known_S = torch.where(mask_S, labels_S, torch.zeros_like(labels_S))
    return _masked_sum(F.cross_entropy(accurate(student_logits_SV), known_S, reduction="none"), mask_S)


def _kl(logp_SK: Tensor, logq_SK: Tensor) -> Tensor:
    return (logp_SK.exp() * (logp_SK - logq_SK)).sum(-1)


def _lse_less(u_SV: Tensor, u_SK: Tensor) -> Tensor:
    """log(sum_v exp(u_v) - sum_k exp(u_k)), at least 2^-24 of the first sum, below which rounding decides."""
    top_S1 = u_SV.detach().amax(-1, keepdim=True)
    whole_S = (u_SV - top_S1).exp().sum(-1)
    rest_S = whole_S - (u_SK - top_S1).exp().sum(-1)
    return torch.maximum(rest_S, whole_S * 2.0**-24).log() + top_S1.squeeze(-1)


def _tail_bucket_kl(lse_tail_S: Tensor, u_SK: Tensor, logp_SK: Tensor) -> Tensor:
    lse_S = _log_add_exp(lse_tail_S, u_SK.logsumexp(-1))
    tail_S = (1.0 - logp_SK.exp().sum(-1)).clamp(min=0.0)
    # The floor keeps log finite; at t = 0 it is multiplied by exactly 0.
    log_tail_S = tail_S.clamp(min=torch.finfo(tail_S.dtype).tiny).log()
    return _kl(logp_SK, u_SK - lse_S[:, None]) + tail_S * (log_tail_S - (lse_tail_S - lse_S))


def _log_add_exp(x: Tensor, y: Tensor) -> Tensor:
    """log(exp(x) + exp(y)). `torch.logaddexp` runs on the host where the device is XLA's, in the middle of a step."""
    return torch.maximum(x, y) + torch.log1p(torch.exp(-(x - y).abs()))


def _masked_sum(loss: Tensor, mask: Tensor) -> LossSum:
    _same_shape("loss", loss, "mask", mask)
    mask = mask.bool()
    # where, not a product: a padded position may hold an infinity, and 0 * inf is NaN.
    return LossSum(torch.where(mask, loss, torch.zeros_like(loss)).sum(), mask.sum(dtype=torch.float32))


def _same_shape(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.shape != other.shape:
        raise ValueError(f"{name} and {other_name} must agree in shape, got {tuple(x.shape)} and {tuple(other.shape)}")


def _same_rows(logits_SV: Tensor, *others: Tensor) -> None:
    if any(x.shape[0] != logits_SV.shape[0] for x in others):
        rows = [x.shape[0] for x in (logits_SV, *others)]
        raise ValueError(f"logits, targets and mask must have equally many rows, got {rows}")
