"""A forward that stops before the logits: hidden states, and the head that would make logits of them chunk by chunk."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qat_lora import models
from qat_lora.errors import ModelError
from qat_lora.kd import Head
from qat_lora.models.lean.mlps import use_lean_mlps
from qat_lora.models.lean.norms import use_lean_norms
from qat_lora.runtime import Runtime


def placed(model: nn.Module, runtime: Runtime) -> nn.Module:
    """Put a model on the runtime's device, with the attention, norms and MLPs that are right there; in place."""
    if runtime.static_graph:
        models.use_chunked_attention(model)
        use_lean_norms(model)
        use_lean_mlps(model)
    return runtime.place(model)


@torch.no_grad()
def check_documents(model: nn.Module) -> None:
    """Raise ModelError where a document in a row of several is not to the model what it is alone in a row.

    Transformers masks by the positions in most families; those without positions, or with a memory that runs through
    the row, do not know where a document begins.
    """
    parameter = next(model.parameters())
    device = "cpu" if parameter.is_meta else parameter.device  # hooks fetch both
    first, second = (torch.arange(length, device=device)[None] for length in (5, 6))
    ids = (first + 6, second)
    try:
        together_BTH = models.trunk_hidden(model, torch.cat(ids, 1), torch.cat([first, second], 1))
        alone_BTH = torch.cat([models.trunk_hidden(model, document) for document in ids], 1)
        # the same sums in another order, of digits that float32 has and a teacher loaded in less has not
        share = 1e-4 if alone_BTH.dtype == torch.float32 else 0.05
        is_same = bool((together_BTH - alone_BTH).abs().max() <= share * alone_BTH.abs().max())
    except TypeError:
        is_same = False  # it takes no positions
    if not is_same:
        raise ModelError(
            f"{type(models.causal_lm(model)).__name__} cannot keep documents in one row apart; build the cache with "
            "--packing stream or --packing pad."
        )


def hidden_states(
    model: nn.Module, ids_BT: Tensor, runtime: Runtime, *, position_ids_BT: Tensor | None = None
) -> Tensor:
    """Return the hidden states [S, H] of all positions of a batch in the compute precision.

    A batch of a cache has `position_ids_BT` where its rows hold several documents, each of which is then alone in what
    it sees. The last norm may leave autocast in float32; the product with the vocabulary, the largest of all, must not.
    """
    with runtime.autocast():
        hidden_BTH = models.trunk_hidden(model, ids_BT, position_ids_BT)
    return hidden_BTH.flatten(0, 1).to(runtime.precision.compute)


def hidden_and_head(
    model: nn.Module, ids_BT: Tensor, runtime: Runtime, *, position_ids_BT: Tensor | None = None
) -> tuple[Tensor, Head]:
    """Return the `hidden_states` of a batch and the model's head, both in the compute precision."""
    hidden_SH = hidden_states(model, ids_BT, runtime, position_ids_BT=position_ids_BT)
    return hidden_SH, Head(*models.head_parts(model, runtime.precision.compute))
