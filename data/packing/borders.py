"""Beginnings of documents in sequences of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PADDING = -100
"""Value in samples at places without a token; as a target it counts nowhere."""


@dataclass(frozen=True)
class DocumentBorders:
    """Rule by which ids mark the beginnings of documents: an end-of-text token closes each."""

    end: int
    """The end-of-text token."""
    start: int | None = None
    """BOS, if it comes before every document. If the end-of-text token is also BOS, the two alternate: after text it
    ends a document, before text it begins one.
    """
    behind_bos: bool = False
    """True if every sequence begins with a BOS that belongs to no document; it counts to the first document there."""

    def documents(self, tokens_BT: Tensor) -> Tensor:
        """Return the number of each position's document in its sequence, from 0, rising: int64 ``[B, T]``; −1 for
        padding.

        A sequence may begin inside a document.
        """
        ends_BT = tokens_BT == self.end
        opens_BT = self._opens(tokens_BT, ends_BT)
        begins_BT = tokens_BT.new_zeros(tokens_BT.shape)
        begins_BT[:, 1:] = (ends_BT & ~opens_BT)[:, :-1] | opens_BT[:, 1:]
        if self.behind_bos:
            begins_BT[:, 1:2] = 0
        return begins_BT.cumsum(1).masked_fill(tokens_BT < 0, -1)

    def _opens(self, tokens_BT: Tensor, ends_BT: Tensor) -> Tensor:
        """Mark the positions of BOS tokens of documents."""
        if self.start is None:
            return ends_BT & False
        if self.start != self.end:
            return tokens_BT == self.start
        place_BT = ends_BT.new_ones(ends_BT.shape).cumsum(1)
        # Start of the run of such tokens: the position behind the last other token.
        before_BT = (place_BT * ~ends_BT).cummax(1).values
        # A run that a sequence begins with may have begun before it, but its last is known where text follows.
        leading_BT = before_BT == 0
        n_leading_B1 = leading_BT.sum(1, keepdim=True)
        follows_B1 = tokens_BT.gather(1, n_leading_B1.clamp(max=tokens_BT.shape[1] - 1))
        last_B1 = n_leading_B1.where((follows_B1 >= 0) & (follows_B1 != self.end), 1)
        in_run_BT = place_BT - last_B1.where(leading_BT, before_BT)
        return ends_BT & (in_run_BT % 2 == 0)
