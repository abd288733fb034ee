"""What differs between families of models: where the decoder is, what its head does, which of its matrices are which.

A family that is not understood is refused here, by name, before anything is trained.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qat_lora.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

# Parts of the names of modules, by which a Linear inside them has its role. A short convolution mixes positions.
_ATTENTION_WORDS = ("attn", "attention", "conv")
_MLP_WORDS = ("mlp", "feed_forward", "ffn", "experts", "block_sparse_moe")
_MLP_LINEARS = ("fc1", "fc2")  # some families have these directly in the layer
# A mixture's choice of experts is small and must stay exact.
_ROUTERS = ("gate", "router", "shared_expert_gate")
# Linears of the decoder, outside its layers: between embeddings of another width and the layers (OPT-350m).
_PROJECTIONS = ("project_in", "project_out")


class Head(NamedTuple):
    """The last layer of a causal language model: logits = transform(hidden @ weight^T + bias).

    Attributes:
        weight_VH: ``[V, H]``.
        bias_V: ``[V]`` or None.
        transform: what the model does to its logits afterwards (a soft cap, a scale), or None.
    """

    weight_VH: Tensor
    bias_V: Tensor | None = None
    transform: Callable[[Tensor], Tensor] | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[..., V]`` of hidden states ``[..., H]``."""
        return self.transformed(F.linear(hidden, self.weight_VH, self.bias_V))

    def transformed(self, raw: Tensor) -> Tensor:
        """Return the logits after `transform`."""
        return raw if self.transform is None else self.transform(raw)


def causal_lm(model: nn.Module) -> PreTrainedModel:
    """Return the transformers causal LM inside a model that peft may have wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def decoder(model: nn.Module) -> PreTrainedModel:
    """Return the text decoder: what maps ids to the last hidden state, without head and without towers for images."""
    lm = causal_lm(model)
    for found in (lm.get_decoder(), lm.base_model):
        if found is not None and found is not lm:
            return found
    raise ModelError(
        f"{type(lm).__name__} does not say which part of it is the decoder and which the head; use a model of another "
        "family, such as Llama or Qwen3."
    )


def head_parts(model: nn.Module, dtype: torch.dtype) -> Head:
    """Return the model's head, its tensors in `dtype`.

    What follows on the logits is the scale of Cohere and Granite and the soft cap of Gemma, as the config names them.
    """
    from accelerate.utils import align_module_device

    lm = causal_lm(model)
    layer, config = lm.get_output_embeddings(), lm.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)

    def transform(logits: Tensor) -> Tensor:
        scaled = logits * scale
        return softcap * torch.tanh(scaled / softcap) if softcap else scaled

    plain = scale == 1.0 and not softcap
    with align_module_device(layer):  # weights that accelerate's hooks fetch only while the layer runs
        bias = getattr(layer, "bias", None)
        return Head(layer.weight.to(dtype), None if bias is None else bias.to(dtype), None if plain else transform)


def target_linears(model: nn.Module) -> dict[str, str]:
    """Return the Linears of the decoder by name, with their role, ``attention`` or ``mlp``, in model order.

    Embeddings, the head and what lies outside the decoder, such as a vision tower, are no targets. Raises ModelError
    where the decoder holds a matrix that is neither a target nor known to stay as it is: a router, a norm, an
    embedding, the kernel of a depthwise convolution, or a projection of embeddings, which a line of the log names.
    """
    trunk = decoder(model)
    prefix = next(f"{name}." for name, module in model.named_modules() if module is trunk)
    config = trunk.config.get_text_config()
    # the most channels that a norm has: those of the residuals, or of all heads together
    width = max(config.hidden_size, config.num_attention_heads * (getattr(config, "head_dim", None) or 0))
    # a model inside the decoder is another's, such as of images
    towers = tuple(f"{name}." for name, m in trunk.named_modules() if name and hasattr(m, "main_input_name"))
    targets: dict[str, str] = {}
    inside: tuple[str, ...] = ()
    unknown: list[tuple[str, nn.Parameter, nn.Module]] = []
    for name, module in trunk.named_modules():
        if _stays_exact(name, module, width) or name.startswith(inside):
            continue
        role = role_of(name.split("."))
        if isinstance(module, nn.Linear) and role and not name.startswith(towers):
            targets[name], inside = role, (f"{name}.",)  # what is below a target follows it at once
        else:
            own = module.named_parameters(prefix=name, recurse=False)
            unknown += [(f"{prefix}{key}", p, module) for key, p in own if p.dim() > 1]
    for name, p, _ in unknown:
        if p.dim() > 2 and role_of(name.split(".")) == "mlp":
            raise ModelError(
                f"{name} holds the experts of a mixture in one tensor, which cannot be quantised; use a dense model."
            )
    if unknown:
        name, _, module = unknown[0]
        raise ModelError(
            f"{name} (of a {type(module).__name__}) and {len(unknown) - 1} other matrices of "
            f"{type(causal_lm(model)).__name__} are no nn.Linear of an attention or MLP block that qat_lora knows, so "
            "they would stay unquantised; use a model whose layers are made of these, such as Llama or Qwen3."
        )
    if projections := tuple(name for name in _PROJECTIONS if getattr(trunk, name, None) is not None):
        _say_unquantised(type(causal_lm(model)).__name__, projections)
    return {f"{prefix}{name}": role for name, role in targets.items()}


def role_of(parts: Sequence[str]) -> str | None:
    """``attention`` or ``mlp`` by the parts of a module's name, its own the last; None where they say neither."""
    around = parts[:-1]
    if any(word in part for part in around for word in _ATTENTION_WORDS):
        return "attention"
    is_mlp = any(part in _MLP_LINEARS for part in parts) or any(word in part for part in around for word in _MLP_WORDS)
    return "mlp" if is_mlp else None


