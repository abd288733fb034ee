"""Distillation losses on logits, and the head that turns hidden states into a loss chunk by chunk.

Owns the formulas: full-teacher soft cross-entropy, KL against sparse teacher targets with a tail bucket, hard
top-1, next-token cross-entropy, and `chunked_head_loss`. It knows nothing of models, caches, or of how losses
are weighted and averaged.

Every loss is a `LossSum`: a float32 sum and a float32 count. One place (the training step) divides, so
micro-batches, ranks and padding cannot change a gradient. No loss reads a tensor on the host, and no shape
depends on data: one XLA graph.

Legend: B batch, T position, V vocabulary, K candidates, H hidden, S flattened token rows (B*T), c rows of one
chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qat_lora.config import Support

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

    def at(self, rows: slice) -> SparseTarget:
        """Return the targets of some rows (what `chunked_head_loss` passes to its loss function)."""
        return SparseTarget(self.ids_SK[rows], self.logprobs_SK[rows])


def soft_ce(student_logits: Tensor, teacher_logits: Tensor, temperature: float, mask: Tensor | None = None) -> LossSum:
    """Sum of T^2 * -sum_v p_T(v) log q_T(v), with p the teacher's and q the student's softmax of logits / T.

    Args:
        student_logits: ``[..., V]``.
        teacher_logits: ``[..., V]``, a constant.
        temperature: T > 0. T^2 keeps the gradient's size about the same at every T.
        mask: ``[...]`` bool, the positions that count; all of them if None.
    """
    _same_shape("student_logits", student_logits, "teacher_logits", teacher_logits)
    teacher = F.softmax(_accurate(teacher_logits).detach() / temperature, dim=-1)
    logq = F.log_softmax(_accurate(student_logits) / temperature, dim=-1)
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
) -> LossSum:
    """Sum over counted rows of T^2 * KL(teacher || student) from K candidates per row.

    ``full``: q is normalised over the whole vocabulary, and what the teacher gave to other tokens,
    t = 1 - sum_k p_k, is one bucket: ``sum_k p_k (log p_k - log q_k) + t (log t - log q_tail)``. It is a lower
    bound of the KL over the vocabulary, and equals it where K = V.

    ``candidates``: p and q are both renormalised over the K candidates. Cheaper, and biased: the student is told
    nothing about the mass that it gives to all other tokens.

    Args:
        student_logits_SV: ``[S, V]``, any float dtype.
        target: the teacher, at this temperature.
        mask_S: ``[S]`` bool, the rows that count.
        temperature: T > 0.
        support: see above.
    """
    _same_shape("target.ids_SK", target.ids_SK, "target.logprobs_SK", target.logprobs_SK)
    _same_rows(student_logits_SV, target.ids_SK, mask_S)
    u_SV = _accurate(student_logits_SV)
    if temperature != 1.0:
        u_SV = u_SV / temperature
    logp_SK = _accurate(target.logprobs_SK).detach().clamp(min=NEVER)
    u_SK = u_SV.gather(-1, target.ids_SK)
    if support == "candidates":
        loss_S = _kl(F.log_softmax(logp_SK, dim=-1), F.log_softmax(u_SK, dim=-1))
    elif u_SK.shape[-1] == u_SV.shape[-1]:
        # k = V: there is no tail, and log q of an empty bucket must not be computed.
        loss_S = _kl(logp_SK, F.log_softmax(u_SK, dim=-1))
    else:
        loss_S = _tail_bucket_kl(u_SV, u_SK, target.ids_SK, logp_SK)
    return _masked_sum(loss_S * temperature**2, mask_S)


def hard_top1(student_logits_SV: Tensor, target: SparseTarget, mask_S: Tensor) -> LossSum:
    """Sum of -log q(v*), where v* is the teacher's most probable candidate and q the student at T = 1."""
    _same_rows(student_logits_SV, target.ids_SK, mask_S)
    best_S1 = target.logprobs_SK.argmax(dim=-1, keepdim=True)
    return next_token_ce(student_logits_SV, target.ids_SK.gather(-1, best_S1).squeeze(-1), mask_S)


