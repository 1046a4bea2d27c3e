"""Changes that leave a model's function as it was: other coordinates of its residual stream, other orders of units."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ...errors import UsageError
from ...models.config import ModelConfig
from ...models.init import keyed_generator
from .change import Change, ModelWeights, wide

# ---------------------------------------------------------------- residual stream
# Tensors that read or write the residual stream, and changes of its coordinates in all of them.
#
# Legend: D width of the residual stream.

_READERS = {
    "norm_attn": ("attn.q", "attn.k", "attn.v", "attn.q_down", "attn.kv_down", "attn.gate.map"),
    "norm_mlp": ("mlp.gate", "mlp.up"),
}
"""Norm of a block → the maps that read its output."""
_WRITERS = ("attn.o", "mlp.down")
_BLOCK = re.compile(r"blocks\.\d+\.")


class Readers(NamedTuple):
    """A norm and the matrices ``[…, D]`` that read its output."""

    norm: str
    weights: tuple[str, ...]
    """Names of tensors; the head's only where it is a table of its own."""


def readers(model: ModelWeights) -> Iterator[Readers]:
    """Yield every place where the residual stream is read: two in a block, and the head."""
    for i in range(model.config.n_layers):
        for norm, maps in _READERS.items():
            names = tuple(f"blocks.{i}.{name}.weight" for name in maps)
            yield Readers(f"blocks.{i}.{norm}", tuple(name for name in names if name in model.tensors))
    yield Readers("norm", ("head.weight",) if "head.weight" in model.tensors else ())


def check_channels(config: ModelConfig, what: str) -> None:
    """Raise UsageError if channels of the residual stream are tied to their places."""
    if config.positions == "sinusoidal":
        raise UsageError(f"{what}: model.positions sinusoidal adds fixed waves to fixed channels; they cannot be moved")
    check_gate_kind(config, what)
    if config.attention.gate_at == "projection":
        raise UsageError(f"{what}: model.attention.gate_at projection multiplies channels of the residual stream")


def check_gate_kind(config: ModelConfig, what: str) -> None:
    """Raise UsageError if a user's class reads the residual stream."""
    if gate := config.attention.user_parts.get("gate"):
        raise UsageError(f"{what}: how model.attention.gate {gate} reads the residual stream is not known")
    if config.experts.is_on:
        raise UsageError(f"{what}: routers and experts read the residual stream too, and model.experts is set")
    if config.norm_gate is not None:
        raise UsageError(f"{what}: model.norm_gate {config.norm_gate} reads what norms give, behind their gains")
    if config.norm_scale:
        raise UsageError(f"{what}: model.norm_scale multiplies channels of the residual stream before their norm")
    if config.attention.gate_input == "value":
        raise UsageError(f"{what}: the gate of model.attention.gate_input value does not read the residual stream")


def _stream_axis(name: str, positions: str) -> int | None:
    """Return the axis of a tensor along the residual stream, or None. Gains of norms do not count."""
    part = _BLOCK.sub("", name)
    owner, _, leaf = part.rpartition(".")
    if part in ("embed.weight", "head.weight") or (part == "positions.table.weight" and positions == "learned"):
        return 1
    if owner in _WRITERS:
        return 0
    if any(owner in maps for maps in _READERS.values()) and leaf == "weight":
        return 1
    return 0 if _is_norm(owner) and leaf == "bias" else None


def _is_norm(owner: str) -> bool:
    return owner in ("norm", *_READERS, *(f"{norm}_out" for norm in _READERS))


def in_other_coordinates(
    model: ModelWeights, move: Callable[[Tensor, int], Tensor], move_gain: Callable[[Tensor], Tensor]
) -> ModelWeights:
    """Apply an orthogonal map to a model's residual stream.

    Args:
        model: the model to change.
        move: function that applies the map along one axis of a tensor.
        move_gain: function that maps the gain ``[D]`` of a norm.
    """
    tensors = {}
    for name, tensor in model.tensors.items():
        axis = _stream_axis(name, model.config.positions)
        if axis is not None:
            tensors[name] = move(tensor, axis)
        elif name.endswith(".gain") and _is_norm(_BLOCK.sub("", name).removesuffix(".gain")):
            tensors[name] = move_gain(tensor)
        else:
            tensors[name] = tensor
    return model._replace(tensors=tensors)


