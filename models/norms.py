"""Normalisation of the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernel_devices import trains_on_cpu
from .config import InitConfig, ModelConfig
from .init import Constant, Distribution, Linear, ParameterRole

# ---------------------------------------------------------------- RMSNorm (arXiv 1910.07467) over the last axis

#: Numbers that each thread processes at a time: as many as a core's cache holds.
_BLOCK = 1 << 18


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Compute ``x / sqrt(mean(x²) + eps) · gain``, in the dtype of ``x`` and computed in float32 or wider.

    Args:
        x: ``[…, D]``.
        gain: ``[D]``, in the dtype of ``x``.
        eps: added to the mean square.
    """
    if trains_on_cpu(x, gain):
        normed: Tensor = _RMSNorm.apply(x, gain, eps)
        return normed
    with _uncast(x):
        return F.rms_norm(x, gain.shape, gain, eps)


def _uncast(x: Tensor) -> AbstractContextManager[object]:
    """Keep autocast from casting the narrow input of a norm, which it would hold: the kernel computes in float32
    anyway.
    """
    return nullcontext() if x.dtype == torch.float32 else torch.autocast(x.device.type, enabled=False)


def _blocks(*tensors_ND: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, _BLOCK * torch.get_num_threads() // tensors_ND[0].shape[-1])
    return zip(*(tensor.split(rows) for tensor in tensors_ND), strict=True)


class _RMSNorm(torch.autograd.Function):
    """Autograd function whose values are those of ``F.rms_norm``, bit for bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        x_ND, wide = x.reshape(-1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
        y_ND, scale_N1 = torch.empty_like(x_ND), x_ND.new_empty(len(x_ND), 1, dtype=wide)
        for x_RD, y_RD, scale_R1 in _blocks(x_ND, y_ND, scale_N1):
            x_RD = x_RD.to(wide)
            torch.rsqrt(x_RD.square().mean(-1, keepdim=True).add_(eps), out=scale_R1)
            torch.mul(x_RD * scale_R1, gain_D, out=y_RD)
        ctx.save_for_backward(x, gain_D, scale_N1)
        return y_ND.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain_D, scale_N1 = ctx.saved_tensors
        wide, width = scale_N1.dtype, x.shape[-1]
        x_ND, dy_ND = x.reshape(-1, width), dy.reshape(-1, width)
        dx_ND, dgain_D = torch.empty_like(x_ND), torch.zeros_like(gain_D, dtype=wide)
        for x_RD, dy_RD, scale_R1, dx_RD in _blocks(x_ND, dy_ND, scale_N1, dx_ND):
            normed_RD, dy_RD = x_RD.to(wide) * scale_R1, dy_RD.to(wide)
            products_RD = dy_RD * normed_RD
            dgain_D += products_RD.sum(0)
            along_R1 = products_RD.mul_(gain_D).sum(-1, keepdim=True).div_(-width)
            torch.mul((dy_RD * gain_D).addcmul_(normed_RD, along_R1), scale_R1, out=dx_RD)
        return dx_ND.view(x.shape), dgain_D.to(gain_D.dtype), None


# ---------------------------------------------------------------- layers


class NormGate(nn.Module):
    """``y · σ(W_up · silu(W_down · y))``, y the output of a norm (GatedNorm, arXiv 2601.22966)."""

    def __init__(self, d: int, rank: int) -> None:
        super().__init__()
        self.down = Linear(d, rank, bias=False)
        self.up = Linear(rank, d, bias=False)

    def forward(self, y: Tensor) -> Tensor:
        """Normalise, ``[…, d] → […, d]``."""
        return y * self.up(F.silu(self.down(cast_once(y)))).sigmoid()


class RMSNorm(nn.Module):
    """Norm ``x / rms(x) · gain`` over the last axis (arXiv 1910.07467), followed by a gate of the given rank, if any;
    applied to ``scale · x`` if ``scaled`` (PreAffine, arXiv 2601.22966).
    """

    def __init__(self, d: int, eps: float, gate_rank: int | None = None, scaled: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(d))
        self.scale = nn.Parameter(torch.ones(d)) if scaled else None
        self.parameter_roles = {"gain": ParameterRole.GAIN, "scale": ParameterRole.GAIN}
        self.gate = None if gate_rank is None else NormGate(d, gate_rank)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, ``[…, d] → […, d]``."""
        if self.scale is not None:
            x = x * self.scale.to(x.dtype)
        y = rms_norm(x, self.gain.to(x.dtype), self.eps)
        return y if self.gate is None else self.gate(y)

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Start gains and scales at 1."""
        return {"gain": Constant(1.0), "scale": Constant(1.0)}


class DynamicTanh(nn.Module):
    """``tanh(alpha · x) · gain + bias`` in place of a norm (arXiv 2503.10622), and a gate as in `RMSNorm`."""

    def __init__(self, d: int, bias: bool, gate_rank: int | None = None) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))
        self.gain = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d)) if bias else None
        self.parameter_roles = {
            "alpha": ParameterRole.GAIN,
            "gain": ParameterRole.GAIN,
            "bias": ParameterRole.BIAS,
        }
        self.gate = None if gate_rank is None else NormGate(d, gate_rank)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, ``[…, d] → […, d]``."""
        y = (x * self.alpha.to(x.dtype)).tanh() * self.gain.to(x.dtype)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return y if self.gate is None else self.gate(y)

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Start alpha at .5, gains at 1, biases at 0."""
        return {"alpha": Constant(0.5), "gain": Constant(1.0), "bias": Constant(0.0)}


class LayerNorm(nn.Module):
    """``(x − mean(x)) / std(x) · gain + bias`` over the last axis (arXiv 1607.06450), and a gate as in `RMSNorm`."""

    def __init__(self, d: int, eps: float, bias: bool, gate_rank: int | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d)) if bias else None
        self.parameter_roles = {"gain": ParameterRole.GAIN, "bias": ParameterRole.BIAS}
        self.gate = None if gate_rank is None else NormGate(d, gate_rank)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, ``[…, d] → […, d]``."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with _uncast(x):
            y = F.layer_norm(x, self.gain.shape, self.gain.to(x.dtype), bias, self.eps)
        return y if self.gate is None else self.gate(y)

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Start gains at 1, biases at 0."""
        return {"gain": Constant(1.0), "bias": Constant(0.0)}


def cast_once(x: Tensor) -> Tensor:
    """Cast the input of several matrix products to autocast's type; return it unchanged if autocast is off.

    Otherwise each product would cast the same float32 tensor again, and keep a copy for the backward pass.
    """
    device = x.device.type
    if x.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


#: Norms by name.
NORMS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "none": lambda config: nn.Identity(),
    "rmsnorm": lambda config: RMSNorm(config.d_model, config.norm_eps, config.norm_gate, config.norm_scale),
    "layernorm": lambda config: LayerNorm(config.d_model, config.norm_eps, config.bias, config.norm_gate),
    "dyt": lambda config: DynamicTanh(config.d_model, config.bias, config.norm_gate),
}


def sublayer_norms(config: ModelConfig) -> tuple[nn.Module, nn.Module]:
    """Build the norms of a sublayer's input and of its output, as ``norm_placement`` says."""
    pre = NORMS[config.norm](config) if config.norm_placement != "post" else nn.Identity()
    post = NORMS[config.norm](config) if config.norm_placement != "pre" else nn.Identity()
    return pre, post
