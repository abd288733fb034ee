"""Two Linears: `QuantLinear` trains a master weight through its rounding, `CodedLinear` holds frozen codes.

Owns the modules. Moving a model from one to the other is `conversion`; neither class has a mode flag, and both pass the
gradient to their input whatever is frozen.

Shapes: O out features, I in features, G groups along I, R rank, N levels, P packed bytes in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from qat_lora.config import LinearQuant
from qat_lora.models.lean import products
from qat_lora.quant.grids import Grid
from qat_lora.quant.packing import pack, packed_bytes, unpack
from qat_lora.quant.rounding import Form, dequantize, fake_quantize, quantize
from qat_lora.quant.scales import group_count, scale_names, scale_shapes
from qat_lora.quant.start import search_form

Device: TypeAlias = torch.device | str | None


class Quantizer(nn.Module):
    """Rounds a weight [O, I] to S * L[I] (+ Z) with gradients; holds S, L and Z in float32.

    Attributes:
        config: what grid, and which scales.
        scale: the Parameters that S is made of: scale_OG, or a_OR and b_RI.
        levels_N: the grid; a Parameter where it is learned, else a buffer that no checkpoint holds.
        offset_OG: Parameter, or None where the config has no offset.
    """

    levels_N: Tensor

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.config = form.config
        self.scale = nn.ParameterDict(dict(zip(scale_names(form.config), form.scale, strict=True)))
        if form.config.is_learned:
            self.levels_N = nn.Parameter(form.levels_N)
        else:
            self.register_buffer("levels_N", form.levels_N, persistent=False)
        self.offset_OG = None if form.offset_OG is None else nn.Parameter(form.offset_OG)

    def form(self) -> Form:
        """S, L and Z as they will be stored; gradients pass to the Parameters."""
        return Form(tuple(self.scale.values()), self.levels_N, self.offset_OG, self.config).stored()

    def forward(self, weight_OI: Tensor) -> Tensor:
        """The weight as it will be after freezing, float32 [O, I]; identity gradient for the weight."""
        return fake_quantize(weight_OI, self.form())

    @torch.no_grad()
    def encode(self, weight_OI: Tensor) -> Tensor:
        """The codes uint8 [O, I] that `forward` rounds to."""
        return quantize(weight_OI, self.form())


class _OwnDtypes(nn.Module):
    """A module whose tensors keep their dtypes when the model around it changes its own.

    ``model.to(bfloat16)`` is about activations: a master weight must keep its small differences, and stored scales the
    values that the codes were found for.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def moved(x: Tensor) -> Tensor:
            y = fn(x)
            return y if y.dtype == x.dtype else x.to(y.device)

        return super()._apply(moved, recurse)


