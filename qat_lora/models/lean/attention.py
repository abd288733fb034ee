"""Causal attention that never holds [T, T] scores of a whole row: chunks of queries, probabilities made twice.

    P = softmax(scaling * Q K^T + causal mask),  O = P V
    dV = P^T dO,  dP = dO V^T,  dS = P * (dP - rowsum(dO * O)),  dQ = scaling * dS K,  dK = scaling * dS^T Q

Backward makes P again from Q, K and the row's log-sum-exp (FlashAttention's algebra, arXiv 2205.14135, without its
kernel). Each chunk of queries reads only the keys that it may see, so about half of the products are never computed.
This is for devices whose compiler has no fused attention for torch's own: XLA computes that in several passes over
float32 [B, H, T, T], and keeps them for backward.

A row may hold several documents, each of which begins at position 0 and sees only itself: a query at position p of its
document sees p keys back at most, so each query has a window of its own.

Legend: B rows, T positions, D head width, G key-value heads, R query heads of each, c queries of a chunk, n keys that
a chunk sees.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qat_lora.models.lean.products import accurate, without_base

CHUNK_QUERIES = 512  # smaller ones skip more of what is masked, and take longer to compile: docs/TPU.md


def causal_attention(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    position_BT: Tensor | None = None,
) -> Tensor:
    """Attention of H = G * R query heads on G key-value heads, each position on itself and those before it.

    Args:
        q_BHTD: queries, any float dtype; products of scores and probabilities are summed in float32 at least.
        k_BGTD: keys.
        v_BGTD: values, of the width D as well.
        scaling: factor of the scores, usually D ** -0.5.
        window: how many positions back are seen, the own one counted; None: all.
        position_BT: int64, each token's position in its document; None: a row is one document.

    Returns:
        ``[B, H, T, D]`` in the dtype of the queries.
    """
    output: Tensor = _CausalAttention.apply(q_BHTD, k_BGTD, v_BGTD, scaling, window, position_BT)
    return output


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTD: Tensor,
        k_BGTD: Tensor,
        v_BGTD: Tensor,
        scaling: float,
        window: int | None,
        position_BT: Tensor | None,
    ) -> Tensor:
        q_BGRTD = q_BHTD.unflatten(1, (k_BGTD.shape[1], -1))
        outputs, lses = [], []
        for queries, keys in _chunks(q_BHTD.shape[2], window):
            score_BGRcn = _scores(q_BGRTD, k_BGTD, queries, keys, scaling, window, position_BT)
            # divided by its sum after the product, so that the scores are read twice and not three times
            top_BGRc1 = score_BGRcn.amax(-1, keepdim=True)
            weight_BGRcn = (score_BGRcn - top_BGRc1).exp()
            sum_BGRc1 = weight_BGRcn.sum(-1, keepdim=True)
            output_BGRcD = _product(weight_BGRcn.to(v_BGTD.dtype), v_BGTD[:, :, keys])
            outputs.append((accurate(output_BGRcD) / sum_BGRc1).to(q_BHTD.dtype))
            lses.append(sum_BGRc1.log() + top_BGRc1)
        out_BHTD = torch.cat(outputs, dim=3).flatten(1, 2)
        saved = (without_base(x) for x in (q_BHTD, k_BGTD, v_BGTD, out_BHTD))
        ctx.save_for_backward(*saved, torch.cat(lses, dim=3), position_BT)
        ctx.settings = (scaling, window)
        return out_BHTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTD, k_BGTD, v_BGTD, out_BHTD, lse_BGRT1, position_BT = ctx.saved_tensors
        scaling, window = ctx.settings
        groups, length = k_BGTD.shape[1], q_BHTD.shape[2]
        q_BGRTD, out_BGRTD, grad_BGRTD = (x.unflatten(1, (groups, -1)) for x in (q_BHTD, out_BHTD, grads[0]))
        delta_BGRT1 = (accurate(grad_BGRTD) * accurate(out_BGRTD)).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = [], [], []
        for queries, keys in _chunks(length, window):
            score_BGRcn = _scores(q_BGRTD, k_BGTD, queries, keys, scaling, window, position_BT)
            prob_BGRcn = (score_BGRcn - lse_BGRT1[:, :, :, queries]).exp()
            grad_BGRcD = grad_BGRTD[:, :, :, queries]
            grad_prob_BGRcn = _product(accurate(grad_BGRcD), accurate(v_BGTD[:, :, keys].transpose(-1, -2)))
            grad_score_BGRcn = prob_BGRcn * (grad_prob_BGRcn - delta_BGRT1[:, :, :, queries]) * scaling
            low_BGRcn = grad_score_BGRcn.to(q_BHTD.dtype)
            grad_q.append(_product(low_BGRcn, k_BGTD[:, :, keys]))
            around = (0, 0, keys.start, length - keys.stop)
            grad_k.append(F.pad(_product_over_queries(low_BGRcn, q_BGRTD[:, :, :, queries]), around))
            grad_v.append(F.pad(_product_over_queries(prob_BGRcn.to(v_BGTD.dtype), grad_BGRcD), around))
        return (
            torch.cat(grad_q, dim=3).flatten(1, 2),
            functools.reduce(torch.add, grad_k).to(k_BGTD.dtype),
            functools.reduce(torch.add, grad_v).to(v_BGTD.dtype),
            *(None, None, None),
        )


def _chunks(length: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Queries of each chunk, and the keys that some of them see."""
    for start in range(0, length, CHUNK_QUERIES):
        stop = min(start + CHUNK_QUERIES, length)
        yield slice(start, stop), slice(0 if window is None else max(0, start - window + 1), stop)


def _scores(
    q_BGRTD: Tensor,
    k_BGTD: Tensor,
    queries: slice,
    keys: slice,
    scaling: float,
    window: int | None,
    position_BT: Tensor | None,
) -> Tensor:
    product_BGRcn = _product(accurate(q_BGRTD[:, :, :, queries]), accurate(k_BGTD[:, :, keys].transpose(-1, -2)))
    query_c1 = torch.arange(queries.start, queries.stop, device=k_BGTD.device)[:, None]
    key_1n = torch.arange(keys.start, keys.stop, device=k_BGTD.device)[None]
    seen_cn = key_1n <= query_c1
    if window is not None:
        seen_cn = seen_cn & (query_c1 - key_1n < window)
    if position_BT is not None:
        seen_cn = seen_cn & (query_c1 - key_1n <= position_BT[:, None, None, queries, None])  # [B, 1, 1, c, n]
    return (product_BGRcn * scaling).masked_fill(~seen_cn, float("-inf"))


def _product(x_BGRcn: Tensor, y_BGnD: Tensor) -> Tensor:
    """Product for each of the R heads that share a key-value head, as one matrix product."""
    repeats = x_BGRcn.shape[2]
    return (x_BGRcn.flatten(2, 3) @ y_BGnD).unflatten(2, (repeats, -1))


def _product_over_queries(x_BGRcn: Tensor, y_BGRcD: Tensor) -> Tensor:
    """X^T Y summed over the queries and over the heads that share a key-value head: [B, G, n, D], accurate."""
    return accurate(x_BGRcn).flatten(2, 3).transpose(-1, -2) @ accurate(y_BGRcD).flatten(2, 3)
