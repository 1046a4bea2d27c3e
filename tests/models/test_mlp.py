"""Every MLP against its formula, written out in float64."""

from __future__ import annotations

import pytest
import torch

from birthmark.models.config import ModelConfig
from birthmark.models.mlp import MLP

ACTIVATIONS = {
    "relu": lambda x: x * (x > 0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "tanh": lambda x: (torch.exp(2 * x) - 1) / (torch.exp(2 * x) + 1),
    "identity": lambda x: x,
    "relu2": lambda x: x * x * (x > 0),
}
GATED = dict(zip(["reglu", "geglu", "swiglu", "tanhglu", "bilinear", "relu2glu"], ACTIVATIONS, strict=True))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*ACTIVATIONS, *GATED])
def test_outputs_equal_the_formula(name, bias):
    module = MLP(ModelConfig(d_model=8, n_heads=2, mlp=name, d_ff=12, bias=bias)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)

    def linear(name, y):
        layer = getattr(module, name)
        return y @ layer.weight.T + (layer.bias if bias else 0)

    if name in GATED:
        hidden = ACTIVATIONS[GATED[name]](linear("gate", x)) * linear("up", x)
    else:
        hidden = ACTIVATIONS[name](linear("up", x))
        assert module.gate is None
    torch.testing.assert_close(module(x), linear("down", hidden), atol=1e-12, rtol=1e-12)
