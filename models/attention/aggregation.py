"""Steps between a head's output and the output projection: none, a norm, or variance calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ...errors import UsageError
from ...kernel_devices import runs_on
from ..config import InitConfig, ModelConfig
from ..init import INITIALISERS, Constant, Distribution, Fans, ParameterRole, birth_plan, name_below, parameter_roles
from ..user_classes import import_user_class, in_words, is_user_class
from .correlation import CORRELATIONS, estimated_correlations
from .differential import initial_lambda
from .fused.one_walk import Calibration
from .fused.rows import scaled
from .normalisers import WeightedSum

# ---------------------------------------------------------------- parts by name

PartT = TypeVar("PartT", bound=nn.Module)


def build_part(part: str, name: str, table: Mapping[str, type[PartT]], base: type[PartT], config: ModelConfig) -> PartT:
    """Build the part of one block that ``model.attention.PART`` names.

    Args:
        part: the field, such as ``normaliser``.
        name: a key of ``table``, or ``module:Class``.
        table: built-in parts by name.
        base: base of a user's class; such a class is made with the config alone.
        config: the model.

    Raises:
        UsageError: a user's class cannot be imported or made, does not derive from ``base``, does not declare the
            distributions and roles of its parameters, or keeps a tensor that is none.
    """
    if not is_user_class(name):
        return table[name](config)
    field = f"model.attention.{part}"
    found = import_user_class(name, field)
    if not isinstance(found, type) or not issubclass(found, base):
        raise UsageError(f"{field} {name}: derive it from {base.__module__}.{base.__name__}")
    try:
        made = found(config)
        # Asked here, where the class can be named; a birth and an optimizer ask the same.
        birth_plan(made, config.init)
        parameter_roles(made)
    except Exception as error:  # a user's class may raise anything
        raise UsageError(f"{field} {name}: cannot be made ({in_words(error)})") from error
    if kept := _tensors_without_values(made):
        raise UsageError(
            f"{field} {name}: keeps the tensor {kept[0]}, which has no values when a model is born; compute it in "
            "forward, or make it a parameter"
        )
    return made


def _tensors_without_values(part: nn.Module) -> list[str]:
    """List the tensors of a part that no birth fills: it is made on the meta device, and draws parameters alone."""
    settled = estimated_correlations(part)
    return [
        name_below(prefix, name)
        for prefix, module in part.named_modules()
        if module not in settled
        for name, value in (*module._buffers.items(), *vars(module).items())
        if isinstance(value, Tensor) and (name in module._buffers or value.is_meta)
    ]


# ---------------------------------------------------------------- aggregation

#: Σ a² of a row of ReLUs may be 0: the factor stays finite.
_SMALLEST_SQUARES = 1e-6


class PlainAggregation(nn.Module):
    """Head outputs pass unchanged; also the base of the other kinds."""

    #: True if :meth:`forward` reads sums of squared weights.
    needs_squares = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def in_block(self, block: int) -> None:
        """Set the index of its block (from 0); called before birth."""

    def forward(self, weighted: WeightedSum, v_BGSK: Tensor) -> Tensor:
        """Map head outputs ``[B, H, T, d_head]``, given the weighted sum behind them and the values that went in."""
        return weighted.o_BHTK


class HeadNorm(PlainAggregation):
    """Head-wise RMSNorm: each head's output over its RMS, times one gain ``[d_head]`` shared by the heads [SO]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.eps = config.norm_eps
        self.gain = nn.Parameter(torch.ones(config.d_value))
        self.parameter_roles = {"gain": ParameterRole.GAIN}

    def forward(self, weighted: WeightedSum, v_BGSK: Tensor) -> Tensor:
        """Normalise every head at every position to RMS 1, then apply the gain."""
        return _normed(weighted.o_BHTK, self.gain, self.eps)

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Start the gain at 1."""
        return {"gain": Constant(1.0)}


def _normed(o_BHTK: Tensor, gain: Tensor, eps: float, n_together: int = 1, times: float = 1.0) -> Tensor:
    """Divide head outputs by ``√(RMS² + eps)`` over ``n_together`` neighbouring heads, times a number and a gain.

    Args:
        o_BHTK: head outputs.
        gain: one for each channel of the heads that are normalised together, or ``[H, K]``.
        eps: added to the mean square.
        n_together: heads of one RMS.
        times: factor of all.
    """
    of_each = gain.ndim == 2
    if runs_on(o_BHTK) == "cuda":
        # One kernel, in float32 inside. Autocast would hand it a float32 copy.
        with torch.autocast(o_BHTK.device.type, enabled=False):
            o_BTGC = o_BHTK.transpose(1, 2).unflatten(2, (-1, n_together)).flatten(3)
            of_all = o_BTGC.new_ones(o_BTGC.shape[-1]) if of_each else gain if times == 1 else gain * times
            o_BTGC = F.rms_norm(o_BTGC, of_all.shape, of_all.to(o_BTGC.dtype), eps)
        o_BHTK = o_BTGC.unflatten(3, (n_together, -1)).flatten(2, 3).transpose(1, 2)
        return o_BHTK * gain[:, None].to(o_BHTK.dtype) if of_each else o_BHTK
    # On a CPU, rows as short as a head cost the library's norm more than all of the arithmetic.
    size_BHT = torch.linalg.vector_norm(o_BHTK, dim=-1, dtype=torch.promote_types(o_BHTK.dtype, torch.float32))
    square_BHT = size_BHT.square() / o_BHTK.shape[-1]
    if n_together > 1:
        square_BHT = square_BHT.unflatten(1, (-1, n_together)).mean(2).repeat_interleave(n_together, dim=1)
        gain = gain.view(n_together, -1).repeat(o_BHTK.shape[1] // n_together, 1)
    scale_BHT = (square_BHT + eps).rsqrt() * times
    gain = gain[:, None] if gain.ndim == 2 else gain
    return o_BHTK * scale_BHT[..., None].to(o_BHTK.dtype) * gain.to(o_BHTK.dtype)


class ReleasedHeadNorm(PlainAggregation):
    """Head-wise RMSNorm as the authors of [SO] released it: one gain ``[H, d_head]``, a vector for each head.

    The gain starts at the spread of the first token's head output and decays with the weights.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.config = config
        self.gain = nn.Parameter(torch.ones(config.n_heads, config.d_value))
        self.parameter_roles = {"gain": ParameterRole.DECAYED_GAIN}

    def forward(self, weighted: WeightedSum, v_BGSK: Tensor) -> Tensor:
        """Normalise every head at every position to RMS 1, then apply the gain."""
        return _normed(weighted.o_BHTK, self.gain, self.config.norm_eps)

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Start the gain at the standard deviation of a newborn value map's outputs for inputs of RMS 1.

        The first token attends to itself alone, so that its head outputs are its values. Under a norm of values that is
        1. ``model.init.zero`` changes nothing here: a gain of 0 on values of 0 would never learn. Six decimals are
        kept, so that machines whose mathematical functions differ in the last bit bear the same gain.
        """
        config, latent = self.config, self.config.attention.latent
        if config.attention.v_norm != "none":
            return {"gain": Constant(1.0)}
        if latent.kv_rank is not None:
            keys_and_values = config.d_key - config.d_rope + config.d_value
            fans = Fans(latent.kv_rank, config.n_heads * keys_and_values)
        else:
            fans = Fans(config.d_model, config.kv_heads * config.d_value)
        return {"gain": Constant(round(INITIALISERS[init.kind](init, fans).spread * fans.fan_in**0.5, 6))}


class DifferentialNorm(PlainAggregation):
    """RMSNorm over both heads of each pair, times one gain ``[2·d_head]`` shared by the pairs, times ``1 − λ_init``
    (arXiv 2410.05258)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.eps, self.kept = config.norm_eps, 1 - initial_lambda(0)
        self.gain = nn.Parameter(torch.ones(2 * config.d_value))
        self.parameter_roles = {"gain": ParameterRole.GAIN}

    @override
    def in_block(self, block: int) -> None:
        self.kept = 1 - initial_lambda(block)

    def forward(self, weighted: WeightedSum, v_BGSK: Tensor) -> Tensor:
        """Normalise every pair at every position to RMS 1 − λ_init, then apply the gain."""
        if (normed := weighted.normed(self.gain, self.eps, self.kept)) is not None:
            return normed
        return _normed(weighted.o_BHTK, self.gain, self.eps, n_together=2, times=self.kept)

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Start the gain at 1."""
        return {"gain": Constant(1.0)}


class AnalyticCalibration(PlainAggregation):
    """Head outputs times ``1/√(ρ + (1−ρ)/n_eff)`` with ``n_eff = t+1``, that of uniform attention [BB].

    ``amplify`` leaves the factor as it is; ``attenuate`` divides it by its own value at ``n_eff = t_ref``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        calibration = config.attention.calibration
        self.gradient = calibration.gradient
        self.t_ref = (calibration.t_ref or config.max_seq_len) if calibration.direction == "attenuate" else None
        self.rho = CORRELATIONS[calibration.correlation](config)

    def squares(self, weighted: WeightedSum) -> Tensor:
        """Compute ``1/n_eff``, broadcastable to ``[B, H, T]``."""
        place, o = weighted.scores.place, weighted.o_BHTK
        n_eff = (place.positions(o.shape[2], o.device) + 1).float()
        return 1 / (n_eff if n_eff.ndim == 1 else n_eff[:, None])

    def forward(self, weighted: WeightedSum, v_BGSK: Tensor) -> Tensor:
        """Multiply head outputs by the calibration factor, ``o · factor``."""
        return self.multiplied(weighted, self.correlation(weighted, v_BGSK))

    def correlation(self, weighted: WeightedSum, v_BGSK: Tensor) -> Tensor | None:
        """Compute ρ; None: 0."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.gradient):
            rho: Tensor | None = self.rho(v_BGSK, weighted.scores.place.documents)
        return rho

    def multiplied(self, weighted: WeightedSum, rho: Tensor | None) -> Tensor:
        """Multiply head outputs by the factor, given ρ."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.gradient):
            variance = self.squares(weighted).clamp_min(_SMALLEST_SQUARES)
            reference: Tensor | float = 1.0 if self.t_ref is None else variance.new_full((), 1 / self.t_ref)
            if rho is not None:
                variance = rho + (1 - rho) * variance
                reference = 1.0 if self.t_ref is None else rho + (1 - rho) / self.t_ref
            factor = (reference / variance).sqrt()
        return scaled(weighted.o_BHTK, factor)


