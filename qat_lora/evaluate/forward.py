"""A forward that stops before the logits: hidden states, and the head that would make logits of them chunk by chunk."""

from __future__ import annotations

from torch import Tensor, nn

from qat_lora import models
from qat_lora.kd import Head
from qat_lora.mlps import use_lean_mlps
from qat_lora.norms import use_lean_norms
from qat_lora.runtime import Runtime


def placed(model: nn.Module, runtime: Runtime) -> nn.Module:
    """Put a model on the runtime's device, with the attention, norms and MLPs that are right there; in place."""
    if runtime.static_graph:
        models.use_chunked_attention(model)
        use_lean_norms(model)
        use_lean_mlps(model)
    return runtime.place(model)


def hidden_and_head(model: nn.Module, ids_BT: Tensor, runtime: Runtime) -> tuple[Tensor, Head]:
    """Return the hidden states [S, H] of all positions of a batch and the model's head, both in the compute precision.

    The last norm may leave autocast in float32; the product with the vocabulary, the largest of all, must not.
    """
    with runtime.autocast():
        hidden_BTH = models.trunk_hidden(model, ids_BT)
    compute = runtime.precision.compute
    return hidden_BTH.flatten(0, 1).to(compute), Head(*models.head_parts(model, compute))
