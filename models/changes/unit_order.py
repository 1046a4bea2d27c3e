"""Reordering of the hidden units of MLPs, which leaves everything outside of them unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import UsageError
from ..config import ModelConfig
from ..keyed_random import keyed_generator
from .change import Change, ModelWeights


@dataclass(frozen=True)
class UnitPermutation(Change):
    """Random reordering of the hidden units of every MLP, each in its own order."""

    def check(self, config: ModelConfig) -> None:
        """See :class:`Change`."""
        if config.experts.is_on:
            raise UsageError("permute_units: experts have units of their own each, and model.experts is set")

    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        """See :class:`Change`."""
        tensors = dict(model.tensors)
        for i in range(model.config.n_layers):
            order = torch.from_numpy(keyed_generator(seed, "units", i).permutation(model.config.ff))
            axes = {"gate.weight": 0, "gate.bias": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1}
            for part, axis in axes.items():
                name = f"blocks.{i}.mlp.{part}"
                if name in tensors:
                    tensors[name] = tensors[name].index_select(axis, order.to(tensors[name].device))
        return model._replace(tensors=tensors)