class ExactCalibration(AnalyticCalibration):
    """The same with ``1/n_eff = Σ a²`` of the actual weights, on tokens and on keys that have no value.

    Weights on tokens alone are those of the plain softmax times a factor of the row, ``1 − a_sink``. At ρ = 0 the
    calibration would divide by that factor, and what the head leaves to a sink would change nothing.
    """

    needs_squares = True

    @override
    def forward(self, weighted: WeightedSum, v_BGSK: Tensor) -> Tensor:
        rho, inverse = self.correlation(weighted, v_BGSK), None if self.t_ref is None else 1 / self.t_ref
        calibrated = weighted.calibrated(Calibration(rho, _SMALLEST_SQUARES, inverse, self.gradient))
        return self.multiplied(weighted, rho) if calibrated is None else calibrated

    def squares(self, weighted: WeightedSum) -> Tensor:
        """Compute ``Σ a²`` of the actual weights, ``[B, H, T]``."""
        squares_BHT, without_value_BHT = weighted.sum_squares(), weighted.squares_without_value()
        return squares_BHT if without_value_BHT is None else squares_BHT + without_value_BHT


#: Value aggregations by name; ``calibrated`` has two forms.
AGGREGATIONS: dict[str, type[PlainAggregation]] = {
    "plain": PlainAggregation,
    "headnorm": HeadNorm,
    "headnorm_released": ReleasedHeadNorm,
    "differential_norm": DifferentialNorm,
    "calibrated-analytic": AnalyticCalibration,
    "calibrated-exact": ExactCalibration,
}


def build_aggregation(config: ModelConfig, block: int) -> PlainAggregation:
    """Build the value aggregation of one block (from 0)."""
    attention = config.attention
    if attention.aggregation_blocks is not None and block not in attention.aggregation_blocks:
        attention = replace(attention, aggregation="plain")
    kind = attention.aggregation
    name = f"{kind}-{attention.calibration.n_eff}" if kind == "calibrated" else kind
    part = build_part("aggregation", name, AGGREGATIONS, PlainAggregation, config)
    part.in_block(block)
    return part