def next_token_ce(student_logits_SV: Tensor, labels_S: Tensor, mask_S: Tensor) -> LossSum:
    """Sum of -log q(label) at T = 1; a label where `mask_S` is False may be anything, -100 included."""
    _same_rows(student_logits_SV, labels_S, mask_S)
    known_S = torch.where(mask_S, labels_S, torch.zeros_like(labels_S))
    return _masked_sum(F.cross_entropy(_accurate(student_logits_SV), known_S, reduction="none"), mask_S)


class Head(NamedTuple):
    """The last layer of a causal language model: logits = transform(hidden @ weight^T + bias).

    Attributes:
        weight_VH: ``[V, H]``.
        bias_V: ``[V]`` or None.
        transform: what the model does to its logits afterwards (a soft cap, a scale), or None.
    """

    weight_VH: Tensor
    bias_V: Tensor | None = None
    transform: Callable[[Tensor], Tensor] | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[..., V]`` of hidden states ``[..., H]``."""
        return self.transformed(F.linear(hidden, self.weight_VH, self.bias_V))

    def transformed(self, raw: Tensor) -> Tensor:
        """Return the logits after `transform`."""
        return raw if self.transform is None else self.transform(raw)


def chunked_head_loss(
    hidden_SH: Tensor, head: Head, loss_fn: Callable[[Tensor, slice], Tensor], *, chunk_tokens: int
) -> Tensor:
    """Return ``sum over chunks of loss_fn(head(hidden)[rows], rows)`` without ever holding ``[S, V]`` logits.

    Each chunk's logits are made, turned into a loss, differentiated and dropped inside the forward; what
    stays is one gradient of the size of `hidden_SH`, and one of the size of the head where the head is
    trained. Logits are computed once.

    Args:
        hidden_SH: ``[S, H]``.
        head: gradients flow to its weight and bias where these require them. `transform` must hold no trained
            parameter.
        loss_fn: (logits ``[c, V]`` float32, slice of the rows) -> 0-d sum. It is called once per chunk with
            gradients on; a tensor that it closes over is a constant. Sums for the log may be kept from inside
            it, detached.
        chunk_tokens: rows per chunk; the last chunk may be shorter.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}")
    inputs = (hidden_SH, head.weight_VH, head.bias_V)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        total: Tensor = _ChunkedHeadLoss.apply(*inputs, head.transform, loss_fn, chunk_tokens)
        return total
    with torch.no_grad():
        losses = [loss_fn(_accurate(head(hidden_SH[r])), r) for r in _chunks(hidden_SH, chunk_tokens)]
    return torch.stack(losses).sum()


class _ChunkedHeadLoss(torch.autograd.Function):
    """See `chunked_head_loss`; the gradients are ready when forward returns, backward only scales them."""

    @staticmethod
    def forward(ctx, hidden_SH, weight_VH, bias_V, transform, loss_fn, chunk_tokens):  # type: ignore[no-untyped-def]
        head = Head(weight_VH.detach(), None if bias_V is None else bias_V.detach(), transform)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        # Sums over chunks are kept in float32 whatever the dtype of the products.
        grad_VH = torch.zeros_like(weight_VH, dtype=_sum_dtype(weight_VH)) if for_weight else None
        grad_V = torch.zeros_like(bias_V, dtype=_sum_dtype(bias_V)) if for_bias else None
        losses, grads_cH = [], []
        for rows in _chunks(hidden_SH, chunk_tokens):
            hidden_cH = hidden_SH[rows].detach()
            loss, grad_cV = _loss_and_logit_grad(hidden_cH, head, loss_fn, rows)
            losses.append(loss)
            if for_hidden:
                grads_cH.append(torch.mm(grad_cV, head.weight_VH.to(grad_cV.dtype)).to(hidden_SH.dtype))
            if grad_VH is not None:
                _add_product(grad_VH, grad_cV.t(), hidden_cH)
            if grad_V is not None:
                grad_V += grad_cV.sum(0, dtype=grad_V.dtype)
        ctx.save_for_backward(torch.cat(grads_cH) if for_hidden else None, grad_VH, grad_V)
        ctx.dtypes = (hidden_SH.dtype, weight_VH.dtype, None if bias_V is None else bias_V.dtype)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        # Multiplies on the device; a look at whether grad_output is 1 would be a host read.
        grads = [
            None if g is None else (g * grad_output).to(dtype)
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None)


