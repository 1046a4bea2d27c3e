"""Keys that a cache drops, defined once for the mask and for the cache (definitions §17)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Eviction:
    """Queries from position ``after`` on do not see all keys before them (StreamingLLM, arXiv 2309.17453).

    Positions before it are read as ever. A key that is let go of takes its value with it; the others keep the positions
    that they were read at, rotation included.
    """

    after: int
    """The first position that keys are missing for."""
    first: int = 0
    """So many keys are missing, from position 0 on."""
    window: int | None = None
    """A query sees so many keys up to its own, beside those of ``kept``; None: all."""
    kept: int = 0
    """Keys from position 0 on that a window leaves where they are, but for the ``first`` ones."""

    def seen(self, query: Tensor, key: Tensor) -> Tensor:
        """Return True where a query at one position may see a key before it at another; broadcast together, bool."""
        stays = key >= self.first
        if self.window is not None:
            stays = stays & ((key > query - self.window) | (key < self.kept))
        return stays | (query < self.after)
