"""The part of one attention of a pass that the metrics of this folder read (``measure/observed.py`` has all of it)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..sinks import KeySums


class ShownAttention(Protocol):
    """An attention of a batch: B sequences, H query heads, T positions, K head width."""

    @property
    def k_BHTK(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Keys as they enter the scores."""

    @property
    def v_BHTK(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Values."""

    @property
    def sums(self) -> KeySums:
        """Sums of the weights that queries give to keys."""

    @property
    def tokens_BT(self) -> Tensor | None:  # noqa: N802 - a shape suffix
        """Token ids of the batch; None if unknown."""
