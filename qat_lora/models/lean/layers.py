"""A decoder's list of layers: where it is, whether its layers are alike, and the list that runs them as one.

Knows nothing of transformers but where a model's decoder is, and that it loops over a list of layers, sliced or not,
and calls each with the hidden states and keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from qat_lora.errors import ModelError
from qat_lora.models.families import causal_lm, decoder

Scan: TypeAlias = Callable[[nn.ModuleList, Tensor, dict[str, Any]], Tensor]
"""Runs layers one after another on hidden states, each with the same keywords."""

_PLAIN = (int, float, bool, str, type(None), torch.dtype)
_OF_NO_CONSEQUENCE = {"training", "layer_idx"}


def why_unlike(layers: Sequence[nn.Module], config: Any) -> str:
    """Say why a layer computes something else than layer 0, or draws random numbers; empty where none does."""
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if len(kinds) > 1:
        return f"they attend in {len(kinds)} ways ({', '.join(kinds)})"
    first = _signature(layers[0])
    for index, layer in enumerate(layers):
        other = _signature(layer)
        for name in (*first, *other):
            if first.get(name) != other.get(name):
                return f"{name.rstrip(':') or 'the layer itself'} differs between layer 0 and layer {index}"
        for name, module in layer.named_modules():
            if isinstance(module, nn.Dropout) and module.p > 0:
                return f"{name} drops out with p={module.p}, and backward would draw other numbers"
    if getattr(config, "attention_dropout", 0.0):
        return f"attention drops out with p={config.attention_dropout}"
    return ""


def trunk_and_layers(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The largest list of modules in a model's decoder, which are its layers, and the module that holds and runs it.

    A tower for images may have a larger one. Raises ModelError where there is none.
    """
    start = decoder(model) if hasattr(causal_lm(model), "get_decoder") else model
    lists = [
        (parent, child) for parent in start.modules() for child in parent.children() if type(child) is nn.ModuleList
    ]
    if not lists:
        raise ModelError(f"{type(model).__name__} has no list of layers to divide; drop --shard.")
    return max(lists, key=lambda pair: sum(x.nbytes for x in (*pair[1].parameters(), *pair[1].buffers())))


class ScannedLayers(nn.ModuleList):
    """The same modules under the same names; a loop over all of them gets one callable that runs them all."""

    def __init__(self, layers: nn.ModuleList, scan: Scan) -> None:
        super().__init__(layers)
        self._scan = scan

    def __iter__(self) -> Iterator[Any]:
        """Yield what runs them all."""
        return iter([self._run])

    def __getitem__(self, index: Any) -> Any:
        """A single layer, or, for all of them, a list of what runs them all."""
        if isinstance(index, slice):
            is_all = index.indices(len(self)) == (0, len(self), 1)
            return [self._run] if is_all else list(self._modules.values())[index]
        return super().__getitem__(index)

    def _run(self, hidden_BTH: Tensor, **shared: Any) -> Tensor:
        if shared.get("past_key_values") is None:
            return self._scan(nn.ModuleList(self._modules.values()), hidden_BTH, shared)
        for layer in self._modules.values():  # generation writes a cache per layer
            hidden_BTH = layer(hidden_BTH, **shared)
        return hidden_BTH


def _signature(layer: nn.Module) -> dict[str, Any]:
    """What a trace of the layer depends on: classes, settings, and shape and dtype of every tensor, by name."""
    found: dict[str, Any] = {}
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if k not in _OF_NO_CONSEQUENCE and isinstance(v, _PLAIN)}
        plain["scaling"] = getattr(module, "scaling", None)  # a number in attention, a dict in peft's layers
        own_config = getattr(module, "config", None)
        if own_config is not None and not hasattr(own_config, "layer_types"):
            plain["config"] = own_config  # a LinearQuant
        found[name] = (type(module), plain)
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        found[f"{name}:"] = (tensor.shape, tensor.dtype)
    return found