def untied(model: ModelWeights) -> ModelWeights:
    """Give a model with tied embeddings a separate output head; the function stays the same."""
    if not model.config.tie_embeddings:
        return model
    table = model.tensors["embed.weight"]
    return ModelWeights(replace(model.config, tie_embeddings=False), {**model.tensors, "head.weight": table})


def with_gains(model: ModelWeights, new_gain: Callable[[str, Tensor], Tensor]) -> ModelWeights:
    """Replace the gains of the norms that read the residual stream; the function stays the same.

    The matrices behind a gain are scaled column by column to compensate; biases of norms scale with their gain. A head
    that is tied to the embedding gets a separate table.

    Args:
        model: the model to change.
        new_gain: function from the name of a norm and its gain, float64 ``[D]``, to its new gain; 0 only where the old
            gain is 0 too.

    Raises:
        UsageError: a gain is 0 beside a nonzero bias, which no other gain can express.
    """
    model = untied(model)
    tensors = dict(model.tensors)
    for norm, weights in readers(model):
        gain = tensors.get(f"{norm}.gain")
        if gain is None:
            continue
        wanted_D = new_gain(norm, wide(gain))
        factor_D = torch.where(wanted_D == 0, 1.0, wide(gain) / wanted_D)
        tensors[f"{norm}.gain"] = wanted_D.to(gain.dtype)
        for name in weights:
            tensors[name] = (wide(tensors[name]) * factor_D).to(tensors[name].dtype)
        if (bias := tensors.get(f"{norm}.bias")) is not None:
            if bool(((factor_D == 0) & (bias != 0)).any()):
                raise UsageError(f"{norm}.gain has a 0 beside a bias: it cannot be moved into the maps behind it")
            safe_D = torch.where(factor_D == 0, 1.0, factor_D)
            tensors[f"{norm}.bias"] = (wide(bias) / safe_D).to(bias.dtype)
    return model._replace(tensors=tensors)


# ---------------------------------------------------------------- channels
# Changes of coordinates of the residual stream that leave the function of a model unchanged.


@dataclass(frozen=True)
class ChannelPermutation(Change):
    """The channels of the residual stream in a random order."""

    @override
    def check(self, config: ModelConfig) -> None:
        check_channels(config, "permute_channels")

    @override
    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        order = keyed_generator(seed, "channels").permutation(model.config.d_model)

        def move(tensor: Tensor, axis: int) -> Tensor:
            return tensor.index_select(axis, torch.from_numpy(order).to(tensor.device))

        return in_other_coordinates(model, move, lambda gain_D: move(gain_D, 0))


@dataclass(frozen=True)
class SignFlips(Change):
    """Random channels of the residual stream change their sign."""

    share: float = 0.5
    """Share of the channels that are negated; 1 negates all."""

    @override
    def problems(self) -> list[str]:
        return [] if 0 < self.share <= 1 else [f"share is {self.share}: give a share above 0, at most 1"]

    @override
    def check(self, config: ModelConfig) -> None:
        check_channels(config, "flip_signs")
        if config.norm == "layernorm" and self.share < 1:
            raise UsageError(
                "flip_signs: model.norm layernorm takes the mean over channels, so that only all of them together can "
                "change their sign: give share 1"
            )

    @override
    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        sign_D = np.ones(model.config.d_model)
        flipped = keyed_generator(seed, "signs").permutation(len(sign_D))[: max(round(self.share * len(sign_D)), 1)]
        sign_D[flipped] = -1

        def move(tensor: Tensor, axis: int) -> Tensor:
            sign = torch.from_numpy(sign_D).to(tensor)
            return tensor * (sign[:, None] if axis == 0 and tensor.ndim == 2 else sign)

        return in_other_coordinates(model, move, lambda gain_D: gain_D)


