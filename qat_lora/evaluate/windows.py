"""Which tokens an evaluation reads, and which predictions it counts.

Legend: R windows, T tokens per window.

*Whole* windows do not overlap; each predicts all its tokens but the first. *Strided* windows overlap and each counts
only the tokens that no earlier window has predicted, so that every counted token but those of the first window has at
least T - stride tokens of context: slower, lower perplexity, the protocol of the transformers documentation. Say which
one a number comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """Token windows and the positions whose next-token prediction counts.

    Attributes:
        input_ids_RT: int64, padded on the right.
        counted_RT: bool; position t counts when the prediction of token t + 1 does.
    """

    input_ids_RT: Tensor
    counted_RT: Tensor


def whole_windows(input_ids_RT: Tensor, lengths_R: Tensor) -> Windows:
    """Windows that are the given rows, of which the first `lengths_R` tokens are real."""
    positions_T = torch.arange(input_ids_RT.shape[1])
    return Windows(input_ids_RT.long(), positions_T[None] + 1 < lengths_R[:, None])


def strided_windows(stream_L: Tensor, row_length: int, stride: int) -> Windows:
    """Windows of `row_length` tokens every `stride` tokens over one stream of L tokens.

    Every token but the stream's first is predicted and counted exactly once.
    """
    total = stream_L.numel()
    rows, counted = [], []
    predicted = 1  # tokens of the stream that have been predicted; nothing predicts the first
    for begin in range(0, max(1, total - row_length + stride), stride):
        end = min(begin + row_length, total)
        row, mask = torch.zeros(row_length, dtype=torch.long), torch.zeros(row_length, dtype=torch.bool)
        row[: end - begin] = stream_L[begin:end]
        mask[predicted - begin - 1 : end - begin - 1] = True
        predicted = end
        rows.append(row)
        counted.append(mask)
    return Windows(torch.stack(rows), torch.stack(counted))
