"""The last layer of a language model, and a loss on its logits chunk by chunk.

Owns `chunked_head_loss`; what the loss is stands in `losses`, the head itself in `models`.

Legend: V vocabulary, H hidden, S flattened token rows (B*T), c rows of one chunk, J logits picked per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qat_lora.models import Head
from qat_lora.models.lean.loops import Loop, in_turn
from qat_lora.models.lean.products import accurate

LossFn = Callable[..., Tensor]


def chunked_head_loss(
    hidden_SH: Tensor,
    head: Head,
    loss_fn: LossFn,
    rows: Sequence[Tensor] = (),
    *,
    chunk_tokens: int,
    constants: Sequence[Tensor] = (),
    picked_ids_SJ: Tensor | None = None,
    loop: Loop = in_turn,
) -> Tensor:
    """Return the sum over chunks of loss_fn of head(hidden) without ever holding ``[S, V]`` logits.

    Each chunk's logits are made, turned into a loss, differentiated and dropped inside the forward; what
    stays is one gradient of the size of `hidden_SH`, and one of the size of the head where the head is
    trained. Logits are computed once.

    Args:
        hidden_SH: ``[S, H]``.
        head: gradients flow to its weight and bias where these require them. `transform` must hold no trained
            parameter.
        loss_fn: (logits ``[c, V]`` float32, *rows of the chunk, *constants) -> 0-d sum, with gradients on; with
            `picked_ids_SJ` also ``picked=``, logits ``[c, J]``. It is called once per chunk, or once in all where
            `loop` compiles its body; so every tensor that it needs is among `rows` and `constants`.
        rows: tensors ``[S, ...]``, constants of the loss that belong to the rows.
        chunk_tokens: rows per chunk; the last chunk may be shorter.
        constants: other tensors that the loss needs.
        picked_ids_SJ: ids whose logits `loss_fn` is to get apart. They are products with rows of the head, so their
            gradient needs no scatter into [c, V]; the head must be frozen. All products are then in float32.
        loop: runs the chunks.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}")
    inputs = (hidden_SH, head.weight_VH, head.bias_V)
    if picked_ids_SJ is not None and any(x is not None and x.requires_grad for x in inputs[1:]):
        raise ValueError("logits are picked apart from a frozen head only")
    chunks = _Chunks(loss_fn, head.transform, tuple(rows), tuple(constants), picked_ids_SJ, chunk_tokens, loop)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        total: Tensor = _ChunkedHeadLoss.apply(*inputs, chunks)
        return total
    with torch.no_grad():
        return chunks.run(hidden_SH, head.weight_VH, head.bias_V, wanted=(False, False, False))[0]


class _ChunkedHeadLoss(torch.autograd.Function):
    """See `chunked_head_loss`; the gradients are ready when forward returns, backward only scales them."""

    @staticmethod
    def forward(ctx, hidden_SH, weight_VH, bias_V, chunks):  # type: ignore[no-untyped-def]
        loss, *grads = chunks.run(hidden_SH, weight_VH, bias_V, wanted=ctx.needs_input_grad[:3])
        ctx.save_for_backward(*grads)
        ctx.dtypes = (hidden_SH.dtype, weight_VH.dtype, None if bias_V is None else bias_V.dtype)
        return loss

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        # Multiplies on the device; a look at whether grad_output is 1 would be a host read.
        grads = [
            None if g is None else (g * grad_output).to(dtype)
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None)


