"""A model loaded straight to where it runs: spread over devices, offloaded, or with its weights quantised on the way.

Owns what transformers' `from_pretrained` is told about it. Does not own which runtimes can have such a model: the
caller refuses the others.
"""

from __future__ import annotations

import importlib
import logging
import re
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from qat_lora.errors import ConfigError, DeviceError, ModelError

Model = TypeVar("Model", bound=nn.Module)
Quantization = Literal["", "8bit", "4bit"]


@dataclass(frozen=True)
class Placement:
    """Where a model's weights go when they are read, and how wide they become.

    Attributes:
        device: the runtime's; without `spread` all weights go there.
        dtype: of the weights, and of the products of 4bit.
        spread: accelerate shares the layers out over the GPUs, then the host's memory, and leaves the rest on disk.
        max_memory: bytes by device, a GPU's number or "cpu" or "mps", that `spread` may take; empty: what is free.
        quantization: of the Linears but the head, by bitsandbytes. 8bit multiplies in float16 whatever `dtype` is; 4bit
            is NF4 with a scale per 64 weights.
    """

    device: torch.device
    dtype: torch.dtype
    spread: bool = False
    max_memory: Mapping[int | str, int] = field(default_factory=dict)
    quantization: Quantization = ""

    def check(self, folder: Path, config: Any) -> None:
        """Raise an error where the device, or the model of a folder by its config, does not allow this placement."""
        if absent := [place for place in self.max_memory if place not in self._free_memory()]:
            there = ", ".join(map(str, self._free_memory()))
            raise ConfigError(
                f"max_memory names {absent[0]}, but --device {self.device.type} has {there}; bound these, or use "
                "another --device."
            )
        if self.quantization and getattr(config, "quantization_config", None):
            raise ModelError(
                f"{folder} holds weights that are quantised already (its config.json has a quantization_config), so "
                f"they cannot become {self.quantization}; drop --quantize-teacher."
            )
        if self.quantization and self.device.type not in (known := _bitsandbytes_devices()):
            raise DeviceError(
                f"--quantize-teacher {self.quantization} needs bitsandbytes, which knows {', '.join(sorted(known))} "
                f"but not {self.device.type}; use another --device, or drop --quantize-teacher."
            )

    def load(self, load: Callable[..., Model]) -> Model:
        """Call `load` with keywords for `from_pretrained`; what it writes to disk is deleted with the model."""
        scratch = tempfile.TemporaryDirectory(prefix="qat_lora-offload-")
        model = load(**self._words(scratch.name))
        weakref.finalize(model, scratch.cleanup)
        return model

    def _words(self, scratch: str) -> dict[str, Any]:
        words: dict[str, Any] = {"device_map": {"": self.device}}
        if self.spread:
            words = {"device_map": "auto", "offload_folder": scratch}
            # Without it `auto` would take all GPUs, also where the CPU was asked for; with it, only what is named.
            if self.max_memory or self.device.type == "cpu":
                words["max_memory"] = self._free_memory() | dict(self.max_memory)
        if self.quantization:
            how: dict[str, Any] = {"load_in_8bit": True}
            if self.quantization == "4bit":
                compute = str(self.dtype).removeprefix("torch.")
                how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": compute}
            words["quantization_config"] = {"quant_method": "bitsandbytes", **how}
        return words

    def _free_memory(self) -> dict[int | str, int]:
        """Nine tenths of what is free at each place that may be taken: only the host where it is the device."""
        from accelerate.utils import get_max_memory

        on_host = self.device.type == "cpu"
        return {place: int(0.9 * size) for place, size in get_max_memory().items() if place == "cpu" or not on_host}


def memory_bytes(max_memory: Sequence[str]) -> dict[int | str, int]:
    """Read ``device=size`` words as bytes by device: the number of a GPU, "cpu" or "mps"."""
    found: dict[int | str, int] = {}
    for word in max_memory:
        match = re.fullmatch(r"([0-9]+|cpu|mps)=([0-9]+(?:\.[0-9]+)?)([KMGT])(i?)B", word)
        if match is None:
            raise ConfigError(
                f"max_memory takes device=size with a GPU's number, cpu or mps, but got {word!r}; write --max-memory "
                "0=20GiB,cpu=64GiB."
            )
        device, size, unit, binary = match.groups()
        factor = (1024 if binary else 1000) ** ("KMGT".index(unit) + 1)
        found[int(device) if device.isdecimal() else device] = int(float(size) * factor)
    return found


def places_of(model: nn.Module) -> str:
    """Say how many modules are on which device."""
    found = Counter(str(place) for place in getattr(model, "hf_device_map", {}).values())
    return ", ".join(f"{count} on {place}" for place, count in found.items()) or "all on one device"


def _bitsandbytes_devices() -> set[str]:
    try:
        library = importlib.import_module("bitsandbytes")
    except ImportError:
        raise ModelError(
            "--quantize-teacher needs the package 'bitsandbytes'; pip install 'qat_lora[bitsandbytes]', or drop it."
        ) from None
    # It warns at each 8-bit product of each batch that this is computed in float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    return set(getattr(library, "supported_torch_devices", {"cuda"}))
