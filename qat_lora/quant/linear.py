"""Two Linears: `QuantLinear` trains a master weight through its rounding, `CodedLinear` holds frozen codes.

Owns the modules and what they save for backward. Moving a model from one to the other is `convert`'s work;
neither class has a mode flag, and both pass the gradient to their input whatever is frozen.

Shapes: O out features, I in features, G groups along I, R rank, N levels, P packed bytes in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qat_lora.config import LinearQuant
from qat_lora.models.lean import products
from qat_lora.quant.init import InitialState, search_initial_state
from qat_lora.quant.packing import pack, packed_bytes, unpack
from qat_lora.quant.primitives import dequantize, fake_quantize, level_values, quantize, round_through
from qat_lora.quant.scales import GroupScale, LowRankScale, group_count, multiply_factors

Layer = TypeVar("Layer", "QuantLinear", "CodedLinear")


class Quantizer(nn.Module):
    """Rounds a weight [O, I] to S * L[I] (+ Z) with gradients; holds S, L and Z.

    Attributes:
        config: the form.
        scale: `GroupScale` or `LowRankScale`; called without arguments it gives S as stored.
        levels_N: the grid; a Parameter for ``lut``, else a buffer that no checkpoint holds.
        offset_OG: Parameter for ``affine``, else None.
    """

    levels_N: Tensor

    def __init__(self, config: LinearQuant, state: InitialState) -> None:
        """Take over a searched state."""
        super().__init__()
        self.config = config
        self.scale_dtype: torch.dtype = getattr(torch, config.scale_dtype)
        self.scale: GroupScale | LowRankScale
        if state.factors is None:
            self.scale = GroupScale(state.scale_OG, self.scale_dtype)
        else:
            self.scale = LowRankScale(*state.factors, self.scale_dtype)
        levels_N = state.levels_N.to(state.scale_OG.device)
        if config.levels == "lut":
            self.levels_N = nn.Parameter(levels_N)
        else:
            self.register_buffer("levels_N", levels_N, persistent=False)
        self.offset_OG = None if state.offset_OG is None else nn.Parameter(state.offset_OG)

    @classmethod
    def blank(
        cls,
        config: LinearQuant,
        out_features: int,
        in_features: int,
        device: torch.device | str | None = None,
    ) -> Quantizer:
        """A quantiser whose scales are all 0, to load a state dict into."""
        zeros_OG = torch.zeros(out_features, group_count(in_features, config), device=device)
        factors = None
        if config.scales == "lowrank":
            b_RI = torch.zeros(config.rank, in_features, device=device)
            factors = (torch.zeros(out_features, config.rank, device=device), b_RI)
        offset_OG = zeros_OG.clone() if config.levels == "affine" else None
        return cls(config, InitialState(zeros_OG, factors, level_values(config), offset_OG))

    def forward(self, weight_OI: Tensor) -> Tensor:
        """The weight as it will be after freezing, float32 [O, I]; identity gradient for the weight."""
        return fake_quantize(weight_OI, self.scale(), self.levels(), self.offset(), self.config)

    @torch.no_grad()
    def encode(self, weight_OI: Tensor) -> Tensor:
        """The codes uint8 [O, I] that `forward` rounds to."""
        return quantize(weight_OI, self.scale(), self.levels(), self.offset(), self.config)

    def levels(self) -> Tensor:
        """The levels as they will be stored, ascending: the values of a lut may cross while they learn."""
        if self.config.levels != "lut":
            return self.levels_N
        return round_through(self.levels_N, self.scale_dtype).sort(stable=True).values

    def offset(self) -> Tensor | None:
        """The offset as it will be stored, float32 [O, G], or None."""
        return None if self.offset_OG is None else round_through(self.offset_OG, self.scale_dtype)


class _OwnDtypes(nn.Module):
    """A module whose tensors keep their dtypes when the model around it changes its own.

    ``model.to(bfloat16)`` is about activations: a master weight must keep its small differences, and stored scales the
    values that they were rounded to, or codes lie.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def moved(x: Tensor) -> Tensor:
            y = fn(x)
            return y if y.dtype == x.dtype else x.to(y.device)

        return super()._apply(moved, recurse)


class QuantLinear(_OwnDtypes, nn.Linear):
    """A Linear whose float32 master weight is fake-quantised in every forward: y = x @ Q(W)^T + b.

    The constructor makes a blank one, to load a state dict into; `from_linear` searches the scales of a
    trained weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        config: LinearQuant,
        device: torch.device | str | None = None,
    ) -> None:
        """Make a blank layer."""
        super().__init__(in_features, out_features, bias, device=device, dtype=torch.float32)
        self.quantizer = Quantizer.blank(config, out_features, in_features, device)

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: LinearQuant, *, search: bool = True) -> QuantLinear:
        """Wrap a Linear's weight and bias; with search=False the scales are blank, to be loaded."""
        layer = _blank(cls, linear, config)
        layer.weight = nn.Parameter(linear.weight.detach().float(), requires_grad=linear.weight.requires_grad)
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().float(), requires_grad=linear.bias.requires_grad)
        if search:
            layer.quantizer = Quantizer(config, search_initial_state(layer.weight, config))
        return layer.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return products.linear(input, self.quantizer(self.weight), self.bias)


