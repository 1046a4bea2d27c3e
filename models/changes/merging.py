"""Two models averaged into one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ...errors import UsageError
from ..config import InitConfig, ModelConfig
from .change import Change, ModelWeights, share_problem


@dataclass(frozen=True)
class Merging(Change):
    """``(1 − share)·a + share·b`` of every tensor (model soups, arXiv 2203.05482)."""

    share: float
    """Share of the other model."""

    needs_other: ClassVar[bool] = True

    def problems(self) -> list[str]:
        """See :class:`Change`."""
        return share_problem("share", self.share)

    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        """See :class:`Change`."""
        if other is None:
            raise UsageError("merge: needs another model to merge with")
        if _function(model.config) != _function(other.config):
            raise UsageError("merge: the two models have different configs, so that their weights cannot be averaged")
        return model._replace(tensors=_averaged(model.tensors, other.tensors, self.share))


def _function(config: ModelConfig) -> ModelConfig:
    """Return the config with default initialisation, which leaves the fields that decide the function."""
    return replace(config, init=InitConfig())


def _averaged(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    return {name: tensor.lerp(theirs[name].to(tensor), share) for name, tensor in ours.items()}
