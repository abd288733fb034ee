"""A forward that stops before the logits, and how the layers run in it; checks that it is the model's own.

A *decoder* maps ids to the last hidden state; a *head* maps hidden states to logits. Training keeps the two apart
because the [B, T, V] logits of a whole batch must never exist at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qat_lora.errors import ModelError
from qat_lora.models.attention import CHUNKED, packing_known, use_chunked_attention
from qat_lora.models.families import Head, causal_lm, decoder, head_parts
from qat_lora.models.lean.layers import Scan, ScannedLayers, why_unlike
from qat_lora.models.lean.mlps import use_lean_mlps
from qat_lora.models.lean.norms import use_lean_norms


class _Runtime(Protocol):
    """What a forward needs of `qat_lora.runtime.base.Runtime`, whose room imports from this one."""

    static_graph: bool
    precision: Any

    def autocast(self) -> AbstractContextManager[Any]: ...

    def place(self, model: nn.Module) -> nn.Module: ...


def place(model: nn.Module, runtime: _Runtime) -> nn.Module:
    """Put a model on the runtime's device, with the attention, norms and MLPs that are right there; in place."""
    if runtime.static_graph:
        use_chunked_attention(model)
        use_lean_norms(model)
        use_lean_mlps(model)
    return runtime.place(model)


def trunk_hidden(model: nn.Module, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None) -> Tensor:
    """Last hidden state [B, T, H] after the final norm.

    Rows are causal and padded on the right, so no mask is needed. Where `position_ids_BT` (int64) begin anew within a
    row, attention does too. Transformers sees this in the positions and masks what each kind of its layers must not
    see; our own attention does it by the positions, which take the place of a mask.
    """
    given: dict[str, Tensor] = {}
    if position_ids_BT is not None:
        given["position_ids"] = position_ids_BT
        if causal_lm(model).config.get_text_config()._attn_implementation == CHUNKED:
            given["attention_mask"] = position_ids_BT[:, None, :, None]  # one of four dimensions is passed unchanged
    with packing_known(position_ids_BT is not None):
        return decoder(model)(input_ids=input_ids_BT, use_cache=False, **given).last_hidden_state


def hidden_states(
    model: nn.Module,
    ids_BT: Tensor,
    runtime: _Runtime,
    *,
    position_ids_BT: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the hidden states [S, H] of all positions of a batch in `dtype`, or else in the compute precision.

    A batch of a cache has `position_ids_BT` where its rows hold several documents, each of which then sees only
    itself. The last norm may leave autocast in float32; the product with the vocabulary, the largest of all, must not.
    """
    with runtime.autocast():
        hidden_BTH = trunk_hidden(model, ids_BT, position_ids_BT)
    return hidden_BTH.flatten(0, 1).to(dtype or runtime.precision.compute)


def hidden_and_head(
    model: nn.Module,
    ids_BT: Tensor,
    runtime: _Runtime,
    *,
    position_ids_BT: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Head]:
    """Return the `hidden_states` of a batch and the model's head, both in `dtype`, or else in the compute precision.

    Evaluation takes float32: logits rounded to bf16 move a small KL by some percent.
    """
    hidden_SH = hidden_states(model, ids_BT, runtime, position_ids_BT=position_ids_BT, dtype=dtype)
    return hidden_SH, head_parts(model, dtype or runtime.precision.compute)


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Raise ModelError where decoder and head together do not give the logits of the model's own forward."""
    ids_BT = torch.arange(8, device=_input_device(model))[None]
    own = causal_lm(model)(input_ids=ids_BT, use_cache=False).logits.float().cpu()
    hidden_BTH = trunk_hidden(model, ids_BT)
    head = head_parts(model, hidden_BTH.dtype)
    raw = nn.functional.linear(hidden_BTH.to(head.weight_VH.device), head.weight_VH, head.bias_V)
    ours = head.transformed(raw.float()).cpu()
    # another order of operations; a missing scale or cap is far off
    tolerance = max(1e-4, 4 * torch.finfo(hidden_BTH.dtype).eps)
    if not torch.allclose(own, ours, rtol=tolerance, atol=tolerance):
        raise ModelError(
            f"{type(causal_lm(model)).__name__} does something to its logits that qat_lora does not know (largest "
            f"difference {(own - ours).abs().max():.3g}); add it to qat_lora.models.head_parts."
        )


@torch.no_grad()
def check_documents(model: nn.Module) -> None:
    """Raise ModelError where a document in a row of several has other hidden states than in a row of its own.

    In most families transformers masks by the positions. Those without positions, or with a memory that runs through
    the row, do not know where a document begins.
    """
    first, second = (torch.arange(length, device=_input_device(model))[None] for length in (5, 6))
    ids = (first + 6, second)
    try:
        together_BTH = trunk_hidden(model, torch.cat(ids, 1), torch.cat([first, second], 1))
        apart_BTH = torch.cat([trunk_hidden(model, document) for document in ids], 1)
        # the same sums in another order; a teacher loaded in bf16 has fewer digits than float32
        share = 1e-4 if apart_BTH.dtype == torch.float32 else 0.05
        is_same = bool((together_BTH - apart_BTH).abs().max() <= share * apart_BTH.abs().max())
    except TypeError:
        is_same = False  # it takes no positions
    if not is_same:
        raise ModelError(
            f"{type(causal_lm(model)).__name__} cannot keep documents in one row apart; build the cache with "
            "--packing stream or --packing pad."
        )


def checkpoint_layers(model: nn.Module, checkpoint: Callable[..., Tensor]) -> None:
    """Let `checkpoint` run every decoder layer in training: called with the layer's forward and its hidden states."""
    lm = causal_lm(model)
    if not has_checkpointing(model):
        raise ModelError(f"{type(lm).__name__} has no gradient checkpointing; use --gradient-checkpointing off.")
    lm._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
    lm.enable_input_require_grads()  # else a reentrant checkpoint of frozen inputs drops the gradients inside it


def has_checkpointing(model: nn.Module) -> bool:
    """Whether `checkpoint_layers` works for this family."""
    return bool(causal_lm(model).supports_gradient_checkpointing)


def scan_decoder(model: nn.Module, scan: Scan) -> None:
    """Let `scan` run the decoder's layers, in place, once the model is quantised and adapted.

    Names, state dict and peft's structure stay as they are: only the list that the decoder loops over is another class.
    Raises ModelError where the layers are not alike.
    """
    trunk = decoder(model)
    layers = getattr(trunk, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ModelError(f"{type(trunk).__name__} has no list of layers to scan; drop --scan-layers.")
    if reason := why_unlike(list(layers), causal_lm(model).config.get_text_config()):
        raise ModelError(f"the decoder's layers cannot be scanned: {reason}; drop --scan-layers.")
    trunk.layers = ScannedLayers(layers, scan)


def _input_device(model: nn.Module) -> torch.device | str:
    """The device for ids; where weights are offloaded to disk, hooks move both."""
    parameter = next(model.parameters())
    return "cpu" if parameter.is_meta else parameter.device
