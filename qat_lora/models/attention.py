"""What transformers is told about attention: to use ours, which XLA needs, and whether rows hold several documents."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from qat_lora.errors import ModelError
from qat_lora.models.families import causal_lm
from qat_lora.models.lean.attention import causal_attention

CHUNKED = "qat_lora_chunked"  # the name that transformers knows it by
_FIX = "use --device cpu or cuda, or another model"


def use_chunked_attention(model: nn.Module) -> None:
    """Replace a model's attention by `lean.attention`, in place.

    Raises ModelError where the model does not let it be replaced. Where its own attention does more than ours, the
    first forward raises. Ours has no mask, so transformers builds none.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(CHUNKED, _chunked_attention)
    lm = causal_lm(model)
    lm.set_attn_implementation(CHUNKED)
    if lm.config.get_text_config()._attn_implementation != CHUNKED:
        raise ModelError(f"{type(lm).__name__} does not let its attention be replaced, which XLA needs; {_FIX}.")


def _chunked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Transformers' interface: [B, heads, T, D] in, [B, T, heads, D] out; see `forward.trunk_hidden` for the mask."""
    position_BT = None
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        position_BT, attention_mask = attention_mask[:, 0, :, 0], None
    odd = [name for name in ("softcap", "s_aux", "position_bias") if settings.get(name) is not None]
    if odd or settings.get("dropout") or attention_mask is not None or not getattr(module, "is_causal", True):
        what = odd[0] if odd else "dropout, a mask or no causality"
        raise ModelError(f"{type(module).__name__} computes attention with {what}, which is not known on XLA; {_FIX}.")
    scaling = settings.get("scaling") or query.shape[-1] ** -0.5
    window = settings.get("sliding_window")
    output = causal_attention(query, key, value, scaling=scaling, window=window, position_BT=position_BT)
    return output.transpose(1, 2), None


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
