"""Linear maps of a model's blocks, with weights and inputs rounded temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import UsageError
from ...models.decoder import Decoder
from ..hf import HFModel
from .rounding import WHOLE, Bits, rounded


class LinearMap(NamedTuple):
    """A linear map inside the blocks."""

    module: nn.Module
    input_dim: int
    """Dimension of its weight that inputs run along; the other is its output channels."""


def linear_maps(model: Decoder | HFModel) -> list[LinearMap]:
    """List every linear map of the blocks: queries, keys, values, outputs, gates and the MLP's, but not embedding and
    head.

    Raises:
        UsageError: blocks hold matrices in another form, such as stacked experts, which rounding would miss.
    """
    if isinstance(model, Decoder):
        return [LinearMap(m, 1) for m in model.blocks.modules() if isinstance(m, nn.Linear)]
    from transformers.pytorch_utils import Conv1D

    inner: Any = model.model
    found = []
    for name, module in inner.base_model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            found.append(LinearMap(module, 1 if isinstance(module, nn.Linear) else 0))
        elif stacked := next((n for n, p in module.named_parameters(recurse=False) if p.ndim > 2), None):
            raise UsageError(f"{name}.{stacked} holds several matrices in one, which cannot be quantised here")
    if not found:
        raise UsageError(f"this {type(inner).__name__} has no linear maps in its blocks that can be quantised")
    return found


@contextmanager
def quantised(model: Decoder | HFModel, bits: Bits) -> Iterator[None]:
    """Round weights per output channel, and inputs per token as they come; the model is restored at the end."""
    weights: dict[nn.Parameter, Tensor] = {}
    handles = []

    def round_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounded(args[0], bits.activations, -1), *args[1:])

    try:
        for module, input_dim in linear_maps(model):
            weight = module.weight
            assert isinstance(weight, nn.Parameter)
            if bits.weights != WHOLE and weight not in weights:
                weights[weight] = weight.data
                with torch.no_grad():
                    weight.data = rounded(weight.data, bits.weights, input_dim)
            if bits.activations != WHOLE:
                handles.append(module.register_forward_pre_hook(round_input))
        yield
    finally:
        for weight, data in weights.items():
            weight.data = data
        for handle in handles:
            handle.remove()
