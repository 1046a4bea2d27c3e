"""Failing as one: what one process of a run fails of, all of them fail of."""

from __future__ import annotations

import torch.distributed as dist

from ..errors import RunError, UsageError
from ..measure.ranks import rank, world_size


def raise_together(error: Exception | None) -> None:
    """Raise if ``error`` is given on any rank: one's own, or else a RunError of the first rank that has one.

    In a group every rank must call.
    """
    if world_size() > 1:
        known = isinstance(error, (UsageError, RunError))
        mine = None if error is None else str(error) if known else f"rank {rank()}: {type(error).__name__}: {error}"
        told: list[str | None] = [None] * world_size()
        dist.all_gather_object(told, mine)
        theirs = next((text for text in told if text is not None), None)
        if error is None and theirs is not None:
            error = RunError(theirs)
    if error is not None:
        raise error
