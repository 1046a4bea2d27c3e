"""Config of dropout in training passes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...schema import outside


@dataclass(frozen=True)
class DropoutConfig:
    """Dropout in training passes (arXiv 1207.0580), as in GPT-2; off during measurements."""

    embedding: float = 0.0
    """Share of the channels of what enters the first block, token and position embeddings together, that become 0 in a
    training pass; the others are divided by 1 minus it; 0.1 in GPT-2 (Radford et al. 2019)."""

    residual: float = 0.0
    """The same of what attention and MLP give, before it is added to the residual stream; 0.1 in GPT-2 (Radford et al.
    2019)."""

    attention: float = 0.0
    """The same of the weights of attention; without a fused kernel, since none gives the same masks everywhere; 0.1 in
    GPT-2 (Radford et al. 2019)."""

    @property
    def is_on(self) -> bool:
        """True if anything is dropped."""
        return any(getattr(self, field.name) for field in fields(self))

    def problems(self) -> list[str]:
        """List values out of range, one line each, with the remedy."""
        return outside("model.dropout", self, {field.name: (0, 0.99) for field in fields(self)})
