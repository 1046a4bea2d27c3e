"""Quantities along depth: the blocks in which one stands out, forms and vanishes, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..measure.records import Snapshot
from ..metrics.quantities import MEASURED
from .verdict import Group, array_of, enumerated

#: Stretches of blocks that a sentence lists; for more it gives the number of blocks and the two ends.
_LISTED = 4
_EMBEDDINGS = 0


@dataclass(frozen=True)
class Profile:
    """Values of a quantity in every block beside its control; NaN if a block does not show it."""

    values: np.ndarray
    """``[blocks]``."""
    controls: np.ndarray
    """``[blocks]``: the control of each."""
    first: int = 1
    """Number of the first entry: 1 for blocks, 0 where the embeddings stand before them."""

    @classmethod
    def of(cls, snapshot: Snapshot | None, name: str, group: Group = "bias") -> Profile | None:
        """Read a declared quantity beside its level; None if the snapshot has no number for any block."""
        array, quantity = array_of(snapshot, MEASURED[name].array, group), MEASURED[name]
        if snapshot is None or array is None or not array.size:
            return None
        values = np.asarray(quantity.blocks(array), dtype=float)
        level = quantity.level(snapshot.summary, group)
        found = cls(values, np.full(len(values), level), 0 if MEASURED[quantity.array].axes[0] == "state" else 1)
        return found if found.is_seen.any() else None

    @property
    def ratio(self) -> np.ndarray:
        """Ratio of each value to its control, ``[blocks]``."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.values / self.controls

    @property
    def is_seen(self) -> np.ndarray:
        """Mask of the blocks that show it, ``[blocks]``."""
        return np.isfinite(self.values)

    @property
    def blocks(self) -> np.ndarray:
        """Numbers of the blocks, ``[blocks]``."""
        return np.arange(len(self.values)) + self.first

    @property
    def peak(self) -> int:
        """Index of the block with the largest value; the lowest if several have it."""
        return int(np.nanargmax(self.values))

    def within(self, judged: np.ndarray) -> Profile:
        """Restrict it to some blocks, given by a mask ``[blocks]``."""
        return Profile(np.where(judged, self.values, np.nan), self.controls, self.first)

    def at_least(self, times: float) -> np.ndarray:
        """Mask ``[blocks]`` of the blocks with at least ``times`` their control."""
        return self.ratio >= times

    def name(self, index: int) -> str:
        """Name the block of an index."""
        return in_block(int(self.blocks[index]))

    def where(self, mask: np.ndarray) -> str:
        """Name the blocks of a mask: "in blocks 3–10 and 13–30"."""
        if mask[self.is_seen].all():
            return "in its one block" if len(mask) - (self.first == _EMBEDDINGS) == 1 else "in every block"
        return f"in {blocks_in_words(self.blocks[mask])}"

    def story(self, mask: np.ndarray) -> str:
        """Name the blocks at which something forms and vanishes: "forms at block 3 and vanishes after block 10"."""
        seen = self.blocks[self.is_seen]
        found = stretches(self.blocks[mask], among=seen)
        if mask[self.is_seen].all() or len(found) > _LISTED:
            return f"is there {self.where(mask)}"
        parts = []
        for i, (start, end) in enumerate(found):
            again = "again " if i else ""
            parts.append(f"is there from block {start} on" if start == seen[0] else f"forms {again}at block {start}")
            if end != seen[-1]:
                parts.append(f"vanishes after block {end}")
        return enumerated(parts)


def in_block(number: int) -> str:
    """Name a block; 0 is the embeddings."""
    return f"block {number}" if number != _EMBEDDINGS else "the embeddings"


def blocks_in_words(numbers: Sequence[int] | np.ndarray) -> str:
    """Name blocks, neighbours as a range: "blocks 3–10 and 13–30"; many stretches by their number and ends."""
    blocks = sorted({int(n) for n in numbers} - {_EMBEDDINGS})
    before = ["the embeddings"] if _EMBEDDINGS in {int(n) for n in numbers} else []
    if not blocks:
        return enumerated(before)
    found = stretches(blocks)
    if len(found) > _LISTED:
        return enumerated([*before, f"{len(blocks)} blocks from {blocks[0]} to {blocks[-1]}"])
    # Two neighbours are named: a dash would hide that there is nothing between them.
    listed = [
        part
        for start, end in found
        for part in (
            [f"{start}"] if start == end else [f"{start}", f"{end}"] if end == start + 1 else [f"{start}–{end}"]
        )
    ]
    return enumerated([*before, f"block{'s' if len(blocks) > 1 else ''} {enumerated(listed)}"])


def stretches(
    numbers: Sequence[int] | np.ndarray, among: Sequence[int] | np.ndarray | None = None
) -> list[tuple[int, int]]:
    """List first and last of every stretch of neighbours among rising numbers.

    Args:
        numbers: the numbers.
        among: all existing numbers, so that neighbours may differ by more than 1; by default every whole number.
    """
    place = {int(n): i for i, n in enumerate(among)} if among is not None else {int(n): int(n) for n in numbers}
    found = [int(n) for n in numbers]
    if not found:
        return []
    cuts = [i for i, (a, b) in enumerate(pairwise(found), start=1) if place[b] != place[a] + 1]
    return [(found[a], found[b - 1]) for a, b in zip([0, *cuts], [*cuts, len(found)], strict=True)]
