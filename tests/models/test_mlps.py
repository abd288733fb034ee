"""The lean MLP: torch's values bit for bit, the formula's gradients, and which MLPs become one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from qat_lora.models.lean.mlps import silu_times, use_lean_mlps
from tests.models.test_products import leaves


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
    use_lean_mlps(model)
    assert "forward" in vars(model["qwen"])
    assert "forward" not in vars(model["gelu"])
    assert torch.equal(model["qwen"](x), before)


def test_each_mlp_of_a_class_is_judged_by_its_own_activation() -> None:
    """Two configurations of one class may lie in one model."""
    sizes = {"hidden_size": 8, "intermediate_size": 12}
    model = nn.ModuleList(Qwen3MLP(Qwen3Config(**sizes, hidden_act=act)) for act in ("silu", "gelu"))
    use_lean_mlps(model)
    assert ["forward" in vars(mlp) for mlp in model] == [True, False]


def test_an_mlp_that_is_another_in_bfloat16_is_left_alone() -> None:
    class WideMLP(Qwen3MLP):
        def forward(self, x):
            wide = self.act_fn(self.gate_proj(x).float()) * self.up_proj(x).float()
            return self.down_proj(wide.to(x.dtype))

    mlp = WideMLP(Qwen3Config(hidden_size=8, intermediate_size=12))
    use_lean_mlps(mlp)
    assert "forward" not in vars(mlp)


def test_finding_out_draws_no_random_numbers() -> None:
    mlp = Qwen3MLP(Qwen3Config(hidden_size=8, intermediate_size=12))
    before = torch.get_rng_state()
    use_lean_mlps(mlp)
    assert "forward" in vars(mlp)
    assert torch.equal(torch.get_rng_state(), before)
