"""Products that keep little: torch's values and gradients, and what is kept."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from qat_lora.models.lean.mlps import silu_times
from qat_lora.models.lean.norms import rms_norm
from qat_lora.models.lean.products import linear, made_from

SHAPES = [(6,), (5, 6), (2, 5, 6), (2, 3, 5, 6)]


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


def test_the_gradients_are_those_of_finite_differences() -> None:
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


def test_a_tensor_that_was_changed_since_is_kept_itself() -> None:
    x_BI, weight_OI = leaves((3, 6), (4, 6))
    output = made_from(x_BI * 1, lambda x: x * 1, x_BI)
    output.mul_(2)
    (grad_OI,) = torch.autograd.grad(linear(output, weight_OI, None).sum(), weight_OI)
    assert torch.equal(grad_OI, (2 * x_BI).detach().sum(0).expand(4, 6))


@pytest.mark.parametrize("changed", ["x", "gate"])
def test_a_source_that_was_changed_since_voids_the_recipe(changed) -> None:
    """Between the norm and the product, where backward of the norm may never run and so never complain."""
    x, norm_weight, gate, up, weight_OI = leaves((9, 8), (8,), (9, 8), (9, 8), (4, 8))
    x, gate = (tensor.detach().clone() for tensor in (x, gate))
    output = rms_norm(x, norm_weight.detach(), 1e-6) if changed == "x" else silu_times(gate, up.detach())
    (expected,) = torch.autograd.grad(F.linear(output.clone(), weight_OI).sum(), weight_OI)
    {"x": x, "gate": gate}[changed].mul_(3)
    (found,) = torch.autograd.grad(linear(output, weight_OI, None).sum(), weight_OI)
    assert torch.equal(found, expected)


def test_without_gradients_nothing_is_held() -> None:
    x, norm_weight = leaves((9, 8), (8,))
    with torch.no_grad():
        output = rms_norm(x, norm_weight, 1e-6)
    assert not hasattr(output, "_made_from")


def test_a_weight_made_for_the_product_is_kept_as_narrow_as_it_is_used() -> None:
    x_BI, weight_OI = leaves((3, 6), (4, 6))
    with torch.autocast("cpu", torch.bfloat16):
        kept = kept_by(linear, x_BI, weight_OI * 1, None)
    assert [x.dtype for x in kept if x.shape == weight_OI.shape] == [torch.bfloat16]


def test_an_input_that_needs_no_gradient_keeps_no_weight() -> None:
    x_BI, weight_OI = leaves((3, 6), (4, 6))
    assert [x.shape for x in kept_by(linear, x_BI.detach(), weight_OI, None)] == [x_BI.shape]
