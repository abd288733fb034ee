"""Adapters put on a student and taken off again.

They are peft's own: y = base(x) + (alpha / r) * B(A(dropout(x))), A [r, in], B [out, r], B zero at the start.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qat_lora.adapters.where import adapted_linears, short_names
from qat_lora.config import AdapterConfig
from qat_lora.models.lean.products import linear

if TYPE_CHECKING:
    from peft import PeftModel


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
        target_modules=short_names(chosen, [name for name, _ in model.named_modules()]),
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


def merged(model: PeftModel) -> nn.Module:
    """Fold the adapters into dense weights and drop them; the base must hold ordinary nn.Linear layers."""
    joined: Any = model.merge_and_unload()
    return joined


def without(model: PeftModel) -> nn.Module:
    """Take the adapters out again and return the base model."""
    base: Any = model.unload()
    return base


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
