"""Products that keep little: torch's values and gradients, the formula's, and what is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from qat_lora import models
from qat_lora.norms import rms_norm
from qat_lora.products import linear, made_from, silu_times

SHAPES = [(5, 6), (2, 5, 6), (2, 3, 5, 6)]


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=source, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def kept_by(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        function(*inputs)
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_is_torchs_bit_for_bit(shape, dtype) -> None:
    inputs = leaves(shape, (4, 6), (4,), dtype=dtype)
    upstream = leaves((*shape[:-1], 4), dtype=dtype)[0].detach()
    (theirs, *their_grads), (ours, *our_grads) = (
        (y := function(*inputs), *torch.autograd.grad(y, inputs, upstream)) for function in (F.linear, linear)
    )
    assert torch.equal(ours, theirs)
    for mine, reference in zip(our_grads, their_grads, strict=True):
        assert mine.dtype == reference.dtype
        assert torch.equal(mine, reference)


def test_a_float32_weight_works_in_the_dtype_of_the_activations_and_gets_a_float32_gradient() -> None:
    x_BI = leaves((3, 6), dtype=torch.bfloat16)[0]
    weight_OI, bias_O = leaves((4, 6), (4,))
    y_BO = linear(x_BI, weight_OI, bias_O)
    y_BO.float().square().sum().backward()
    assert y_BO.dtype == x_BI.grad.dtype == torch.bfloat16
    assert weight_OI.grad.dtype == bias_O.grad.dtype == torch.float32
    grad_BO = (2 * y_BO.detach().float()).bfloat16()
    assert torch.equal(weight_OI.grad, (grad_BO.t() @ x_BI.detach()).float())


def test_linear_follows_autocast() -> None:
    x_BI, weight_OI = leaves((3, 6), (4, 6))
    with torch.autocast("cpu", torch.bfloat16):
        y_BO = linear(x_BI, weight_OI, None)
    assert y_BO.dtype == torch.bfloat16
    y_BO.sum().backward()
    assert x_BI.grad.dtype == weight_OI.grad.dtype == torch.float32


def test_a_frozen_weight_keeps_no_input() -> None:
    x_BI, weight_OI = leaves((3, 6), (4, 6))
    assert [x.shape for x in kept_by(linear, x_BI, weight_OI.detach(), None)] == [weight_OI.shape]
    assert [x.shape for x in kept_by(linear, x_BI, weight_OI, None)] == [weight_OI.shape, x_BI.shape]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gated_product_is_torchs_bit_for_bit_and_its_gradients_the_formulas(dtype) -> None:
    gate, up = leaves((7, 5), (7, 5), dtype=dtype)
    upstream = leaves((7, 5), dtype=dtype)[0].detach()
    product = silu_times(gate, up)
    assert torch.equal(product, F.silu(gate) * up)
    found = torch.autograd.grad(product, (gate, up), upstream)
    g, u, d = (x.detach().double().numpy() for x in (gate, up, upstream))
    s = 1 / (1 + np.exp(-g))
    # one rounding to the dtype, and float32 before it
    tolerance = {"rtol": 2**-8, "atol": 1e-6} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for mine, formula in zip(found, (d * u * s * (1 + g * (1 - s)), d * g * s), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), torch.from_numpy(formula), **tolerance)


def test_the_gradients_are_those_of_finite_differences() -> None:
    torch.autograd.gradcheck(silu_times, leaves((3, 4), (3, 4), dtype=torch.float64))
    torch.autograd.gradcheck(linear, leaves((2, 3, 4), (5, 4), (5,), dtype=torch.float64))


def test_products_of_a_norm_and_of_a_gate_keep_what_these_were_made_from() -> None:
    x, norm_weight, gate, up = leaves((9, 8), (8,), (9, 8), (9, 8))
    weights = leaves((4, 8), (3, 8))
    for output, sources in (
        (rms_norm(x, norm_weight, 1e-6), (x, norm_weight)),
        (silu_times(gate, up), (gate, up)),
    ):
        kept = [k for weight in weights for k in kept_by(linear, output, weight, None)]
        assert not any(k is output for k in kept)
        assert all(any(k is source for k in kept) for source in sources)
        grads = [torch.autograd.grad(linear(output, w, None).sum(), w, retain_graph=True)[0] for w in weights]
        plain = [torch.autograd.grad(F.linear(output.detach(), w).sum(), w)[0] for w in weights]
        assert all(torch.equal(mine, reference) for mine, reference in zip(grads, plain, strict=True))


def test_what_is_made_again_is_what_backward_uses() -> None:
    """A recipe that lies shows in the gradient: the input itself is not kept."""
    x_BI, weight_OI = leaves((3, 6), (4, 6))
    output = made_from(x_BI * 1, torch.zeros_like, x_BI)
    (grad_OI,) = torch.autograd.grad(linear(output, weight_OI, None).sum(), weight_OI)
    assert not grad_OI.any()


def test_mlps_of_another_formula_are_left_alone() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 12}
    model = nn.ModuleDict(
        {
            "qwen": Qwen3MLP(Qwen3Config(**sizes)),
            "gelu": GemmaMLP(GemmaConfig(**sizes, hidden_activation="gelu_pytorch_tanh")),
        }
    )
    x = torch.randn(3, 8)
    before = model["qwen"](x)
    models.use_lean_mlps(model)
    assert "forward" in vars(model["qwen"])
    assert "forward" not in vars(model["gelu"])
    assert torch.equal(model["qwen"](x), before)


def test_each_mlp_of_a_class_is_judged_by_its_own_activation() -> None:
    """Two configurations of one class may lie in one model."""
    sizes = {"hidden_size": 8, "intermediate_size": 12}
    model = nn.ModuleList(Qwen3MLP(Qwen3Config(**sizes, hidden_act=act)) for act in ("silu", "gelu"))
    models.use_lean_mlps(model)
    assert ["forward" in vars(mlp) for mlp in model] == [True, False]
