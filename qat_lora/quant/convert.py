"""Conversions of whole models, in place: Linear -> QuantLinear -> CodedLinear -> Linear.

Owns the walk over a model and the report of what changed. Which Linears to quantise is the caller's list; how
one layer is converted stands in `linear`. Layers are found wherever they sit, a peft wrapper's ``base_layer``
included, and a layer reachable by two names stays one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from qat_lora.config import LinearQuant, QuantScheme
from qat_lora.errors import ConfigError, ModelError, did_you_mean
from qat_lora.quant.linear import CodedLinear, QuantLinear

QuantPart = Literal["weights", "scales", "luts"]


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        changed: names of the layers replaced, in the model's order.
        became: the class they are now.
    """

    changed: tuple[str, ...]
    became: str

    def __str__(self) -> str:
        """One line for a log."""
        return f"{len(self.changed)} layers became {self.became}"


def quantize_model(
    model: nn.Module, scheme: QuantScheme, targets: Mapping[str, str], *, search: bool = True
) -> ConversionReport:
    """Replace Linears by QuantLinears.

    Args:
        model: changed in place.
        scheme: the form for each role.
        targets: name of a Linear -> its role, ``mlp`` or ``attention``.
        search: find the initial scales; False leaves them blank, for a state dict that is loaded next.
    """
    plan = [(*_find_linear(model, name), _form(scheme, name, role)) for name, role in targets.items()]
    for name, linear, form in plan:
        if search and not bool(torch.isfinite(linear.weight).all()):
            raise ModelError(
                f"{name} holds weights that are not finite; check the checkpoint that the model came from."
            )
        _replace(model, linear, QuantLinear.from_linear(linear, form, search=search))
    return ConversionReport(tuple(name for name, _, _ in plan), QuantLinear.__name__)


def freeze_codes(model: nn.Module) -> ConversionReport:
    """Replace every QuantLinear by a CodedLinear of its codes: same outputs, nothing left to train."""
    return _convert(model, lambda m: CodedLinear.from_quant_linear(m) if isinstance(m, QuantLinear) else None)


@torch.no_grad()
def to_dense(model: nn.Module) -> ConversionReport:
    """Replace every QuantLinear and CodedLinear by a Linear of the rounded weight in float32, bit for bit."""
    return _convert(model, _dense)


def quant_parameters(model: nn.Module, part: QuantPart) -> dict[str, nn.Parameter]:
    """Parameters of the QuantLinears by name: master ``weights``, ``scales`` (with offsets), or ``luts``."""
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        if not isinstance(module, QuantLinear):
            continue
        prefix = f"{name}." if name else ""
        if part == "weights":
            found[f"{prefix}weight"] = module.get_parameter("weight")
            continue
        for inner, parameter in module.quantizer.named_parameters():
            if (inner == "levels_N") == (part == "luts"):
                found[f"{prefix}quantizer.{inner}"] = parameter
    return found


def _dense(module: nn.Module) -> nn.Linear | None:
    if isinstance(module, QuantLinear):
        return _linear_of(module, module.quantizer(module.weight))
    return _linear_of(module, module.weight) if isinstance(module, CodedLinear) else None


def _linear_of(layer: nn.Linear, weight_OI: Tensor) -> nn.Linear:
    dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    dense.weight = nn.Parameter(weight_OI.detach())
    if layer.bias is not None:
        dense.bias = nn.Parameter(layer.bias.detach().clone())
    return dense.train(layer.training)


def _convert(model: nn.Module, convert: Callable[[nn.Module], nn.Linear | None]) -> ConversionReport:
    changed: list[str] = []
    kinds: set[str] = set()
    names = [name for name, m in model.named_modules() if name and isinstance(m, QuantLinear | CodedLinear)]
    for name in names:
        module = model.get_submodule(name)  # one at a time, so that each old weight is freed before the next
        layer = convert(module)
        if layer is not None:
            _replace(model, module, layer)
            changed.append(name)
            kinds.add(type(layer).__name__)
    return ConversionReport(tuple(changed), ", ".join(sorted(kinds)) or "nothing")


def _replace(model: nn.Module, old: nn.Module, layer: nn.Module) -> None:
    for parent, child_name, child in list(_edges(model)):
        if child is old:
            setattr(parent, child_name, layer)


def _edges(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    # Through _modules and not named_children: that skips the second name of a shared layer.
    for parent in model.modules():
        for child_name, child in parent._modules.items():
            if child is not None:
                yield parent, child_name, child


def _find_linear(model: nn.Module, name: str) -> tuple[str, nn.Linear]:
    modules = dict(model.named_modules(remove_duplicate=False))
    if name not in modules:
        raise ModelError(f"the model has no layer {name!r} to quantise.{did_you_mean(name, modules)}")
    module = modules[name]
    if not isinstance(module, nn.Linear) and f"{name}.base_layer" in modules:
        name, module = f"{name}.base_layer", modules[f"{name}.base_layer"]
    if not isinstance(module, nn.Linear) or isinstance(module, QuantLinear | CodedLinear):
        raise ModelError(
            f"{name} is a {type(module).__name__}, and only a plain Linear can be quantised; drop it from the targets."
        )
    return name, module


def _form(scheme: QuantScheme, name: str, role: str) -> LinearQuant:
    if role not in ("mlp", "attention"):
        raise ConfigError(f"{name} has role {role!r}, and a scheme knows 'mlp' and 'attention'; name one of these.")
    return scheme.mlp if role == "mlp" else scheme.attention
