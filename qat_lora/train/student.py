"""The student: made from a model by rounding, read back from a checkpoint, and what of it is trained."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qat_lora import adapters, models
from qat_lora.config import AdapterConfig, QuantScheme, RecoveryRun
from qat_lora.errors import CheckpointError, ConfigError
from qat_lora.quant import CodedLinear, QuantLinear, QuantPart, freeze_codes, quant_parameters, quantize_model
from qat_lora.settings import from_json
from qat_lora.train.checkpoint import check_identity, load_checkpoint

Parameters = dict[str, nn.Parameter]


@dataclass(frozen=True)
class Student:
    """A model whose block Linears are quantised, and the names of its parameters that are trained.

    `scales` are those that learn more slowly and are never decayed. Names, since placing makes other objects.
    """

    model: nn.Module
    scheme: QuantScheme
    weights: tuple[str, ...]
    scales: tuple[str, ...] = ()

    def parameters(self, names: Collection[str]) -> Parameters:
        """The parameters of these names as the model now holds them."""
        return {name: self.model.get_parameter(name) for name in names}


def round_to_nearest(model: nn.Module, scheme: QuantScheme) -> None:
    """Turn a model into a student in place, its initial scales found by error search."""
    quantize_model(model, scheme, models.target_linears(model))


def load_student(loaded: models.Loaded, path: Path) -> tuple[nn.Module, QuantScheme]:
    """Turn a freshly loaded model into the student of a checkpoint of ``qat`` or ``recover``.

    Returns the model, wrapped by peft where the checkpoint holds adapters, without dropout, and its scheme. Raises
    CheckpointError where the checkpoint was made from another model.
    """
    content = load_checkpoint(path)
    check_identity(content, loaded.identity, path)
    return restored(loaded.model, content, path).eval(), from_json(QuantScheme, content["scheme"])


def restored(model: nn.Module, content: dict[str, Any], path: Path) -> nn.Module:
    """Put a checkpoint's student onto a full-precision model, in place but for the adapters' wrapper."""
    scheme = from_json(QuantScheme, content["scheme"])
    quantize_model(model, scheme, models.target_linears(model), search=False)
    if content["kind"] == RecoveryRun.command:
        freeze_codes(model)
    _load_tensors(model, content["tensors"], path)
    if content["kind"] != RecoveryRun.command:
        return model
    config = from_json(AdapterConfig, content["run"]["adapter"])
    adapted = adapters.attach(model, models.target_linears(model), config, base_name=content["identity"]["name"])
    adapters.load_tensors(adapted, content["adapters"])
    return adapted


def student_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Everything that quantisation put in: master weights or codes, scales, offsets, levels, biases.

    Under the names that the layers have in the plain model, whether or not peft has wrapped it.
    """
    return {
        f"{name.removesuffix('.base_layer')}.{key}": tensor
        for name, layer in models.causal_lm(model).named_modules()
        if isinstance(layer, QuantLinear | CodedLinear)
        for key, tensor in layer.state_dict(keep_vars=True).items()
    }


def trained_parameters(model: nn.Module, train: Collection[QuantPart]) -> tuple[Parameters, Parameters]:
    """Mark what QAT trains and freeze all else; return the weights, and the scales, offsets and LUTs, by name."""
    model.requires_grad_(False)
    found = {part: quant_parameters(model, part) for part in train}
    weights, scales = found.get("weights", {}), found.get("scales", {}) | found.get("luts", {})
    if not weights and not scales:
        raise ConfigError(f"train={tuple(train)} names nothing that this scheme has; add weights or scales.")
    for parameter in (*weights.values(), *scales.values()):
        parameter.requires_grad_(True)
    return weights, scales


def _load_tensors(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    ours = student_tensors(model)
    if ours.keys() != tensors.keys():
        odd = sorted(ours.keys() ^ tensors.keys())[0]
        raise CheckpointError(f"{path} does not fit the model ({odd!r} differs); give the model that it was made from.")
    for name, tensor in ours.items():
        if tensor.shape != tensors[name].shape:
            raise CheckpointError(
                f"{path} holds {name} of shape {tuple(tensors[name].shape)}, the model needs {tuple(tensor.shape)}; "
                "give the model that it was made from."
            )
        tensor.data.copy_(tensors[name])
