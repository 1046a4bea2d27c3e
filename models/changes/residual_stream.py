"""Tensors that read or write the residual stream, and changes of its coordinates in all of them.

Legend: D width of the residual stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UsageError
from ..config import ModelConfig
from .change import ModelWeights, wide

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
    check_known_gate(config, what)
    if config.attention.gate_at == "projection":
        raise UsageError(f"{what}: model.attention.gate_at projection multiplies channels of the residual stream")


def check_known_gate(config: ModelConfig, what: str) -> None:
    """Raise UsageError if a user's class reads the residual stream."""
    if gate := config.attention.own_parts.get("gate"):
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
