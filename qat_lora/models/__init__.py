"""What a model is and how it runs: found, loaded, identified, understood by family, its layers made lean.

Not here: what rounding does to its weights (`quant`), adapters, losses, and which device there is (`runtime`).
"""

from qat_lora.models.attention import use_chunked_attention
from qat_lora.models.families import Head, activation_bytes, causal_lm, decoder, head_parts, target_linears
from qat_lora.models.forward import (
    check_documents,
    check_head,
    checkpoint_layers,
    has_checkpointing,
    hidden_and_head,
    hidden_states,
    place,
    scan_decoder,
    trunk_hidden,
)
from qat_lora.models.identity import Identity
from qat_lora.models.loading import EMBEDDED, Loaded, identify, load, load_tokenizer, resolve, save_pretrained

__all__ = [
    "EMBEDDED",
    "Head",
    "Identity",
    "Loaded",
    "activation_bytes",
    "causal_lm",
    "check_documents",
    "check_head",
    "checkpoint_layers",
    "decoder",
    "has_checkpointing",
    "head_parts",
    "hidden_and_head",
    "hidden_states",
    "identify",
    "load",
    "load_tokenizer",
    "place",
    "resolve",
    "save_pretrained",
    "scan_decoder",
    "target_linears",
    "trunk_hidden",
    "use_chunked_attention",
]