@dataclass(frozen=True)
class ChannelScaling(Change):
    """Scaling of every channel of a norm's output, undone by the matrices behind it.

    The residual stream stays as it is, but the final hidden states do not. A tied head gets a separate table.
    """

    factor: float = 4.0
    """Largest scale; scales are drawn log-uniformly between its inverse and itself."""

    @override
    def problems(self) -> list[str]:
        return [] if 1 < self.factor <= 1e3 else [f"factor is {self.factor}: give a number above 1, at most 1000"]

    @override
    def check(self, config: ModelConfig) -> None:
        check_gate_kind(config, "scale_channels")
        if config.norm == "none":
            raise UsageError("scale_channels: model.norm none has no gains to scale")

    @override
    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:

        def scaled(norm: str, gain_D: Tensor) -> Tensor:
            exponent_D = keyed_generator(seed, "scales", norm).uniform(-1, 1, len(gain_D))
            return gain_D * torch.from_numpy(self.factor**exponent_D).to(gain_D)

        return with_gains(model, scaled)


@dataclass(frozen=True)
class Rotation(Change):
    """The residual stream turned by a random orthogonal matrix, uniform among those that the architecture allows.

    Gains of norms are moved into the matrices behind them first (QuaRot, arXiv 2404.00456). Under layer norm, whose
    mean over channels must stay, directions across (1, …, 1) turn.
    """

    @override
    def check(self, config: ModelConfig) -> None:
        check_channels(config, "rotate")
        if config.norm == "dyt":
            raise UsageError("rotate: model.norm dyt bends each channel by itself, and no rotation passes that")
        if config.norm != "none" and config.norm_placement != "pre":
            raise UsageError(
                f"rotate: model.norm_placement {config.norm_placement} puts gains between a norm and the residual "
                "stream, where no rotation passes them"
            )

    @override
    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        config = model.config
        turn_DD = random_rotation(config, seed)

        def move(tensor: Tensor, axis: int) -> Tensor:
            turn = turn_DD.to(tensor.device)
            return (turn @ wide(tensor) if axis == 0 else wide(tensor) @ turn.T).to(tensor.dtype)

        plain = with_gains(model, lambda norm, gain_D: torch.ones_like(gain_D)) if config.norm != "none" else model
        return in_other_coordinates(plain, move, lambda gain_D: gain_D)


def random_rotation(config: ModelConfig, seed: int) -> Tensor:
    """Draw a random orthogonal matrix, float64 ``[D, D]``; under layer norm one that fixes (1, …, 1).

    Uniform (Haar): Q of a normal matrix, with the signs of R's diagonal (arXiv math-ph/0609050).
    """
    d = config.d_model
    fixed = int(config.norm == "layernorm")
    drawn = keyed_generator(seed, "rotation").standard_normal((d - fixed, d - fixed))
    q, r = np.linalg.qr(drawn)
    turn = q * np.sign(np.diagonal(r))
    if fixed:
        # An orthonormal basis that begins with the mean's direction.
        basis, _ = np.linalg.qr(np.column_stack([np.ones(d), np.eye(d)[:, 1:]]))
        whole = np.eye(d)
        whole[1:, 1:] = turn
        turn = basis @ whole @ basis.T
    return torch.from_numpy(turn)


# ---------------------------------------------------------------- unit order
# Reordering of the hidden units of MLPs, which leaves everything outside of them unchanged.


@dataclass(frozen=True)
class UnitPermutation(Change):
    """Random reordering of the hidden units of every MLP, each in its own order."""

    @override
    def check(self, config: ModelConfig) -> None:
        if config.experts.is_on:
            raise UsageError("permute_units: experts have units of their own each, and model.experts is set")

    @override
    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        tensors = dict(model.tensors)
        for i in range(model.config.n_layers):
            order = torch.from_numpy(keyed_generator(seed, "units", i).permutation(model.config.ff))
            axes = {"gate.weight": 0, "gate.bias": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1}
            for part, axis in axes.items():
                name = f"blocks.{i}.mlp.{part}"
                if name in tensors:
                    tensors[name] = tensors[name].index_select(axis, order.to(tensors[name].device))
        return model._replace(tensors=tensors)
