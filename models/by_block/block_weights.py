"""Sources of a decoder's weights that are not all in memory: files, or the keys of a birth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

#: Elements of a table that are read together: 64 MiB of float32.
CHUNK = 1 << 24
#: Distance in elements below which rows of a table are read together with everything between them.
_NEAR = 1 << 16


class BlockWeights(Protocol):
    """Parameters and buffers of a decoder by name, read or drawn on request and not kept."""

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors on the CPU, in any order and in their own dtype.

        Raises:
            RunError: a file is missing or damaged, or lacks a tensor; the message names it.
        """

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows ``start … stop`` of a table, ``[stop − start, D]``, on the CPU in its own dtype."""


class HeldWeights:
    """Weights of a decoder that is in memory."""

    def __init__(self, model: nn.Module) -> None:
        self.held = model.state_dict()

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """See :class:`BlockWeights`."""
        return ((name, self.held[name].cpu()) for name in names)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """See :class:`BlockWeights`."""
        return self.held[name][start:stop].cpu()


def table_chunks(n_rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield first row and one past the last of the parts in which a table ``[n_rows, width]`` is read."""
    at_once = max(CHUNK // width, 1)
    return ((start, min(start + at_once, n_rows)) for start in range(0, n_rows, at_once))


def chosen_rows(weights: BlockWeights, name: str, rows_U: Tensor, width: int) -> Tensor:
    """Read the given rows of a table, ``[U, D]``; rows far from all of them are skipped.

    Args:
        weights: source of the table.
        name: name of the table.
        rows_U: row numbers, int64, rising.
        width: D.
    """
    wanted = rows_U.tolist()
    found: list[Tensor] = []
    first = 0
    for i, row in enumerate(wanted):
        last = i + 1 == len(wanted)
        if last or (wanted[i + 1] - row) * width > _NEAR or (wanted[i + 1] - wanted[first]) * width > CHUNK:
            start = wanted[first]
            # A copy: rows between those that were chosen are let go of.
            found.append(weights.rows(name, start, row + 1)[rows_U[first : i + 1] - start])
            first = i + 1
    return torch.cat(found)


def table_moments(weights: BlockWeights, name: str, n_rows: int, width: int) -> tuple[float, float]:
    """Compute mean and standard deviation of all elements of a table, in float64, reading one part at a time."""
    n, mean, scatter = 0, 0.0, 0.0
    for start, stop in table_chunks(n_rows, width):
        part = weights.rows(name, start, stop).double()
        own, away = part.mean().item(), part.var(correction=0).item() * part.numel()
        total = n + part.numel()
        scatter += away + (own - mean) ** 2 * n * part.numel() / total
        mean += (own - mean) * part.numel() / total
        n = total
    return mean, math.sqrt(scatter / n)
