"""Kinds of interventions: targets, places and strengths (definitions §8) [SO]. Nothing here loads torch.

Legend: B sequences, H query heads, T positions, K head width, C channels or hidden units, P chosen positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from ..errors import UsageError
from ..models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from .hf import HFConfig

KindName = Literal["mask", "amplify", "scale", "ablate_unit", "ablate_channel", "ablate_head", "ablate_value"]
Around = Literal["outputs", "values"]
Fill = Literal["zero", "mean"]
#: A place that can be changed: the heads' aggregation, the hidden units of the MLP, the residual stream after a block.
ChangedPlace = Literal["aggregation", "units", "stream"]
#: Quantity whose mean over sequences and positions an intervention needs.
MeanOf = Literal["outputs", "values", "units", "stream"]
LAMBDAS = (1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Aggregation:
    """Value aggregation of one block, as a pass computes it."""

    o_BHTK: Tensor
    v_BHTK: Tensor
    """Values, repeated to the query heads."""
    weights_on: Callable[[int], Tensor]
    """Key → its weight for every query, ``[B, H, T]``."""


@dataclass(frozen=True)
class Intervention:
    """A change of a model while it reads a probe."""

    kind: KindName
    layers: tuple[int, ...]
    """Blocks, from 1; every one of them is changed."""
    positions: tuple[int, ...] = ()
    """Positions, from 0. None: every position, for a unit, a channel or a head."""
    lambdas: tuple[float, ...] | None = None
    """Doses of amplify and scale."""
    around: Around | None = None
    """The mean that amplify moves away from, in each block: that of heads' outputs over the probe, while the chosen
    blocks before are changed too; or that of values over random tokens, of the model left alone. By default outputs."""
    matched: bool = False
    """Scale lets the norm of ``o_k`` grow as amplify of the same dose would."""
    units: tuple[int, ...] = ()
    """Hidden units, from 0."""
    channels: tuple[int, ...] = ()
    """Channels of the residual stream, from 0."""
    heads: tuple[int, ...] = ()
    """Query heads, from 0."""
    fill: Fill | None = None
    """The number in place of an ablated one: zero, by default, or its mean in the model left alone, over the probe; for
    the value of a token, over random tokens."""

    @property
    def means(self) -> Kind:
        """The row of :data:`KINDS`."""
        return KINDS[self.kind]

    @property
    def doses(self) -> tuple[float, ...]:
        """Strengths λ, one for each pass after the unchanged one; a single 1 if there is no choice."""
        return (self.lambdas or LAMBDAS) if "lambdas" in self.means.options else (1.0,)

    @property
    def watched(self) -> tuple[int, ...]:
        """Keys whose attention is the outcome: those at the chosen positions; without any, key 0."""
        return self.positions or (0,)

    def check(self, config: ModelConfig | HFConfig, seq_len: int) -> None:
        """Check that a model of this shape can be changed so.

        Raises:
            UsageError: the intervention is impossible; the message begins with the name of the field and ends with the
                remedy.
        """
        kind, n_layers = KINDS.get(self.kind), config.n_layers
        if kind is None:
            raise UsageError(f"kind {self.kind}: give one of {', '.join(KINDS)}")
        if not self.layers:
            raise UsageError(f"layers: give one block at least, from 1 to {n_layers}")
        _check_range("layers", self.layers, 1, n_layers, f"this model has {n_layers} blocks")
        if kind.acts_on_later_blocks and min(self.layers) == n_layers:
            raise UsageError(f"layers {n_layers}: is the last block; change one that has a block after it")
        for name in sorted(_OPTIONAL - kind.options):
            if getattr(self, name) not in (None, False, ()):
                able = ", ".join(other for other, row in KINDS.items() if name in row.options)
                raise UsageError(f"{name}: kind {self.kind} does not read it, only {able}; leave it out")
        if kind.needs_position and not self.positions:
            raise UsageError(f"positions: kind {self.kind} needs one, from 0 to {seq_len - 2}")
        _check_range("positions", self.positions, 0, seq_len - 2, f"the probe has {seq_len}, and queries must follow")
        if (named := kind.named) is not None:
            field, size = named, _sizes(config)[named]
            if not getattr(self, field):
                raise UsageError(f"{field}: kind {self.kind} needs one at least, from 0 to {size - 1}")
            if not size:
                raise UsageError(f"{field}: the {field} of this model's blocks are not seen; they cannot be changed")
            _check_range(field, getattr(self, field), 0, size - 1, f"a block has {size}")
        for dose in self.doses:
            if not math.isfinite(dose):
                raise UsageError(f"lambda {dose}: give a finite number")
        if self.around is not None and self.kind == "scale" and not self.matched:
            raise UsageError("around: scale reads it only where it is matched; leave it out, or give matched too")
        kind.check_attention(config)


class Kind:
    """A kind of intervention: a row of :data:`KINDS`."""

    meaning: ClassVar[str]
    """Meaning in a few words, for help texts."""
    place: ClassVar[ChangedPlace] = "aggregation"
    options: ClassVar[frozenset[str]] = frozenset()
    """The optional fields of :class:`Intervention` that it reads."""
    named: ClassVar[str | None] = None
    """Field that selects the units, channels or heads; None if there are none to choose."""
    needs_position: ClassVar[bool] = True
    acts_on_later_blocks: ClassVar[bool] = True
    """True if its outcome shows in later blocks alone."""

    def check_attention(self, config: ModelConfig | HFConfig) -> None:
        """Raise UsageError if the attention of a model does not allow it."""

    def mean_of(self, what: Intervention) -> MeanOf | None:
        """Name the mean that it needs."""
        return None

    def weights_seen(self, what: Intervention, weights_BHTP: Tensor) -> Tensor:
        """Correct the weights of a changed block on earlier keys for the effect of the change."""
        return weights_BHTP

    def follows_change(self, what: Intervention) -> bool:
        """Say if the mean of a block is taken while the chosen blocks before it are changed."""
        return False

    def changed(self, what: Intervention, dose: float, seen: Any, mean: Tensor | None) -> Tensor:
        """Compute the replacement of a block's result.

        Args:
            what: the intervention.
            dose: λ.
            seen: an :class:`Aggregation`; at other places, the tensor ``[B, T, C]``.
            mean: mean of the block, ``[H, K]`` or ``[C]``.
        """
        raise NotImplementedError


class Mask(Kind):
    """Masking, ``o_k ← v_k``: the softmax of query k over key k alone."""

    meaning = "query K sees itself only"

    @override
    def check_attention(self, config: ModelConfig | HFConfig) -> None:
        attention = config.attention
        plain = attention.normaliser == "softmax" and attention.kv_bias == "none"
        if not plain or attention.aggregation == "calibrated":
            raise UsageError(
                "kind mask: this attention is no plain softmax, or its output is calibrated by its weights"
            )

    @override
    def changed(self, what: Intervention, dose: float, seen: Aggregation, mean: Tensor | None) -> Tensor:
        at = list(what.positions)
        return _with(seen.o_BHTK, seen.v_BHTK[:, :, at], at)

    def weights_seen(self, what: Intervention, weights_BHTP: Tensor) -> Tensor:
        """See :class:`Kind`: a masked query gives nothing to an earlier key."""
        weights_BHTP = weights_BHTP.clone()
        weights_BHTP[:, :, list(what.positions)] = 0.0
        return weights_BHTP


class Amplify(Kind):
    """Amplification, ``o_k ← μ + λ(o_k − μ)``."""

    meaning = "what heads aggregate at K moves from its mean by the dose"
    options = frozenset({"lambdas", "around"})

    @override
    def mean_of(self, what: Intervention) -> MeanOf | None:
        return what.around or "outputs"

    @override
    def follows_change(self, what: Intervention) -> bool:
        return self.mean_of(what) == "outputs"

    @override
    def changed(self, what: Intervention, dose: float, seen: Aggregation, mean: Tensor | None) -> Tensor:
        assert mean is not None
        at = list(what.positions)
        mean_H1K = mean[:, None]
        return _with(seen.o_BHTK, mean_H1K + dose * (seen.o_BHTK[:, :, at] - mean_H1K), at)


class Scale(Amplify):
    """Scaling, ``o_k ← λ·o_k``, the control. If matched, the factor gives ``o_k`` of all heads together the norm that
    amplify would.
    """

    meaning = "the control: it grows, and keeps its direction"
    options = frozenset({"lambdas", "around", "matched"})

    @override
    def mean_of(self, what: Intervention) -> MeanOf | None:
        return super().mean_of(what) if what.matched else None

    @override
    def changed(self, what: Intervention, dose: float, seen: Aggregation, mean: Tensor | None) -> Tensor:
        at = list(what.positions)
        o_BHPK = seen.o_BHTK[:, :, at]
        if not what.matched:
            return _with(seen.o_BHTK, dose * o_BHPK, at)
        aim_BHPK = super().changed(what, dose, seen, mean)[:, :, at]
        factor = aim_BHPK.norm(dim=(1, 3), keepdim=True) / o_BHPK.norm(dim=(1, 3), keepdim=True)
        return _with(seen.o_BHTK, factor * o_BHPK, at)


class Ablation(Kind):
    """Replacement by zero, or by the mean over the probe; without positions, at every one."""

    options = frozenset({"fill"})
    needs_position = False
    acts_on_later_blocks = False
    filled_with: ClassVar[MeanOf]

    @override
    def mean_of(self, what: Intervention) -> MeanOf | None:
        return self.filled_with if what.fill == "mean" else None


class LastAxisAblation(Ablation):
    """Ablation of entries of the last axis of ``[B, T, C]``."""

    named: ClassVar[str]

    @override
    def changed(self, what: Intervention, dose: float, seen: Tensor, mean: Tensor | None) -> Tensor:
        x_BTC = seen.clone()
        rows = list(what.positions) or list(range(x_BTC.shape[1]))
        for index in getattr(what, self.named):
            x_BTC[:, rows, index] = 0.0 if mean is None else mean[index].to(x_BTC.dtype)
        return x_BTC


class AblateChannels(LastAxisAblation):
    """Ablation of channels of the residual stream, after each chosen block."""

    meaning = "channels of the residual stream become zero or their mean after the blocks"
    place, named, filled_with = "stream", "channels", "stream"
    options = frozenset({"fill", "channels"})


class AblateUnits(LastAxisAblation):
    """Ablation of hidden units of the MLP, at the input of its last map."""

    meaning = "hidden units of the MLP become zero or their mean"
    place, named, filled_with = "units", "units", "units"
    options = frozenset({"fill", "units"})


class AblateHeads(Ablation):
    """Ablation of the value aggregations of heads."""

    meaning = "what heads aggregate becomes zero or its mean"
    named, filled_with = "heads", "outputs"
    options = frozenset({"fill", "heads"})

    @override
    def changed(self, what: Intervention, dose: float, seen: Aggregation, mean: Tensor | None) -> Tensor:
        o_BHTK = seen.o_BHTK.clone()
        rows = list(what.positions) or list(range(o_BHTK.shape[2]))
        for head in what.heads:
            o_BHTK[:, head, rows] = 0.0 if mean is None else mean[head].to(o_BHTK.dtype)
        return o_BHTK


class AblateValue(Ablation):
    """Ablation of the value of key k, for every query that sees it: ``o_t ← o_t + a[t, k](fill − v_k)``."""

    meaning = "the value of key K becomes zero or the mean value"
    needs_position = True
    acts_on_later_blocks = True
    filled_with = "values"

    @override
    def changed(self, what: Intervention, dose: float, seen: Aggregation, mean: Tensor | None) -> Tensor:
        o_BHTK = seen.o_BHTK
        for key in what.positions:
            v_BHK = seen.v_BHTK[:, :, key]
            new_BHK = (0 * v_BHK) if mean is None else mean
            o_BHTK = o_BHTK + seen.weights_on(key)[..., None] * (new_BHK - v_BHK)[:, :, None]
        return o_BHTK


#: Kinds by name.
KINDS: Mapping[str, Kind] = {
    "mask": Mask(),
    "amplify": Amplify(),
    "scale": Scale(),
    "ablate_unit": AblateUnits(),
    "ablate_channel": AblateChannels(),
    "ablate_head": AblateHeads(),
    "ablate_value": AblateValue(),
}
_OPTIONAL = frozenset().union(*(kind.options for kind in KINDS.values()))


def _with(x_BHTK: Tensor, new_BHPK: Tensor, positions: list[int]) -> Tensor:
    """Return a copy of ``x_BHTK`` with ``new_BHPK`` at some positions."""
    x_BHTK = x_BHTK.clone()
    x_BHTK[:, :, positions] = new_BHPK.to(x_BHTK.dtype)
    return x_BHTK


def _sizes(config: ModelConfig | HFConfig) -> dict[str, int]:
    """Count the units, channels and heads of a block."""
    return {"units": config.ff, "channels": config.d_model, "heads": config.n_heads}


def _check_range(field: str, chosen: tuple[int, ...], first: int, last: int, why: str) -> None:
    if wrong := [index for index in chosen if not first <= index <= last]:
        raise UsageError(f"{field} {wrong[0]}: {why}; give {first} to {last}")
