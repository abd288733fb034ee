"""All TPU chips from one process, by GSPMD: one program whose tensors are marked with how they lie on the chips.

Batches are divided among the chips. The model is on each of them, or it is divided as well, each matrix along one
side: what torch_xla calls FSDPv2, without its wrapper, which would rename every parameter. The compiler puts in what
the chips must send to each other.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qat_lora.config import Sync
from qat_lora.errors import ConfigError, DeviceError
from qat_lora.models.lean.layers import trunk_and_layers
from qat_lora.runtime.xla.device import CHIPS_VARIABLE, XlaRuntime

_AXIS = "chip"  # the one axis of the mesh


class SpmdRuntime(XlaRuntime):
    """`Runtime` for all devices of a host as one: an `XlaRuntime`.

    `spreads_model` says whether the model is divided among the devices, or lies on each of them.
    """

    def __init__(
        self, *, dtype: str = "auto", sync: Sync = "phase", cache_dir: Path | None = None, spreads_model: bool = True
    ) -> None:
        super().__init__(dtype=dtype, sync=sync, cache_dir=cache_dir)
        self._spreads_model = spreads_model
        self._mesh = self._spmd.Mesh(np.arange(self.devices), (self.devices,), (_AXIS,))
        # what torch_xla asks of a batch's tensors, which have the rows of all devices
        self._input_sharding = SimpleNamespace(minibatch=False, xla_spec=self._spec_by_rows)

    def _configure(self) -> None:
        import torch_xla.distributed.spmd as spmd
        import torch_xla.runtime as xr

        xr.use_spmd()
        self._spmd, self.devices = spmd, xr.global_runtime_device_count()
        if xr.process_count() > 1:
            raise DeviceError(
                f"--shard spmd is for the chips of one host, but there are {xr.process_count()} processes; run on one "
                "host, or a process per chip with --num-chips 0."
            )
        asked = os.environ.get(CHIPS_VARIABLE, str(self.devices))
        if asked != str(self.devices):
            raise ConfigError(
                f"{CHIPS_VARIABLE}={asked}, but one program for all chips takes all {self.devices}; unset it, or use a "
                "process per chip with --num-chips."
            )

    def place(self, model: nn.Module) -> nn.Module:
        """Mark how it lies on the devices, too; what leaves a layer is divided by rows."""
        super().place(model)
        for tensor in (*model.parameters(), *model.buffers()):
            self._spread(tensor)
        for layer in trunk_and_layers(model)[1]:
            layer.register_forward_hook(lambda _module, _inputs, output: self._output_by_rows(output))
        self.mark_step("set-up")
        return model

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """The first time, mark gradients and the optimizer's moments like the weights."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        is_first = any(p.grad is None for p in parameters)
        super().zero_grad(optimizer)
        if is_first:
            for p in parameters:
                for tensor in (p, p.grad, *optimizer.state[p].values()):
                    if tensor.shape == p.shape:
                        self._spread(tensor)

    def scatter_like(self, whole: Tensor, like: Tensor) -> Tensor:
        """Spread over the devices as a tensor of the model is."""
        x = super().scatter_like(whole, like)
        self._spread(x)
        return x

    def _rows_per_turn(self, rows: int, size: int) -> int:
        """A turn of a loop takes `size` rows of each device."""
        return rows if rows % self.devices else self.devices * super()._rows_per_turn(rows // self.devices, size)

    def _split_rows(self, x: Tensor, part: int) -> Tensor:
        """[rows, ...] -> [turns, part, ...]: each turn has rows of every device, or they would work in turn."""
        own_parts = x.unflatten(0, (self.devices, -1, part // self.devices))
        return self._marked(own_parts.transpose(0, 1).flatten(1, 2), dim=1)

    def _join_rows(self, x: Tensor) -> Tensor:
        own_parts = x.unflatten(1, (self.devices, -1))
        return self._marked(own_parts.transpose(0, 1).flatten(0, 2), dim=0)

    def _spread(self, tensor: Tensor) -> None:
        """Divide a tensor along its first side that can be divided; vectors lie on each device whole.

        Not along the longest, as FSDPv2 does: groups of a quantised weight lie along its inputs, the second side, and a
        device would have to ask others for the rest of a group.
        """
        sides = (dim for dim, length in enumerate(tensor.shape) if length % self.devices == 0)
        self._marked(tensor, next(sides, None) if self._spreads_model and tensor.dim() > 1 else None)

    def _output_by_rows(self, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._by_rows(output[0]), *output[1:])
        return self._by_rows(output)

    def _by_rows(self, x: Tensor) -> Tensor:
        return self._marked(x, self._side_of_rows(x))

    def _spec_by_rows(self, x: Tensor) -> Any:
        return self._spmd.ShardingSpec(self._mesh, _partition(x, self._side_of_rows(x))).xla_spec(x)

    def _side_of_rows(self, x: Tensor) -> int | None:
        """The side along which a tensor's rows are divided; None where they cannot be."""
        return 0 if x.dim() and x.shape[0] % self.devices == 0 else None

    def _marked(self, x: Tensor, dim: int | None) -> Tensor:
        """Say that a tensor is divided along `dim`, or that it lies on each device whole."""
        self._spmd.mark_sharding(x, self._mesh, _partition(x, dim))
        return x


def _partition(x: Tensor, dim: int | None) -> tuple[str | None, ...]:
    return tuple(_AXIS if i == dim else None for i in range(x.dim()))
