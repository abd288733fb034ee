"""Causal attention in NumPy: one row, one head, one query at a time, float64.

Written from the formula in qat_lora/attention.py and its derivative, and independent of torch.
"""

from __future__ import annotations

import numpy as np


def seen(query: int, window: int | None) -> range:
    """The keys that a query sees: its own position and those before it, `window` of them at most."""
    return range(0 if window is None else max(0, query - window + 1), query + 1)


def attention(q_BHTD, k_BGTD, v_BGTD, scaling: float, window: int | None = None):
    """O_i = sum_j p_ij v_j, with p_i the softmax over the seen j of scaling * q_i . k_j."""
    q, k, v = (np.asarray(x, np.float64) for x in (q_BHTD, k_BGTD, v_BGTD))
    out = np.zeros(q.shape)
    for b, h, i in np.ndindex(q.shape[:3]):
        g = h // (q.shape[1] // k.shape[1])
        for j, p in zip(seen(i, window), _probabilities(q, k, b, h, g, i, scaling, window), strict=True):
            out[b, h, i] += p * v[b, g, j]
    return out


def gradients(q_BHTD, k_BGTD, v_BGTD, grad_BHTD, scaling: float, window: int | None = None):
    """The derivatives of sum(grad * O) by q, k and v: of the softmax dp_ij = p_ij (g_ij - sum_l p_il g_il)."""
    q, k, v, grad = (np.asarray(x, np.float64) for x in (q_BHTD, k_BGTD, v_BGTD, grad_BHTD))
    d_q, d_k, d_v = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for b, h, i in np.ndindex(q.shape[:3]):
        g = h // (q.shape[1] // k.shape[1])
        p = _probabilities(q, k, b, h, g, i, scaling, window)
        by_p = [grad[b, h, i] @ v[b, g, j] for j in seen(i, window)]
        mean = sum(x * y for x, y in zip(p, by_p, strict=True))
        for j, p_j, by_p_j in zip(seen(i, window), p, by_p, strict=True):
            by_score = scaling * p_j * (by_p_j - mean)
            d_q[b, h, i] += by_score * k[b, g, j]
            d_k[b, g, j] += by_score * q[b, h, i]
            d_v[b, g, j] += p_j * grad[b, h, i]
    return d_q, d_k, d_v


def _probabilities(q, k, b: int, h: int, g: int, i: int, scaling: float, window: int | None):
    scores = np.array([scaling * (q[b, h, i] @ k[b, g, j]) for j in seen(i, window)])
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
