"""Keys that a cache drops, defined once for the mask and for the cache (definitions §17)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Eviction:
    """Eviction of keys: queries from position ``after`` on do not see all keys before them (StreamingLLM, arXiv
    2309.17453).

    Earlier queries see all keys. An evicted key takes its value with it; the other keys keep their positions, rotation
    included.
    """

    after: int
    """First position that keys are missing for."""
    first: int = 0
    """Number of missing keys, from position 0 on."""
    window: int | None = None
    """Number of keys up to its own that a query sees, beside those of ``kept``; None: all."""
    kept: int = 0
    """Keys from position 0 on that a window leaves where they are, but for the ``first`` ones."""

    def seen(self, query: Tensor, key: Tensor) -> Tensor:
        """Return True where a query at one position may see a key before it at another; broadcast together, bool."""
        stays = key >= self.first
        if self.window is not None:
            stays = stays & ((key > query - self.window) | (key < self.kept))
        return stays | (query < self.after)
