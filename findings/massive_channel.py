"""The massive channel of the first position's state, and the hidden units that write it (definitions §7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..measure.records import Snapshot
from .quantities_by_block import Profile, stretches
from .thresholds import threshold
from .verdict import Group, array_of

_LISTS = ("massive_value", "massive_position", "massive_channel")
_UNITS = (
    "neuron_index",
    "neuron_is_super",
    "neuron_down_dimension",
    "neuron_first",
    "neuron_others",
    "neuron_down_sparsity",
)


@dataclass(frozen=True)
class Massive:
    """A (position, channel) pair among the largest values of the residual stream."""

    position: int
    channel: int
    value: float
    """Largest absolute value."""
    block: int
    """Block after whose MLP it has that value; 0 stands for the embeddings."""
    blocks: tuple[int, ...]
    """Blocks whose list of largest values has the pair."""


def massive_pairs(snapshot: Snapshot | None, group: Group = "bias") -> list[Massive]:
    """List each pair in the lists of largest values once, the largest first; empty without such lists."""
    lists = _lists_of(snapshot, group)
    if lists is None:
        return []
    found: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for block, (values, positions, channels) in enumerate(zip(*lists, strict=True)):
        for value, position, channel in zip(values, positions, channels, strict=True):
            if np.isfinite(value):
                found.setdefault((int(position), int(channel)), []).append((float(value), block))
    pairs = [
        Massive(position, channel, *max(entries, key=lambda entry: entry[0]), tuple(block for _, block in entries))
        for (position, channel), entries in found.items()
    ]
    return sorted(pairs, key=lambda pair: -pair.value)


def _lists_of(snapshot: Snapshot | None, group: Group) -> list[np.ndarray] | None:
    """Return values, positions and channels ``[blocks + 1, K]``; None if one is missing or has another shape."""
    found = [array for name in _LISTS if (array := array_of(snapshot, name, group)) is not None]
    return found if len(found) == len(_LISTS) and len({array.shape for array in found}) == 1 else None


def dominance_by_block(snapshot: Snapshot | None, group: Group = "bias") -> Profile | None:
    """Return the dominance ratio of position 0 beside that of the median position, from the embeddings on."""
    ratio = array_of(snapshot, "dominance", group)
    if ratio is None or ratio.ndim != 2 or not np.isfinite(ratio).any():
        return None
    return Profile(ratio[:, 0].astype(float), np.median(ratio, axis=1), first=0)


@dataclass(frozen=True)
class Writer:
    """A super neuron that writes the massive channel."""

    block: int
    unit: int
    first: float
    """Mean |activation| at position 0."""
    others: float
    """The same at the other positions."""


@dataclass(frozen=True)
class Rise:
    """A block after which the massive channel has its size, and the units that wrote it there."""

    block: int
    value: float
    """Largest |h| of the channel at position 0 in the blocks that follow."""
    writers: tuple[Writer, ...]
    """The strongest first."""


def rises(snapshot: Snapshot | None, group: Group = "bias") -> tuple[Massive, list[Rise]] | None:
    """Find the channel in which the first position's state is largest, and its rises, the largest first.

    A rise is the block that brings the channel to at least half of its largest size within a stretch of blocks in which
    position 0 dominates. None if the lists are missing, or no channel dominates.
    """
    lists, dominance = _lists_of(snapshot, group), dominance_by_block(snapshot, group)
    pairs = [pair for pair in massive_pairs(snapshot, group) if pair.position == 0]
    if lists is None or dominance is None or not pairs or len(lists[0]) != len(dominance.values):
        return None
    largest, (values, positions, channels) = pairs[0], lists
    is_it = (positions == 0) & (channels == largest.channel)
    size = np.where(is_it.any(1), np.where(is_it, values, 0).max(1), 0.0)
    dominates = dominance.at_least(threshold("dominance")) & (size > 0)
    found = []
    for start, end in stretches(dominance.blocks[dominates]):
        top = float(size[start : end + 1].max())
        block = start + int(np.argmax(size[start : end + 1] >= top / 2))
        if block > 0:
            found.append(Rise(block, top, tuple(_writers(snapshot, group, block, largest.channel))))
    found.sort(key=lambda rise: -rise.value)
    return (largest, found) if found else None


def _writers(snapshot: Snapshot | None, group: Group, block: int, channel: int) -> Iterator[Writer]:
    """Yield super neurons of a block whose down row is largest in ``channel``, by the size of their contribution, as
    far as stored: activation times the excess of that weight over the row's mean.
    """
    arrays = [array for name in _UNITS if (array := array_of(snapshot, name, group)) is not None]
    if len(arrays) != len(_UNITS) or any(len(array) < block for array in arrays):
        return
    index, is_super, written, first, others, sparsity = (array[block - 1].astype(float) for array in arrays)
    strength = np.where((is_super > 0) & (written == channel), first * sparsity, 0.0)
    least = threshold("writer") * float(np.nanmax(strength, initial=0.0))
    for i in np.argsort(-np.nan_to_num(strength), kind="stable"):
        if strength[i] > 0 and strength[i] >= least:
            yield Writer(block, int(index[i]), float(first[i]), float(others[i]))
