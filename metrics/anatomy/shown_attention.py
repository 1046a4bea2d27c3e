"""What the metrics of this folder read of one attention of a pass (``measure/observed.py`` has it all)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..sinks import KeySums


class ShownAttention(Protocol):
    """One attention of a batch: B sequences, H query heads, T positions, K head width."""

    @property
    def k_BHTK(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Keys as they enter the scores."""

    @property
    def v_BHTK(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Values."""

    @property
    def sums(self) -> KeySums:
        """What queries give to keys."""

    @property
    def tokens_BT(self) -> Tensor | None:  # noqa: N802 - a shape suffix
        """The batch; None where it is not known."""
