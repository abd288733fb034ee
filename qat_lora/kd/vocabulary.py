"""A cache of one vocabulary read for a student of another, where the two differ in padding only.

Models round their vocabularies up, each in its own way: 151,669 ids of a tokenizer become 151,936 rows of an embedding.
The ids beyond the tokenizer's stand in no text. Owns when two sizes differ in no more than these, and what becomes of
candidates that a narrower student lacks.

Legend: B rows, T positions, K candidates, N draws, n temperatures, m of them with ratios, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qat_lora.kd.positions import Array

# What a slot gets whose candidate was taken out: float32 holds it, and exp of it is 0 at any sensible temperature.
ABSENT_LOGPROB = -1.0e4


def differ_in_padding(vocab_size: int, other: int, tokenizer_size: int) -> bool:
    """Whether both vocabularies hold every id of the tokenizer that their models share."""
    return min(vocab_size, other) >= tokenizer_size


def without_ids_from(vocab_size: int, batch: dict[str, Array], temperatures: Sequence[float]) -> dict[str, Array]:
    """Take ids at or beyond `vocab_size` out of a batch; a candidate's probability goes to the tail.

    Those that stay move up, in their order. A slot that is left empty at the end gets the highest id that is not yet
    among its position's candidates, with probability 0: the teacher gave such an id no more than the padding it stands
    in for. Where the candidates would be the whole of the smaller vocabulary, K becomes `vocab_size` and the tail
    0, so that `targets` divides all other probability among them in proportion.

    Draws in the padding become others of the position's, taken evenly, so that their share is divided in proportion;
    the entropy stays the teacher's over its own vocabulary: beside draws of the tail, what the candidates had of it
    joins the tail's. Full logits are cut off.

    Args:
        vocab_size: V of the student.
        batch: ``topk_ids`` [B, T, K] int64, and floats ``topk_logprobs`` [B, T, K] and ``tail`` [B, T, n]; or
            ``draw_ids`` [B, T, N] ascending, with ``draw_ratios`` [B, T, N, m] if any; or both, with ``tail_entropy``
            [B, T, n]; or ``logits`` [B, T, V].
        temperatures: of `tail`; the first is 1.

    Returns:
        The batch, its other fields as they were. The arrays given do not change.
    """
    if "draw_ids" in batch:
        batch = _other_draws(vocab_size, batch)
    if "logits" in batch:
        return batch | {"logits": np.ascontiguousarray(batch["logits"][..., :vocab_size])}
    if "topk_ids" not in batch:
        return batch
    lacking_BTK = batch["topk_ids"] >= vocab_size
    if lacking_BTK.shape[-1] < vocab_size and not lacking_BTK.any():
        return batch
    kept = min(lacking_BTK.shape[-1], vocab_size)
    order_BTK = np.argsort(lacking_BTK, axis=-1, kind="stable")
    ids_BTK, logprobs_BTK, empty_BTK = (
        np.take_along_axis(x, order_BTK, axis=-1)[..., :kept]
        for x in (batch["topk_ids"], batch["topk_logprobs"], lacking_BTK)
    )
    tail = {name: x.astype(np.float32) for name, x in batch.items() if name in ("tail", "tail_entropy")}
    for n, temperature in enumerate(temperatures):
        scores_BTK = batch["topk_logprobs"].astype(np.float32) / temperature  # they may be stored as float16
        _join_tail(lacking_BTK, scores_BTK, {name: x[..., n] for name, x in tail.items()})
    if kept == vocab_size:
        tail = {name: np.zeros_like(x) for name, x in tail.items()}
    logprobs_BTK = np.where(empty_BTK, np.float32(ABSENT_LOGPROB), logprobs_BTK)
    highest = np.arange(vocab_size - kept, vocab_size)  # enough of them are free, whatever the candidates are
    for place in np.argwhere(empty_BTK.any(-1)):
        ids_K, empty_K = ids_BTK[tuple(place)], empty_BTK[tuple(place)]
        free = np.setdiff1d(highest, ids_K[~empty_K])
        ids_K[empty_K] = free[::-1][: empty_K.sum()]
    return batch | {"topk_ids": ids_BTK, "topk_logprobs": logprobs_BTK} | tail


def _join_tail(joining_BTK: Array, scores_BTK: Array, tail: dict[str, Array]) -> None:
    """Add to the tail [B, T] of a temperature, and to its entropy, these of the candidates, given by log p_1 / T."""
    weights_BTK = np.exp(scores_BTK - scores_BTK.max(-1, keepdims=True))
    kept_BT, sum_BT = 1.0 - tail["tail"], weights_BTK.sum(-1)
    weights_BTK = np.where(joining_BTK, weights_BTK, 0.0)
    tail["tail"] += kept_BT * (weights_BTK.sum(-1) / sum_BT)
    if "tail_entropy" in tail:
        p_BTK = weights_BTK * (kept_BT / sum_BT)[..., None]
        tail["tail_entropy"] -= (p_BTK * np.log(np.where(p_BTK > 0, p_BTK, 1.0))).sum(-1)


def _other_draws(vocab_size: int, batch: dict[str, Array]) -> dict[str, Array]:
    """The draws of a batch, each of an id that the student has, in the place of those that it has not."""
    ids_BTN = batch["draw_ids"]
    samples, kept_BT1 = ids_BTN.shape[-1], (ids_BTN < vocab_size).sum(-1, keepdims=True)  # ascending: they come first
    few_BT1, more_BT1 = np.maximum(kept_BT1, 1), np.maximum(samples - kept_BT1, 1)
    # the others evenly, from a place on that is as good as any: their share is divided in proportion
    turn_BTN = (np.arange(samples) - kept_BT1) * few_BT1 // more_BT1 + ids_BTN.sum(-1, keepdims=True)
    place_BTN = np.where(np.arange(samples) < kept_BT1, np.arange(samples), turn_BTN % few_BT1)
    # of a position that drew padding alone nothing is known; the last id is as good as any
    found = {"draw_ids": np.minimum(np.take_along_axis(ids_BTN, place_BTN, axis=-1), vocab_size - 1)}
    if "draw_ratios" in batch:
        found["draw_ratios"] = np.take_along_axis(batch["draw_ratios"], place_BTN[..., None], axis=-2)
    return batch | found
