"""Adapters as tensors, for checkpoints, and as folders in peft's own format."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from qat_lora.adapters.attach import in_activation_dtype, rename_notice_ignored
from qat_lora.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from peft import PeftModel


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
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
            held = set(file.keys())
        with rename_notice_ignored(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*missing adapter keys.*")  # said below, as an error
            adapted = PeftModel.from_pretrained(model, str(folder))
    except (SafetensorError, ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"adapters cannot be read from {folder} ({first_line(error)}); export them again."
        ) from None
    if odd := sorted(held ^ adapter_tensors(adapted).keys()):
        raise CheckpointError(f"adapters in {folder} do not fill their own placement ({odd[0]!r}); export them again.")
    return in_activation_dtype(adapted)