class QuantLinear(_OwnDtypes, nn.Linear):
    """A Linear whose float32 master weight is fake-quantised in every forward: y = x @ Q(W)^T + b.

    The constructor makes a blank one, to load a state dict into; `from_linear` searches the scales of a trained weight.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, config: LinearQuant, device: Device = None
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=torch.float32)
        self.quantizer = Quantizer(_blank_form(out_features, in_features, config, device))

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: LinearQuant, *, search: bool = True) -> QuantLinear:
        """Wrap a Linear's weight and bias; with search=False the scales are blank, to be loaded."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, config=config, device="meta")
        layer.weight = nn.Parameter(linear.weight.detach().float(), requires_grad=linear.weight.requires_grad)
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().float(), requires_grad=linear.bias.requires_grad)
        blank = _blank_form(linear.out_features, linear.in_features, config, linear.weight.device)
        layer.quantizer = Quantizer(search_form(layer.weight, config) if search else blank)
        return layer.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O], in the dtype of the input (or of autocast)."""
        return products.linear(input, self.quantizer(self.weight), self.bias)


class CodedLinear(_OwnDtypes, nn.Linear):
    """A Linear of frozen codes: y = x @ W^T + b, with W = S * L[I] (+ Z) made from the codes when needed.

    The constructor makes a blank one, to load a state dict into. Nothing of W's size is kept: backward makes W once
    more from the codes. There is no `weight` parameter; the property gives W in float32. An adapter cannot be merged
    into codes: `conversion.to_dense` first.

    Attributes:
        packed_OP: codes, `config.bits` each, uint8 (see `packing`).
        scale_OG: scale in `config.scale_dtype`; for ``lowrank`` instead a_OR and b_RI.
        levels_N: the grid; in the state dict only where it is learned, then in `config.scale_dtype`.
        offset_OG: where the config has an offset, else None.
    """

    packed_OP: Tensor
    levels_N: Tensor
    offset_OG: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, config: LinearQuant, device: Device = None
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would register a weight
        self.in_features, self.out_features, self.config = in_features, out_features, config
        zeros_O = nn.Parameter(torch.zeros(out_features, device=device), requires_grad=False)
        self.register_parameter("bias", zeros_O if bias else None)
        length = packed_bytes(in_features, config.bits)
        self.register_buffer("packed_OP", torch.zeros(out_features, length, dtype=torch.uint8, device=device))
        self._hold(_blank_form(out_features, in_features, config, device))

    @classmethod
    def from_quant_linear(cls, layer: QuantLinear) -> CodedLinear:
        """Freeze a QuantLinear: its codes and scales as they are now."""
        config, bias = layer.quantizer.config, layer.bias
        coded = cls(layer.in_features, layer.out_features, bias is not None, config=config, device="meta")
        coded.packed_OP = pack(layer.quantizer.encode(layer.weight), config.bits)
        coded._hold(layer.quantizer.form())
        if bias is not None:
            coded.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
        return coded.train(layer.training)

    def form(self) -> Form:
        """S, L and Z, in the dtypes that they are stored in."""
        scale = tuple(getattr(self, name) for name in scale_names(self.config))
        return Form(scale, self.levels_N, self.offset_OG, self.config)

    @property
    def codes_OI(self) -> Tensor:
        """The codes, uint8 [O, I]."""
        return unpack(self.packed_OP, self.config.bits, self.in_features)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantised weight, float32 [O, I], made anew at each access; a product keeps codes in its place."""
        decode = partial(_decode, self.config, self.in_features)
        form = self.form()
        sources = (self.packed_OP, form.levels_N, *form.side_values())
        return products.made_from(decode(*sources), decode, *sources)

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O], in the dtype of the input (or of autocast)."""
        return products.linear(input, self.weight, self.bias)

    @torch.no_grad()
    def _hold(self, form: Form) -> None:
        """Copy a form into buffers of the dtypes that it is stored in."""
        dtype: torch.dtype = getattr(torch, self.config.scale_dtype)
        for name, x in zip(scale_names(self.config), form.scale, strict=True):
            self.register_buffer(name, x.to(dtype, copy=True))
        levels_N = form.levels_N.to(dtype if self.config.is_learned else torch.float32, copy=True)
        self.register_buffer("levels_N", levels_N, persistent=self.config.is_learned)
        self.register_buffer("offset_OG", None if form.offset_OG is None else form.offset_OG.to(dtype, copy=True))


def stored_bits(layer: QuantLinear | CodedLinear) -> int:
    """Bits of a layer's weight as it is frozen: codes with each row's padding, scales, offsets and learned levels."""
    config = layer.config if isinstance(layer, CodedLinear) else layer.quantizer.config
    frozen = CodedLinear(layer.in_features, layer.out_features, bias=False, config=config, device="meta")
    return sum(x.nbytes * 8 for x in frozen.state_dict().values())


def _decode(config: LinearQuant, in_features: int, packed_OP: Tensor, *form: Tensor) -> Tensor:
    return dequantize(unpack(packed_OP, config.bits, in_features), Form.of(config, *form))


def _blank_form(out_features: int, in_features: int, config: LinearQuant, device: Device) -> Form:
    """The form of a weight of zeros, for a state dict to be loaded into."""
    offset_OG = torch.zeros(out_features, group_count(in_features, config), device=device)
    return Form(
        tuple(torch.zeros(shape, device=device) for shape in scale_shapes(out_features, in_features, config)),
        Grid.of(config).levels_N.to(device),
        offset_OG if config.has_offset else None,
        config,
    )
