"""Names and shapes of a decoder's tensors, read from a decoder on the meta device: nothing is allocated."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

from .config import ModelConfig
from .decoder import Decoder

NamedShape: TypeAlias = tuple[str, tuple[int, ...]]


def _on_meta(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


def parameter_shapes(config: ModelConfig) -> list[NamedShape]:
    """Return names and shapes of all parameters in the model's order, tied ones once."""
    return [(name, tuple(parameter.shape)) for name, parameter in _on_meta(config).named_parameters()]


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all parameters and buffers, tied ones once, in name order."""
    return {name: tuple(tensor.shape) for name, tensor in sorted(_on_meta(config).state_dict().items())}


def n_idle(config: ModelConfig) -> int:
    """Count the parameters that one token does not pass: those of experts that its routers do not choose."""
    n_experts = config.experts.n_experts
    if n_experts is None:
        return 0
    routed = sum(math.prod(shape) for name, shape in parameter_shapes(config) if ".mlp.experts." in name)
    return routed * (n_experts - config.experts.top_k) // n_experts