def _loss_and_logit_grad(
    hidden_cH: Tensor, head: Head, loss_fn: Callable[[Tensor, slice], Tensor], rows: slice
) -> tuple[Tensor, Tensor]:
    raw_cV = F.linear(hidden_cH, head.weight_VH, head.bias_V).requires_grad_()
    with torch.enable_grad():
        loss = loss_fn(_accurate(head.transformed(raw_cV)), rows)
        (grad_cV,) = torch.autograd.grad(loss, raw_cV)
    return loss.detach(), grad_cV


def _add_product(sum_VH: Tensor, left_Vc: Tensor, right_cH: Tensor) -> None:
    if left_Vc.dtype == right_cH.dtype == sum_VH.dtype:
        sum_VH.addmm_(left_Vc, right_cH)
    else:
        sum_VH += left_Vc @ right_cH.to(left_Vc.dtype)


def _chunks(hidden_SH: Tensor, chunk_tokens: int) -> list[slice]:
    rows = hidden_SH.shape[0]
    # No rows is one empty chunk: the sum is a zero of the right dtype, the gradients are zeros of the right shape.
    return [slice(i, min(i + chunk_tokens, rows)) for i in range(0, max(rows, 1), chunk_tokens)]


def _kl(logp_SK: Tensor, logq_SK: Tensor) -> Tensor:
    return (logp_SK.exp() * (logp_SK - logq_SK)).sum(-1)


def _tail_bucket_kl(u_SV: Tensor, u_SK: Tensor, ids_SK: Tensor, logp_SK: Tensor) -> Tensor:
    # The tail's log-sum-exp runs over the non-candidates: 1 - sum_k q_k would cancel where the tail is small.
    lse_tail_S = u_SV.scatter(-1, ids_SK, NEVER).logsumexp(-1)
    lse_S = torch.logaddexp(lse_tail_S, u_SK.logsumexp(-1))
    tail_S = (1.0 - logp_SK.exp().sum(-1)).clamp(min=0.0)
    # The floor keeps log finite; at t = 0 it is multiplied by exactly 0.
    log_tail_S = tail_S.clamp(min=torch.finfo(tail_S.dtype).tiny).log()
    return _kl(logp_SK, u_SK - lse_S[:, None]) + tail_S * (log_tail_S - (lse_tail_S - lse_S))


def _masked_sum(loss: Tensor, mask: Tensor) -> LossSum:
    _same_shape("loss", loss, "mask", mask)
    mask = mask.bool()
    # where, not a product: a padded position may hold an infinity, and 0 * inf is NaN.
    return LossSum(torch.where(mask, loss, torch.zeros_like(loss)).sum(), mask.sum(dtype=torch.float32))


def _accurate(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _same_shape(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.shape != other.shape:
        raise ValueError(f"{name} and {other_name} must agree in shape, got {tuple(x.shape)} and {tuple(other.shape)}")


def _same_rows(logits_SV: Tensor, *others: Tensor) -> None:
    if any(x.shape[0] != logits_SV.shape[0] for x in others):
        rows = [x.shape[0] for x in (logits_SV, *others)]
        raise ValueError(f"logits, targets and mask must have equally many rows, got {rows}")
