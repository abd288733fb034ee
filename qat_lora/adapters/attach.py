"""Where recovery adapters go, and how they are put on a student.

They go where Apple's quality-recovery adapters do: q, v, o and the MLP, but not k. They are peft's own:
y = base(x) + (alpha / r) * B(A(dropout(x))), A [r, in], B [out, r], B zero at the start.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qat_lora.config import AdapterConfig
from qat_lora.errors import ConfigError
from qat_lora.models.lean.products import linear

if TYPE_CHECKING:
    from peft import PeftModel

log = logging.getLogger(__name__)

_KEY_PROJECTIONS = ("k_proj", "key", "key_proj", "wk")
# q, k and v in one matrix: of Phi3, of GPT-NeoX and Falcon, of others
_FUSED_PROJECTIONS = ("qkv_proj", "query_key_value", "c_attn", "qkv", "Wqkv")


def adapted_linears(targets: Mapping[str, str], config: AdapterConfig) -> list[str]:
    """Names of the Linears to adapt, out of the targets and their role (see `models.target_linears`).

    Where q, k and v are one matrix, keys are adapted with it, whatever `include_k_proj` says; that is logged.
    """
    own = {name: name.rsplit(".", 1)[-1] for name in targets}
    chosen = [
        name
        for name, role in targets.items()
        if role == "mlp" or (not config.mlp_only and (config.include_k_proj or own[name] not in _KEY_PROJECTIONS))
    ]
    if not chosen:
        raise ConfigError("no Linear is left to adapt; drop --mlp-only.")
    fused = [own[name] for name in chosen if own[name] in _FUSED_PROJECTIONS]
    if fused and not config.include_k_proj:
        log.warning("%s holds q, k and v in one matrix, so k is adapted too; --mlp-only adapts none of them", fused[0])
    return chosen


def attach(model: nn.Module, targets: Mapping[str, str], config: AdapterConfig, *, base_name: str) -> PeftModel:
    """Wrap a frozen student with fresh adapters; only they require gradients.

    `base_name` goes into adapter_config.json.
    """
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    chosen = adapted_linears(targets, config)
    lora = LoraConfig(
        r=config.recovery_r,
        lora_alpha=config.recovery_alpha,
        lora_dropout=config.recovery_dropout,
        target_modules=_short_names(chosen, [name for name, _ in model.named_modules()]),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with rename_notice_ignored(), _weights_not_computed(model.get_submodule(name) for name in chosen):
        adapted = get_peft_model(model, lora)
    adapted.peft_config["default"].base_model_name_or_path = base_name
    return in_activation_dtype(adapted)


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has wrapped the model."""
    return hasattr(model, "peft_config")


def _short_names(chosen: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """Last parts (q_proj ..) where these pick exactly the chosen modules, which reads better; else the full names."""
    chosen = set(chosen)
    last = {name.rsplit(".", 1)[-1] for name in chosen}
    picked = {name for name in all_names if name.rsplit(".", 1)[-1] in last}
    return sorted(last if picked == chosen else chosen)


class _LoraLinear(nn.Linear):
    """A or B of an adapter: a float32 weight, used in the dtype of the activations.

    Peft would cast the activations to the weight's dtype instead, and backward keep a float32 copy of them per adapter.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of the input."""
        return linear(input, self.weight, self.bias)


def in_activation_dtype(adapted: PeftModel) -> PeftModel:
    """Let the adapters compute in the dtype of the activations, in place."""
    from peft.tuners.lora import LoraLayer

    for module in adapted.modules():
        if not isinstance(module, LoraLayer):
            continue
        linears = [*module.lora_A.values(), *module.lora_B.values()]
        if linears and all(type(layer) is nn.Linear for layer in linears):  # others, of convolutions say, stay peft's
            module.cast_input_dtype_enabled = False
            for layer in linears:
                layer.__class__ = _LoraLinear
    return adapted


@contextlib.contextmanager
def _weights_not_computed(layers: Iterable[Any]) -> Iterator[None]:
    """Give peft a blank of the right shape, dtype and device where a layer would compute its weight at each access.

    Peft asks for it some 20 times per layer, and reads no value of it.
    """
    kinds: dict[Any, type] = {}
    for layer in layers:
        kind = type(layer)
        if isinstance(getattr(kind, "weight", None), property):
            device = next((x.device for x in (*layer.buffers(), *layer.parameters())), None)
            blank_OI = torch.zeros((), device=device).expand(layer.out_features, layer.in_features)
            kinds[layer] = kind
            layer.__class__ = type(kind.__name__, (kind,), {"weight": blank_OI})
    try:
        yield
    finally:
        for layer, kind in kinds.items():
            layer.__class__ = kind


@contextlib.contextmanager
def rename_notice_ignored() -> Iterator[None]:
    """Silence transformers about an attribute that it renames and peft still reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield
