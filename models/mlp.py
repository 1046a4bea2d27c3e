"""The feed-forward half of a block, plain or gated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import GATED, ModelConfig
from .devices import fuses_rows
from .experts.routing_losses import RoutingLosses
from .init import Linear
from .observe import NeuronObserver

#: Activations by name; a gated MLP applies its own to the gate.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": lambda x: x,
    "relu2": lambda x: F.relu(x).square(),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

_aten = torch.ops.aten

#: Gradient of an activation's input, given that of its output and the input.
DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda d, x: d * (x > 0),
    "gelu": lambda d, x: _aten.gelu_backward(d, x),
    "silu": lambda d, x: _aten.silu_backward(d, x),
    "tanh": lambda d, x: _aten.tanh_backward(d, x.tanh()),
    "identity": lambda d, x: d,
    "relu2": lambda d, x: 2 * d * F.relu(x),
    "gelu_tanh": lambda d, x: _aten.gelu_backward(d, x, approximate="tanh"),
}


# ---------------------------------------------------------------- SwiGLU's product on a GPU


@torch.library.custom_op("birthmark::silu_product", mutates_args=())
def _product(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    from .gated_kernel import product

    y = torch.empty_like(g)
    product(g, u, y)
    return y


@_product.register_fake
def _(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(g)


@torch.library.custom_op("birthmark::silu_product_gradients", mutates_args=())
def _gradients(d: torch.Tensor, g: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from .gated_kernel import gradients

    dg, du = torch.empty_like(g), torch.empty_like(u)
    gradients(d, g, u, dg, du)
    return dg, du


@_gradients.register_fake
def _(d: torch.Tensor, g: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(g), torch.empty_like(u)


class _SiluProduct(torch.autograd.Function):
    """Autograd function of ``silu(g) · u``, which keeps its two inputs alone."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor) -> Tensor:
        ctx.save_for_backward(g, u)
        found: Tensor = _product(g, u)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _gradients(d.contiguous(), *ctx.saved_tensors)
        return found


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """Multiply the named activation of a gate with a tensor of its shape."""
    alike = gate.dtype == up.dtype and gate.is_contiguous() and up.is_contiguous()
    if activation == "silu" and alike and fuses_rows(gate):
        found: Tensor = _SiluProduct.apply(gate, up)
        return found
    return ACTIVATIONS[activation](gate) * up


class MLP(nn.Module):
    """Feed-forward map ``down(act(up(x)))``, or ``down(act(gate(x)) · up(x))`` when gated, with hidden width ``d_ff``,
    by default the config's.
    """

    def __init__(self, config: ModelConfig, block: int = 0, d_ff: int | None = None) -> None:
        super().__init__()
        ff = config.ff if d_ff is None else d_ff
        self.layer = block + 1
        self.activation_name = GATED.get(config.mlp, config.mlp)
        self.activation = ACTIVATIONS[self.activation_name]
        self.gate = Linear(config.d_model, ff, bias=config.bias) if config.gated else None
        self.up = Linear(config.d_model, ff, bias=config.bias)
        self.down = Linear(ff, config.d_model, bias=config.bias, residual_writers=2 * config.n_layers)

    def forward(
        self, x_BTD: Tensor, observer: NeuronObserver | None = None, losses: RoutingLosses | None = None
    ) -> Tensor:
        """Apply the map, ``[B, T, d] → [B, T, d]``. It has no router: it adds nothing to ``losses``."""
        if self.gate is None:
            a_BTF = self.activation(self.up(x_BTD))
        else:
            a_BTF = gated(self.activation_name, self.gate(x_BTD), self.up(x_BTD))
        if observer is not None:
            observer.neurons(self.layer, a_BTF)
        return self.down(a_BTF)
