"""Sections of one snapshot: one picture per probe, lines of blocks, numbers of heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ...findings.run_history import BIRTH, PROBES, Start, arrays_of, declared_quantities, measured_probes, of_probe
from ...measure.records import Snapshot
from ...metrics.quantity import Quantity
from ..charts.specs import ChartPanel, Drawn, on_one_scale
from ..csv_files import LabelledArray
from ..pictures.panels import blocks_of_change
from .section import Picture, Section

Arrays = Mapping[str, np.ndarray]
LISTED = 12
"""Rows of a list."""
_MAX_POSITIONS = 256  # points of a line


@dataclass(frozen=True)
class SnapshotView:
    """One snapshot with the pictures that a page draws of it."""

    name: str
    """Name of the run or model that was measured."""
    snapshot: Snapshot
    start: Start = BIRTH
    """Words for the start of its model's training."""

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        if n_layers := self.snapshot.summary.get("n_layers"):
            return int(n_layers)
        return max((len(a) for name, a in self.snapshot.arrays.items() if self._begins_with_blocks(name)), default=0)

    def _begins_with_blocks(self, name: str) -> bool:
        quantity = self.quantities.get(name.removeprefix("text."))
        return quantity is not None and quantity.axes[:1] == ("layer",)

    @property
    def quantities(self) -> dict[str, Quantity]:
        """Declarations of all that it may hold, by name."""
        return declared_quantities([self.snapshot])

    def some_blocks(self, caption: str, *names: str) -> tuple[list[int], str]:
        """Return the indices of the blocks that small multiples show, and ``caption``, which says so if others are left
        out.

        Args:
            caption: one sentence.
            names: quantities; the blocks are those where one of them changes most along depth, on any probe. By
                default those of the sink, so that pictures of one page show the same blocks.
        """
        profiles, changing = [], []
        for quantity in (self.quantities[name] for name in names or ("sink_mass", "massive_max")):
            for prefix in measured_probes(self.snapshot):
                array = arrays_of(self.snapshot, prefix).get(quantity.array)
                if array is not None and len(array) >= self.n_layers:
                    profiles.append(_along_depth(quantity, array, self.n_layers))
                    changing.append(quantity.label)
        blocks = blocks_of_change(profiles, self.n_layers)
        if len(blocks) == self.n_layers:
            return blocks, caption
        why = f", where {' or '.join(dict.fromkeys(changing))} changes most" if changing else ""
        return blocks, f"{caption.rstrip('.')}; {len(blocks)} of {self.n_layers} blocks{why}."

    def at(self, prefix: str) -> dict[str, Any]:
        """Return the columns that all numbers of one probe share."""
        return {"run": self.name, "probe": PROBES[prefix], "step": self.snapshot.step}

    def panel(self, picture: Picture) -> ChartPanel | None:
        """Build the panel of a picture."""
        return picture.drawn.panel(f"picture-{picture.id}", [self.name], self.quantities)

    def add(
        self,
        section: Section,
        key: str,
        caption: str,
        needs: Sequence[str],
        draw: Callable[[Arrays], Drawn | None],
    ) -> None:
        """Add the pictures that ``draw`` makes of every probe with the arrays it ``needs``, all on one scale."""
        by_probe = {prefix: arrays_of(self.snapshot, prefix) for prefix in measured_probes(self.snapshot)}
        made = {
            prefix: drawn.within(self.at(prefix))
            for prefix, arrays in by_probe.items()
            if all(name in arrays for name in needs) and (drawn := draw(arrays)) is not None
        }
        for prefix, drawn in zip(made, on_one_scale(list(made.values())), strict=True):
            section.add(drawn, *of_probe(prefix, key, caption))


def _along_depth(quantity: Quantity, array: np.ndarray, n_layers: int) -> np.ndarray:
    """Return one value or row per block of a quantity, ``[L]`` or ``[L, X]``: the mean over heads, and the logarithm
    where pictures show that.
    """
    values = array.mean(1) if quantity.axes[1:2] == ("head",) else np.asarray(quantity.blocks(array))
    # The residual stream begins with the embeddings.
    values = values[len(values) - n_layers :].astype(float)
    if quantity.scale != "log":
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values)


def drawn_positions(length: int) -> np.ndarray:
    """Return the positions that lines show: all, or as many as a picture can, closer for the first ones."""
    if length <= _MAX_POSITIONS:
        return np.arange(length)
    return np.unique(np.geomspace(1, length, _MAX_POSITIONS).round().astype(int)) - 1


def head_lines(quantity: str, values: np.ndarray, blocks: Sequence[int], t: np.ndarray) -> LabelledArray:
    """Return the numbers behind small multiples with a line for each head, from ``[L, H, T]``."""
    axes: list[dict[str, Sequence[int]]] = [
        {"layer": [layer + 1 for layer in blocks]},
        {"head": range(values.shape[1])},
        {"position": t.tolist()},
    ]
    return LabelledArray(quantity, values[blocks][:, :, t], axes)


def block_and_head(array: np.ndarray) -> list[dict[str, Sequence[int]]]:
    """Return the axes of a ``[L, H]`` array: blocks from 1, heads from 0."""
    return [{"layer": range(1, array.shape[0] + 1)}, {"head": range(array.shape[1])}]


def draw_by_block(
    values: Mapping[str, np.ndarray],
    unit: str,
    start: int,
    controls: Sequence[LabelledArray] = (),
    names: Mapping[str, str] = MappingProxyType({}),
) -> Drawn | None:
    """Draw curves over depth from block ``start`` on (0: the embeddings); None if no value is finite."""
    if not any(np.isfinite(blocks).any() for blocks in values.values()):
        return None
    numbers = [
        LabelledArray(name, blocks, [{"layer": range(start, start + len(blocks))}]) for name, blocks in values.items()
    ]
    return Drawn([*numbers, *controls], names=names, unit=unit)


def levels(quantity: str, values: Sequence[float], blocks: Sequence[int]) -> LabelledArray:
    """Return the numbers of a level over depth."""
    return LabelledArray(quantity, np.asarray(values), [{"layer": blocks}])
