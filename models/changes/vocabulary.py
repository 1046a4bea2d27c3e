"""More tokens, or fewer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import UsageError
from ..keyed_random import keyed_generator
from .change import Change, ModelWeights

_TABLES = ("embed.weight", "head.weight")


@dataclass(frozen=True)
class VocabularyExtension(Change):
    """New tokens behind the old: each channel of their rows is drawn from a normal with that channel's mean and
    standard deviation over the old rows, in the embedding and in the head."""

    rows: int
    """Number of new rows."""

    def problems(self) -> list[str]:
        """See :class:`Change`."""
        return [] if 1 <= self.rows <= 1 << 26 else [f"rows is {self.rows}: give 1 to {1 << 26}"]

    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        """See :class:`Change`."""
        tensors = dict(model.tensors)
        for name in _TABLES:
            if name in tensors:
                tensors[name] = torch.cat([tensors[name], self._new_rows(tensors[name], name, seed)])
        return ModelWeights(replace(model.config, vocab_size=model.config.vocab_size + self.rows), tensors)

    def _new_rows(self, table_VD: Tensor, name: str, seed: int) -> Tensor:
        normals_RD = keyed_generator(seed, "new rows", name).standard_normal(
            (self.rows, table_VD.shape[1]), dtype="float32"
        )
        return table_VD.mean(0) + table_VD.std(0, correction=0) * torch.from_numpy(normals_RD).to(table_VD)


def first_tokens(model: ModelWeights, n_tokens: int) -> ModelWeights:
    """Remove the tokens from ``n_tokens`` on; hidden states on the others stay the same.

    Raises:
        UsageError: the model has fewer tokens.
    """
    if not 2 <= n_tokens <= model.config.vocab_size:
        raise UsageError(f"{n_tokens} tokens of a model that has {model.config.vocab_size}: give 2 to that number")
    tensors = {name: t[:n_tokens] if name in _TABLES else t for name, t in model.tensors.items()}
    return ModelWeights(replace(model.config, vocab_size=n_tokens), tensors)
