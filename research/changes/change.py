"""Base of the changes of weights: functions of a model's config and tensors, and of a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...errors import UsageError
from ...models.birth import empty_decoder
from ...models.config import ModelConfig
from ...models.decoder import Decoder


class ModelWeights(NamedTuple):
    """A model as its config and the state dict of its `Decoder`, parameters and buffers by name."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Change:
    """Base of all changes. Its input is not modified; unchanged tensors are shared.

    Its fields are its settings, which a study file gives beside its ``kind``.
    """

    needs_other: ClassVar[bool] = False
    """True if it takes another model beside the one that it changes."""

    def __post_init__(self) -> None:
        if found := self.problems():
            raise UsageError("; ".join(found))

    def problems(self) -> list[str]:
        """List settings that no model can have, one line each, with the remedy."""
        return []

    def __call__(self, model: ModelWeights, seed: int = 0, other: ModelWeights | None = None) -> ModelWeights:
        """Return the changed model.

        Args:
            model: the model to change.
            seed: seed of all random draws, used for nothing else.
            other: the model to merge in, if `needs_other`.

        Raises:
            UsageError: this model cannot be changed so; the message says why.
        """
        self.check(model.config)
        return self.changed(model, seed, other)

    def check(self, config: ModelConfig) -> None:
        """Raise UsageError, with the reason, if no model of this config can be changed so."""

    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        """Apply the change; arguments as in :meth:`__call__`."""
        raise NotImplementedError


def weights_of(model: Decoder) -> ModelWeights:
    """Return a model's config and tensors, not copied."""
    return ModelWeights(model.config, {name: tensor.detach() for name, tensor in model.state_dict().items()})


def decoder_of(weights: ModelWeights) -> Decoder:
    """Build the model with these weights, copied, on their device and in the embedding's dtype."""
    table = weights.tensors["embed.weight"]
    model = empty_decoder(weights.config, table.device, dtype=table.dtype)
    model.load_state_dict(dict(weights.tensors))
    return model


def is_block_matrix(name: str, tensor: Tensor) -> bool:
    """Return True if a tensor is the matrix of a linear map inside a block; embedding and head are not."""
    return name.startswith("blocks.") and name.endswith(".weight") and tensor.ndim == 2


def share_problem(field: str, value: float) -> list[str]:
    """Return a line of complaint if ``value`` is not between 0 and 1, both excluded."""
    return [] if 0 < value < 1 else [f"{field} is {value}: give a share between 0 and 1"]


def wide(tensor: Tensor) -> Tensor:
    """Convert to float64, where products are exact enough for a function that must stay the same."""
    return tensor.to(torch.float64)