class _Chunks(NamedTuple):
    """A loss over the chunks of some rows, and its gradients."""

    loss_fn: LossFn
    transform: Callable[[Tensor], Tensor] | None
    rows: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    picked_ids_SJ: Tensor | None
    size: int
    loop: Loop

    def run(
        self, hidden_SH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, *, wanted: Sequence[bool]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The loss, and its gradients for hidden states, weight and bias where they are wanted, else None.

        The carry is the loss, the sums of gradients, then what stays the same; sums are float32 whatever the dtype of
        the products.
        """
        for_hidden, for_weight, for_bias = wanted
        biases = [] if bias_V is None else [bias_V]
        summed = [x for x, is_wanted in ((weight_VH, for_weight), (bias_V, for_bias)) if is_wanted and x is not None]
        sums = [torch.zeros((), dtype=_sum_dtype(hidden_SH), device=hidden_SH.device)]
        sums += [torch.zeros_like(x, dtype=_sum_dtype(x)) for x in summed]
        same = [weight_VH, *biases, *self.constants]
        picked = [] if self.picked_ids_SJ is None else [self.picked_ids_SJ]

        def body(carry: list[Tensor], part: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            hidden_cH, rest = part[0].detach(), part[1:]
            weight, *others = carry[len(sums) :]
            head = Head(weight.detach(), others.pop(0).detach() if biases else None, self.transform)
            ids_cJ = rest.pop(0) if picked else None
            with torch.set_grad_enabled(any(wanted)):
                loss, leaves, rows_cJH = self._loss(hidden_cH, head, ids_cJ, rest, others)
            added, outputs = [carry[0] + loss.detach(), *carry[1 : len(sums)]], []
            if any(wanted):
                # without a tail only the picked ones count
                grad_cV, *grad_picked = torch.autograd.grad(loss, leaves, materialize_grads=True)
            if for_weight:
                added[1] = _plus_product(added[1], grad_cV.t(), hidden_cH)
            if for_bias:
                added[-1] = added[-1] + grad_cV.sum(0, dtype=added[-1].dtype)
            if for_hidden:
                grad_cH = torch.mm(grad_cV, head.weight_VH.to(grad_cV.dtype))
                if rows_cJH is not None:
                    grad_cH = grad_cH + torch.einsum("cj,cjh->ch", grad_picked[0], rows_cJH.to(grad_picked[0].dtype))
                outputs.append(grad_cH.to(hidden_SH.dtype))
            return [*added, *carry[len(sums) :]], outputs

        carry, outputs = self.loop(body, [*sums, *same], [hidden_SH, *picked, *self.rows], self.size)
        return (
            carry[0],
            outputs[0] if for_hidden else None,
            carry[1] if for_weight else None,
            carry[len(sums) - 1] if for_bias else None,
        )

    def _loss(
        self, hidden_cH: Tensor, head: Head, ids_cJ: Tensor | None, rows: list[Tensor], constants: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """The loss of one chunk, the raw logits to differentiate for, and the head's rows of the picked ones if any."""
        if ids_cJ is None:
            leaves = [F.linear(hidden_cH, head.weight_VH, head.bias_V)]
        else:  # the difference of the two is the tail: bf16 logits beside exact ones would drown it
            bias_V = None if head.bias_V is None else accurate(head.bias_V)
            leaves = [F.linear(accurate(hidden_cH), accurate(head.weight_VH), bias_V)]
        rows_cJH = None
        if ids_cJ is not None:
            rows_cJH = head.weight_VH.index_select(0, ids_cJ.flatten()).unflatten(0, ids_cJ.shape)
            raw_cJ = torch.einsum("ch,cjh->cj", accurate(hidden_cH), accurate(rows_cJH))
            leaves.append(raw_cJ if head.bias_V is None else raw_cJ + accurate(head.bias_V[ids_cJ]))
        if torch.is_grad_enabled():
            leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        logits_cV, *picked = (accurate(head.transformed(leaf)) for leaf in leaves)
        words = {"picked": picked[0]} if picked else {}
        return self.loss_fn(logits_cV, *rows, *constants, **words), leaves, rows_cJH


def _plus_product(sum_VH: Tensor, left_Vc: Tensor, right_cH: Tensor) -> Tensor:
    """Sum + left @ right; in place where dtypes allow it, the sum being ours."""
    if left_Vc.dtype == right_cH.dtype == sum_VH.dtype:
        return sum_VH.addmm_(left_Vc, right_cH)
    return sum_VH.add_(left_Vc @ right_cH.to(left_Vc.dtype))


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