class CodedLinear(_OwnDtypes, nn.Linear):
    """A Linear of frozen codes: y = x @ W^T + b, with W = S * L[I] (+ Z) made from the codes when needed.

    Nothing of W's size is kept: backward makes W once more from the codes. There is no `weight` parameter;
    the property gives W in float32. An adapter cannot be merged into codes: `convert.to_dense` first.

    Attributes:
        packed_OP: codes, `config.bits` each, uint8 (see `packing`).
        scale_OG: scale in `config.scale_dtype`; for ``lowrank`` instead a_OR and b_RI.
        levels_N: the grid; in the state dict only for ``lut``, then in `config.scale_dtype`.
        offset_OG: for ``affine``, else None.
    """

    packed_OP: Tensor
    scale_OG: Tensor
    a_OR: Tensor
    b_RI: Tensor
    levels_N: Tensor
    offset_OG: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        config: LinearQuant,
        device: torch.device | str | None = None,
    ) -> None:
        """Make a blank layer, to load a state dict into."""
        nn.Module.__init__(self)  # nn.Linear's own would register a weight
        self.in_features, self.out_features, self.config = in_features, out_features, config
        zeros_O = nn.Parameter(torch.zeros(out_features, device=device), requires_grad=False)
        self.register_parameter("bias", zeros_O if bias else None)
        length = packed_bytes(in_features, config.bits)
        self.register_buffer("packed_OP", torch.zeros(out_features, length, dtype=torch.uint8, device=device))
        self._hold(Quantizer.blank(config, out_features, in_features, device))

    @classmethod
    def from_quant_linear(cls, layer: QuantLinear) -> CodedLinear:
        """Freeze a QuantLinear: its codes and scales as they are now."""
        coded = _blank(cls, layer, layer.quantizer.config)
        coded.packed_OP = pack(layer.quantizer.encode(layer.weight), coded.config.bits)
        coded._hold(layer.quantizer)
        if layer.bias is not None:
            coded.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        return coded.train(layer.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantised weight, float32 [O, I], made anew at each access."""
        return _decode(self.config, self.in_features, *self._stored())

    @property
    def codes_OI(self) -> Tensor:
        """The codes, uint8 [O, I]."""
        return unpack(self.packed_OP, self.config.bits, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O], in the dtype of the input (or of autocast)."""
        decode = partial(_decode, self.config, self.in_features)
        weight_OI = products.made_from(self.weight, decode, *self._stored())
        return products.linear(input, weight_OI, self.bias)

    def _stored(self) -> tuple[Tensor, ...]:
        offset = () if self.offset_OG is None else (self.offset_OG,)
        return self.packed_OP, self.levels_N, *self._scales(), *offset

    def _scales(self) -> tuple[Tensor, ...]:
        if self.config.scales == "lowrank":
            return self.a_OR, self.b_RI
        return (self.scale_OG,)

    @torch.no_grad()
    def _hold(self, quantizer: Quantizer) -> None:
        """Copy the scales, levels and offset of a quantiser, rounded, into buffers of the stored dtype."""
        dtype = quantizer.scale_dtype
        for name, parameter in quantizer.scale.named_parameters():
            self.register_buffer(name, round_through(parameter, dtype).to(dtype, copy=True))
        is_lut = self.config.levels == "lut"
        levels_N = quantizer.levels().to(dtype if is_lut else torch.float32, copy=True)
        self.register_buffer("levels_N", levels_N, persistent=is_lut)
        offset_OG = quantizer.offset()
        self.register_buffer("offset_OG", None if offset_OG is None else offset_OG.to(dtype, copy=True))


def _decode(config: LinearQuant, in_features: int, packed_OP: Tensor, levels_N: Tensor, *rest: Tensor) -> Tensor:
    scales, offset_OG = (rest[:-1], rest[-1]) if config.levels == "affine" else (rest, None)
    scale_OC = multiply_factors(*scales) if len(scales) == 2 else scales[0]
    codes_OI = unpack(packed_OP, config.bits, in_features)
    return dequantize(codes_OI, scale_OC, levels_N, offset_OG, config)


def _blank(kind: type[Layer], linear: nn.Linear, config: LinearQuant) -> Layer:
    has_bias = linear.bias is not None
    return kind(linear.in_features, linear.out_features, has_bias, config=config, device=linear.weight.device)
