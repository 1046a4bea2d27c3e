"""The feed-forward half of a block, plain or gated."""

from __future__ import annotations

from torch import Tensor, nn

from .activations import activated
from .config import GATED, ModelConfig
from .experts.routing_losses import RoutingLosses
from .init import Linear
from .observe import NeuronObserver


class MLP(nn.Module):
    """Feed-forward map ``down(act(up(x)))``, or ``down(act(gate(x)) · up(x))`` when gated, with hidden width ``d_ff``,
    by default the config's.
    """

    def __init__(self, config: ModelConfig, block: int = 0, d_ff: int | None = None) -> None:
        super().__init__()
        ff = config.ff if d_ff is None else d_ff
        self.layer = block + 1
        self.activation = GATED.get(config.mlp, config.mlp)
        self.gate = Linear(config.d_model, ff, bias=config.bias) if config.gated else None
        self.up = Linear(config.d_model, ff, bias=config.bias)
        self.down = Linear(ff, config.d_model, bias=config.bias, residual_writers=2 * config.n_layers)

    def forward(
        self, x_BTD: Tensor, observer: NeuronObserver | None = None, losses: RoutingLosses | None = None
    ) -> Tensor:
        """Apply the map, ``[B, T, d] → [B, T, d]``. It has no router: it adds nothing to ``losses``."""
        input_BTF, factor_BTF = (self.up(x_BTD), None) if self.gate is None else (self.gate(x_BTD), self.up(x_BTD))
        a_BTF = activated(self.activation, input_BTF, factor_BTF)
        if observer is not None:
            observer.neurons(self.layer, a_BTF)
        return self.down(a_BTF)