def activation_bytes(model: nn.Module, tokens: int, compute: torch.dtype, *, lean: bool) -> int:
    """About what backward keeps of `tokens` tokens without checkpointing, in bytes.

    Per layer and token, in the compute dtype: residuals, norms and their inputs (8 H), queries, keys, values and
    attention's output twice (4 heads * D), the MLP's products (5 I); and float32 copies for the norms and adapters
    (half as much again). With lean norms and MLPs: the residuals (2 H), queries and keys before and after the rotary
    embedding, values, attention's output as it is and as the next product reads it, and the MLP's two factors.
    """
    config = causal_lm(model).config.get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    widths = (getattr(config, name, None) for name in ("intermediate_size", "ffn_dim", "ffn_hidden_size"))
    inner = next((width for width in widths if width), 4 * hidden)
    head_width = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = head_width * heads, head_width * (getattr(config, "num_key_value_heads", None) or heads)
    values = 2.0 * hidden + 4 * queries + 3 * keys + 2 * inner if lean else 1.5 * (8 * hidden + 4 * queries + 5 * inner)
    return int(config.num_hidden_layers * tokens * values * compute.itemsize)


@functools.cache  # once, and not at each call of `target_linears`
def _say_unquantised(family: str, names: tuple[str, ...]) -> None:
    log.info("%s: %s lie outside the layers and stay in full precision", family, ", ".join(names))


def _stays_exact(name: str, module: nn.Module, width: int) -> bool:
    """Whether a module's own tensors, not those below it, are no matrices to be quantised; adapters are peft's."""
    parts = name.split(".")
    if isinstance(module, nn.Embedding) or name in _PROJECTIONS or any(part.startswith("lora_") for part in parts):
        return True
    if isinstance(module, nn.Conv1d):
        return module.groups == module.in_channels
    if "norm" in type(module).__name__.lower() and not module._modules:  # Cohere's have a row for each head
        return all(p is None or p.numel() <= width for p in module._parameters.values())
    weight = module._parameters.get("weight")  # and not `weight`, which codes make anew at each access
    is_small = weight is not None and weight.dim() == 2 and weight.shape[0] < weight.shape[1]
    return parts[-1] in _ROUTERS and is_small  # a dense MLP may call its gate projection "gate"
