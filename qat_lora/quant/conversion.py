"""Conversions of models, in place: Linear -> QuantLinear -> CodedLinear -> Linear.

Each returns the names that it changed. Owns the walk over a model, and what is refused; how one layer is converted
is in `layers`, and which Linears to quantise is the caller's list. Layers are found wherever they are, a peft
wrapper's ``base_layer`` included, and a layer reachable by two names stays one layer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import torch
from torch import nn

from qat_lora.config import LinearQuant, QuantScheme
from qat_lora.errors import ConfigError, ModelError, did_you_mean
from qat_lora.quant.layers import CodedLinear, QuantLinear

log = logging.getLogger(__name__)

LINE_SECONDS = 10.0  # at least, between two words on how far a long search is
QuantPart = Literal["weights", "scales", "luts"]


def quantize_model(
    model: nn.Module, scheme: QuantScheme, targets: Mapping[str, str], *, search: bool = True
) -> tuple[str, ...]:
    """Replace Linears by QuantLinears.

    Args:
        model: changed in place.
        scheme: the form for each role.
        targets: name of a Linear -> its role, ``mlp`` or ``attention``.
        search: find the initial scales; False leaves them blank, for a state dict that is loaded next.
    """
    plan = [(*_find_linear(model, name), _config_of(scheme, name, role)) for name, role in targets.items()]
    _check_own_weights(model, [linear for _, linear, _ in plan])
    told = time.monotonic()
    for number, (name, linear, config) in enumerate(plan, 1):
        if search:
            _check_finite(name, linear)
            if time.monotonic() - told >= LINE_SECONDS:
                log.info("rounding layer %d/%d", number, len(plan))
                told = time.monotonic()
        _replace(model, linear, QuantLinear.from_linear(linear, config, search=search))
    return tuple(name for name, _, _ in plan)


def freeze_codes(model: nn.Module) -> tuple[str, ...]:
    """Replace every QuantLinear by a CodedLinear of its codes: same outputs, nothing left to train."""
    return _convert(model, (QuantLinear,), CodedLinear.from_quant_linear)


@torch.no_grad()
def to_dense(model: nn.Module) -> tuple[str, ...]:
    """Replace every QuantLinear and CodedLinear by a Linear of the rounded weight in float32, bit for bit."""
    return _convert(model, (QuantLinear, CodedLinear), _dense)


def quant_parameters(model: nn.Module, part: QuantPart) -> dict[str, nn.Parameter]:
    """Parameters of the QuantLinears by name: master ``weights``, ``scales`` (with offsets), or ``luts``."""
    parts: dict[str, QuantPart] = {"weight": "weights", "quantizer.levels_N": "luts"}
    return {
        f"{name}.{inner}".removeprefix("."): parameter
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear)
        for inner, parameter in module.named_parameters()
        if inner != "bias" and parts.get(inner, "scales") == part
    }


def _dense(layer: QuantLinear | CodedLinear) -> nn.Linear:
    dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    weight_OI = layer.quantizer(layer.weight) if isinstance(layer, QuantLinear) else layer.weight
    dense.weight = nn.Parameter(weight_OI.detach())
    if layer.bias is not None:
        dense.bias = nn.Parameter(layer.bias.detach().clone())
    return dense.train(layer.training)


def _convert(
    model: nn.Module, kinds: tuple[type[nn.Linear], ...], convert: Callable[[Any], nn.Linear]
) -> tuple[str, ...]:
    names = tuple(name for name, m in model.named_modules() if name and isinstance(m, kinds))
    for name in names:
        module = model.get_submodule(name)  # one at a time, so that each old weight is freed before the next
        _check_finite(name, module)
        _replace(model, module, convert(module))
    return names


def _replace(model: nn.Module, old: nn.Module, layer: nn.Module) -> None:
    for parent in list(model.modules()):
        for child_name, child in parent._modules.items():  # named_children skips the second name of a shared layer
            if child is old:
                setattr(parent, child_name, layer)


def _find_linear(model: nn.Module, name: str) -> tuple[str, nn.Linear]:
    modules = dict(model.named_modules(remove_duplicate=False))
    if name not in modules:
        raise ModelError(f"the model has no layer {name!r} to quantise.{did_you_mean(name, modules)}")
    module = modules[name]
    if not isinstance(module, nn.Linear) and f"{name}.base_layer" in modules:
        name, module = f"{name}.base_layer", modules[f"{name}.base_layer"]
    if type(module) is not nn.Linear:  # a subclass may compute something else, which would be lost
        raise ModelError(
            f"{name} is a {type(module).__name__}, and only a plain Linear can be quantised; drop it from the targets."
        )
    return name, module


def _config_of(scheme: QuantScheme, name: str, role: str) -> LinearQuant:
    if role not in ("mlp", "attention"):
        raise ConfigError(f"{name} has role {role!r}, and a scheme knows 'mlp' and 'attention'; give one of these.")
    config: LinearQuant = getattr(scheme, role)
    return config


def _check_finite(name: str, layer: nn.Module) -> None:
    """Refuse a NaN or an infinity: it would round to a finite code, and nobody would see it."""
    for key, x in layer.state_dict().items():
        if x.is_floating_point() and not x.is_meta and not bool(torch.isfinite(x).all()):
            raise ModelError(
                f"{name} holds weights that are not finite ({key}); check the checkpoint that they came from."
            )


def _check_own_weights(model: nn.Module, linears: Collection[nn.Linear]) -> None:
    """Refuse a Parameter that two modules share: each would round and train a copy of it."""
    owners: dict[nn.Parameter, dict[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, {})[name] = module
    for of_one in owners.values():
        if len(of_one) > 1 and any(module in linears for module in of_one.values()):
            first, second, *_ = of_one
            raise ModelError(
                f"{first} and {second} share one weight, and each would round and train its own copy; leave both out "
                "of the targets, or separate them in the model."
            )
