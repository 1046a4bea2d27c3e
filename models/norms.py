"""Normalisation of the residual stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import InitConfig, ModelConfig
from .init import Constant, Distribution
from .parameter_roles import ParameterRole


class RMSNorm(nn.Module):
    """``x / rms(x) · gain`` over the last axis (arXiv 1910.07467)."""

    def __init__(self, d: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(d))
        self.parameter_roles = {"gain": ParameterRole.GAIN}

    def forward(self, x: Tensor) -> Tensor:
        """``[…, d] → […, d]``."""
        return F.rms_norm(x, self.gain.shape, self.gain.to(x.dtype), self.eps)

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Gains start at 1."""
        return {"gain": Constant(1.0)}


class LayerNorm(nn.Module):
    """``(x − mean(x)) / std(x) · gain + bias`` over the last axis (arXiv 1607.06450)."""

    def __init__(self, d: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d)) if bias else None
        self.parameter_roles = {"gain": ParameterRole.GAIN, "bias": ParameterRole.BIAS}

    def forward(self, x: Tensor) -> Tensor:
        """``[…, d] → […, d]``."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.gain.shape, self.gain.to(x.dtype), bias, self.eps)

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Gains start at 1, biases at 0."""
        return {"gain": Constant(1.0), "bias": Constant(0.0)}


def cast_once(x: Tensor) -> Tensor:
    """The input of several matrix products in the type that autocast runs them in; as it is where autocast is off.

    Each product would cast the same float32 tensor again, and keep its own copy for the backward pass.
    """
    device = x.device.type
    if x.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


#: Norms by name.
NORMS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "none": lambda config: nn.Identity(),
    "rmsnorm": lambda config: RMSNorm(config.d_model, config.norm_eps),
    "layernorm": lambda config: LayerNorm(config.d_model, config.norm_eps, config.bias),
}


def sublayer_norms(config: ModelConfig) -> tuple[nn.Module, nn.Module]:
    """Norms of a sublayer's input and of its output, where ``norm_placement`` puts them."""
    pre = NORMS[config.norm](config) if config.norm_placement != "post" else nn.Identity()
    post = NORMS[config.norm](config) if config.norm_placement != "pre" else nn.Identity()
    return pre, post
