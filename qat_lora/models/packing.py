"""What transformers is told of documents in a row, so that it need not ask the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def packing_known(has_documents: bool) -> Iterator[None]:
    """Tell transformers whether rows hold several documents: else each forward asks the device and waits for it."""
    from transformers import masking_utils

    asks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _document_numbers if has_documents else lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = asks


def _document_numbers(position_ids_BT: Tensor) -> Tensor:
    """The number [B, T] of the document that each token belongs to, from 0 in each row."""
    begins_BT = torch.diff(position_ids_BT, prepend=position_ids_BT[:, :1] - 1, dim=-1) != 1
    return begins_BT.cumsum(-1)
