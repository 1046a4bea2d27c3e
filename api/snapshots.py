"""Snapshots as objects: scalars, named arrays, a table or pictures."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..errors import UsageError
from ..findings.formatting import in_few_words, steps_near
from ..measure.records import RunDir, step_of
from ..measure.records import Snapshot as Record
from ..metrics.quantity import AXES
from ..schema import quoted
from .display import Displayed
from .named_array import NamedArray, no_such

if TYPE_CHECKING:
    from ..findings.verdict import Verdict


class Snapshot(Displayed):
    """A measurement of one model: ``snapshot.scalars["sink_mass"]``, ``snapshot["sink_mass"].sel(layer=2, head=0)``.

    Args:
        record: the measurement, or the folder that it was written to.
        name: name of the model.
    """

    def __init__(self, record: Record | str | Path, name: str = "") -> None:
        if not isinstance(record, Record):
            if not (Path(record) / "summary.json").is_file():
                raise UsageError(f"{record}: no snapshot; give the folder of one, such as RUN/snapshots/step-00000000")
            record = Record.read(Path(record))
        self.record = record
        self.name = name or str(self.record.summary.get("source", ""))

    @property
    def step(self) -> int:
        """Optimizer steps taken before it: 0 is birth, -1 unknown."""
        return self.record.step

    @property
    def scalars(self) -> dict[str, float]:
        """Scalars of the random probe by name (docs/quantities.md)."""
        return self.record.bias

    @property
    def text_scalars(self) -> dict[str, float]:
        """Scalars of the text probe, if measured."""
        return self.record.summary.get("bias_text", {})

    @property
    def top_tokens(self) -> list[dict[str, Any]]:
        """The most preferred tokens, first to last."""
        return self.record.summary["top_tokens"]

    @property
    def names(self) -> list[str]:
        """Names of all arrays."""
        return sorted(self.record.arrays)

    def __getitem__(self, name: str) -> NamedArray:
        """Return an array by name, with the dimensions that its quantity declares."""
        if name not in self.record.arrays:
            raise no_such("array", name, self.names)
        return named(name, self.record.arrays[name], self.record)

    def write(self, folder: str | Path) -> None:
        """Write it as a folder, which `birthmark report` reads."""
        if Path(folder).exists():
            raise UsageError(f"{folder}: exists already; give a new folder")
        self.record.write(Path(folder))

    def _title(self) -> str:
        return f"Snapshot of {self.name}, step {self.step}" if self.step >= 0 else f"Snapshot of {self.name}"

    def __repr__(self) -> str:
        from ..report.block_table import print_snapshot
        from ..report.terminal import printed

        return f"{self._title()}\n{printed(lambda console: print_snapshot(self.record, console), width=100)}"

    def _repr_html_(self) -> str:
        from ..report.notebook import snapshot_html

        return snapshot_html(self.record, self.name)


def named(name: str, values: np.ndarray, record: Record) -> NamedArray:
    """Name the dimensions of a snapshot's array by its declaration; undeclared ones are ``dim_0``, …"""
    # Those of the text probe begin with its name.
    quantity = record.quantities.get(name.removeprefix("text."))
    if quantity is None or len(quantity.axes) != values.ndim:
        dims = tuple(f"dim_{i}" for i in range(values.ndim))
        return NamedArray(values, dims, {dim: np.arange(n) for dim, n in zip(dims, values.shape, strict=True)}, name)
    axes = [AXES[axis] for axis in quantity.axes]
    coords = {axis.column: axis.first + np.arange(n) for axis, n in zip(axes, values.shape, strict=True)}
    if "epsilon" in coords and "sink_epsilons" in record.arrays:
        coords["epsilon"] = record.arrays["sink_epsilons"]
    return NamedArray(values, tuple(coords), coords, name, quantity.label, quantity.unit)


class Snapshots(Displayed, Sequence[Snapshot]):
    """The snapshots of a run, birth first; ``snapshots["sink_mass"]`` is an array with ``step`` as first dimension.

    Each is read once; its arrays are read as they are asked for, and not kept.
    """

    def __init__(self, run: RunDir) -> None:
        self.run, self.folders = run, run.snapshot_folders()
        self.name = run.path.name
        self._places = {step_of(folder): place for place, folder in enumerate(self.folders)}
        self._read: dict[int, Snapshot] = {}

    def __len__(self) -> int:
        return len(self.folders)

    @overload
    def __getitem__(self, which: int) -> Snapshot: ...
    @overload
    def __getitem__(self, which: slice) -> list[Snapshot]: ...
    @overload
    def __getitem__(self, which: str) -> NamedArray: ...
    def __getitem__(self, which: int | slice | str) -> Snapshot | list[Snapshot] | NamedArray:
        """Return one snapshot by its index, or a quantity of all by its name: an array if there is one, else a
        scalar.
        """
        if isinstance(which, slice):
            return [self[place] for place in range(len(self))[which]]
        if isinstance(which, str):
            return self._over_training(which)
        place = range(len(self))[which]
        if place not in self._read:
            self._read[place] = Snapshot(Record.read(self.folders[place], arrays_later=True), self.name)
        return self._read[place]

    def __iter__(self) -> Iterator[Snapshot]:
        return (self[place] for place in range(len(self)))

    @property
    def steps(self) -> list[int]:
        """Steps of the snapshots."""
        return list(self._places)

    def at(self, step: int) -> Snapshot:
        """Return the snapshot after ``step`` optimizer steps."""
        if not isinstance(step, Hashable) or step not in self._places:
            raise UsageError(f"no snapshot of step {quoted(step)}; there are {steps_near(self._places, step)}")
        return self[self._places[step]]

    def scalars(self) -> Mapping[str, NamedArray]:
        """Return the scalars of all of them over ``step``, by name; NaN if one lacks it."""
        names = dict.fromkeys(name for snapshot in self for name in snapshot.scalars)
        return {name: self._scalar(name) for name in names}

    def _over_training(self, name: str) -> NamedArray:
        have = [snapshot for snapshot in self if name in snapshot.record.arrays]
        if have:
            arrays = [snapshot[name] for snapshot in have]
            first, steps = arrays[0], np.array([snapshot.step for snapshot in have])
            values, coords = np.stack([array.values for array in arrays]), {"step": steps, **first.coords}
            return NamedArray(values, ("step", *first.dims), coords, name, first.label, first.unit)
        if any(name in snapshot.scalars for snapshot in self):
            return self._scalar(name)
        raise no_such("quantity", name, {key for snapshot in self for key in (*snapshot.names, *snapshot.scalars)})

    def _scalar(self, name: str) -> NamedArray:
        values = np.array([snapshot.scalars.get(name, np.nan) for snapshot in self])
        quantity = self[0].record.quantities.get(name)
        label, unit = ("", "") if quantity is None else (quantity.label, quantity.unit)
        return NamedArray(values, ("step",), {"step": np.array(self.steps)}, name, label, unit)

    def _title(self) -> str:
        return f"Snapshots of {self.name}: steps {in_few_words([str(step) for step in self.steps])}"

    def _sentences(self) -> list[Verdict]:
        return headlines(self.run)

    def _repr_html_(self) -> str:
        from ..report.notebook import snapshots_html

        return snapshots_html(self.run)


def headlines(run: RunDir) -> list[Verdict]:
    """Return the verdicts with which the page of a run begins."""
    from ..findings.run_history import read_runs
    from ..report.verdicts import verdicts

    (history,) = read_runs([run])
    return [verdict for verdict in verdicts(history) if verdict.headline]
