"""The distillation formulas in NumPy: one row at a time, one token at a time, float64.

Written from the formulas in docs/kd_cache.md and independent of torch. Every loss returns (sum, count).
"""

from __future__ import annotations

import math

import numpy as np


def softmax(logits_V, temperature=1.0):
    """p_v = exp(z_v / T) / sum_w exp(z_w / T)."""
    z = np.asarray(logits_V, np.float64) / temperature
    e = np.exp(z - z.max())
    return e / e.sum()


def log_sum_exp(logits_V, temperature=1.0):
    """Log of sum_v exp(z_v / T)."""
    z = np.asarray(logits_V, np.float64) / temperature
    return z.max() + math.log(np.exp(z - z.max()).sum())


def soft_ce(student_SV, teacher_SV, temperature, mask_S):
    """T^2 * sum over rows of -sum_v p_v log q_v."""
    total = 0.0
    for s, t, m in zip(student_SV, teacher_SV, mask_S, strict=True):
        if m:
            p, q = softmax(t, temperature), softmax(s, temperature)
            total += -sum(p[v] * math.log(q[v]) for v in range(len(p)))
    return temperature**2 * total, int(np.sum(mask_S))


def entropy(teacher_SV, temperature, mask_S):
    """T^2 * sum over rows of -sum_v p_v log p_v."""
    return soft_ce(teacher_SV, teacher_SV, temperature, mask_S)[0]


def tail_bucket_kl(student_SV, ids_SK, logprobs_SK, mask_S, temperature):
    """T^2 * sum of [sum_k p_k log(p_k / q_k) + t log(t / q_tail)], q over the whole vocabulary."""
    total = 0.0
    for s, ids, logp, m in zip(student_SV, ids_SK, logprobs_SK, mask_S, strict=True):
        if not m:
            continue
        q = softmax(s, temperature)
        for k, v in enumerate(ids):
            p = math.exp(logp[k])
            if p > 0:
                total += p * (logp[k] - math.log(q[v]))
        others = [v for v in range(len(q)) if v not in set(map(int, ids))]
        tail = 1.0 - sum(math.exp(x) for x in logp)
        if others and tail > 0:
            total += tail * (math.log(tail) - math.log(sum(q[v] for v in others)))
    return temperature**2 * total, int(np.sum(mask_S))


def candidates_kl(student_SV, ids_SK, logprobs_SK, mask_S, temperature):
    """T^2 * sum of sum_k p_k log(p_k / q_k), both renormalised over the candidates."""
    total = 0.0
    for s, ids, logp, m in zip(student_SV, ids_SK, logprobs_SK, mask_S, strict=True):
        if m:
            p, q = softmax(logp), softmax([s[v] for v in ids], temperature)
            total += sum(p[k] * math.log(p[k] / q[k]) for k in range(len(p)) if p[k] > 0)
    return temperature**2 * total, int(np.sum(mask_S))


def tail_draws_kl(student_SV, ids_SK, p_SK, draws_SN, ratios_SN, tail_entropy_S, mask_S, temperature):
    """T^2 * sum of [sum_k p_k log(p_k / q_k) + t * mean_n r_n (-log q_(v_n)) - e], t = 1 - sum_k p_k.

    e is - sum_v p_v log p_v over the tail; a draw v_n counts r_n times.
    """
    total = 0.0
    for s in np.flatnonzero(mask_S):
        q = softmax(student_SV[s], temperature)
        total += sum(p * math.log(p / q[v]) for p, v in zip(p_SK[s], ids_SK[s], strict=True))
        surprise = [-r * math.log(q[v]) for r, v in zip(ratios_SN[s], draws_SN[s], strict=True)]
        total += (1.0 - sum(p_SK[s])) * sum(surprise) / len(surprise) - tail_entropy_S[s]
    return temperature**2 * total, int(np.sum(mask_S))


def label_ce(student_SV, labels_S, mask_S):
    """Sum of -log q(label)."""
    rows = zip(student_SV, labels_S, mask_S, strict=True)
    return sum(-math.log(softmax(s)[y]) for s, y, m in rows if m), int(np.sum(mask_S))


def top_k(logits_V, k):
    """(ids, log-probabilities under the full softmax) of the k most probable tokens, most probable first."""
    logp = np.log(softmax(logits_V))
    ids = sorted(range(len(logp)), key=lambda v: -logp[v])[:k]
    return ids, [logp[v] for v in ids]


def finite_difference(function, x, step=1e-6):
    """Central differences of a scalar function of an array, entry by entry."""
    grad = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        grad[i] = (function(up) - function(down)) / (2 * step)
    return grad
