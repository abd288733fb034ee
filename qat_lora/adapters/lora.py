"""Recovery LoRA on top of peft: where it goes, how it is attached, saved, loaded and merged.

The adapters are peft's own: y = base(x) + (alpha / r) * B(A(dropout(x))), A [r, in], B [out, r], B zero at the start.
This file only decides their placement, after Apple's quality-recovery adapters: q, v, o and the MLP, but not k.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from qat_lora.config import AdapterConfig
from qat_lora.errors import CheckpointError, ConfigError
from qat_lora.models.lean.products import linear

if TYPE_CHECKING:
    from peft import PeftModel

_KEY_PROJECTIONS = ("k_proj", "key", "key_proj", "wk")


def placement(targets: Mapping[str, str], config: AdapterConfig) -> list[str]:
    """Names of the Linears to adapt, out of the block Linears and their role (see `models.target_linears`)."""
    chosen = [
        name
        for name, role in targets.items()
        if role == "mlp"
        or (not config.mlp_only and (config.include_k_proj or name.rsplit(".", 1)[-1] not in _KEY_PROJECTIONS))
    ]
    if not chosen:
        raise ConfigError("no Linear is left to adapt; drop --mlp-only.")
    return chosen


class _LoraLinear(nn.Linear):
    """A or B of an adapter: a float32 weight, used in the dtype of the activations.

    Peft would cast the activations to the weight's dtype instead, and backward keep a float32 copy of them per adapter.
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of the input."""
        return linear(input, self.weight, self.bias)


def _in_activation_dtype(adapted: PeftModel) -> PeftModel:
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


def attach(model: nn.Module, targets: Mapping[str, str], config: AdapterConfig, *, base_name: str) -> PeftModel:
    """Wrap a frozen student with fresh adapters; only they require gradients.

    `base_name` goes into adapter_config.json.
    """
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    chosen = placement(targets, config)
    lora = LoraConfig(
        r=config.recovery_r,
        lora_alpha=config.recovery_alpha,
        lora_dropout=config.recovery_dropout,
        target_modules=_short_names(chosen, [name for name, _ in model.named_modules()]),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with _rename_notice_ignored():
        adapted = get_peft_model(model, lora)
    adapted.peft_config["default"].base_model_name_or_path = base_name
    return _in_activation_dtype(adapted)


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has wrapped the model."""
    return hasattr(model, "peft_config")


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' tensors, under peft's own file names."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, save_embedding_layers=False)  # they are the base model's


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors of `adapter_tensors` back; raises CheckpointError unless they are just the ones the model has."""
    from peft import set_peft_model_state_dict

    if (ours := adapter_tensors(model).keys()) != tensors.keys():
        odd = sorted(ours ^ tensors.keys())[0]
        raise CheckpointError(f"the adapters differ from this placement ({odd!r}); use the settings of their own run.")
    set_peft_model_state_dict(model, dict(tensors))


def save(model: PeftModel, folder: Path, *, base_name: str) -> None:
    """Write the adapters in peft's own format, naming the model that they belong on."""
    model.peft_config["default"].base_model_name_or_path = base_name
    model.save_pretrained(str(folder), save_embedding_layers=False)  # they are the base model's


def load(model: nn.Module, folder: Path) -> PeftModel:
    """Load adapters in peft's format on top of a model, as plain peft does; raises CheckpointError where none are."""
    from peft import PeftModel
    from safetensors import SafetensorError, safe_open

    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} holds no {name}; give a folder in peft's format.")
    try:
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as stored:
            held = set(stored.keys())
        with _rename_notice_ignored(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*missing adapter keys.*")  # said below, as an error
            adapted = PeftModel.from_pretrained(model, str(folder))
    except (SafetensorError, ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise CheckpointError(f"adapters cannot be read from {folder} ({reason}); export them again.") from None
    if odd := sorted(held ^ adapter_tensors(adapted).keys()):
        raise CheckpointError(f"adapters in {folder} do not fill their own placement ({odd[0]!r}); export them again.")
    return _in_activation_dtype(adapted)


def merged(model: PeftModel) -> nn.Module:
    """Fold the adapters into dense weights and drop them; the base must hold ordinary nn.Linear layers."""
    joined: Any = model.merge_and_unload()
    return joined


def without(model: PeftModel) -> nn.Module:
    """Take the adapters out again and return the base model."""
    base: Any = model.unload()
    return base


def _short_names(chosen: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """Last parts (q_proj ..) where these pick exactly the chosen modules, which reads better; else the full names."""
    chosen = set(chosen)
    last = {name.rsplit(".", 1)[-1] for name in chosen}
    picked = {name for name in all_names if name.rsplit(".", 1)[-1] in last}
    return sorted(last if picked == chosen else chosen)


@contextlib.contextmanager
def _rename_notice_ignored() -> Iterator[None]:
    """Silence transformers about an attribute that it renames and peft still reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield
