"""A run as an object: its config, metrics, snapshots and models."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..measure.records import RunDir, metrics_by_step
from .named_array import NamedArray, no_such, optional_library
from .snapshots import Snapshots

if TYPE_CHECKING:
    import pandas as pd

    from ..trainer.config import RunConfig
    from .model import Model


class Metrics:
    """A run's training log: ``metrics["val_loss"]`` is an array over ``step``."""

    def __init__(self, run: RunDir) -> None:
        self._rows = metrics_by_step(run)
        self.names = sorted({name for row in self._rows.values() for name in row} - {"step"})
        """Names of all that was logged."""

    def __getitem__(self, name: str) -> NamedArray:
        """Return one metric at the steps that have it; null in the file is NaN."""
        if name not in self.names:
            raise no_such("metric", name, self.names)
        steps = [step for step, row in self._rows.items() if name in row]
        values = np.array([self._rows[step][name] for step in steps], dtype=float)
        return NamedArray(values, ("step",), {"step": np.array(steps)}, name)

    def to_pandas(self) -> pd.DataFrame:
        """Convert all metrics to a frame: a row for each step, a column for each name."""
        pd = optional_library("pandas")
        rows = [[row.get(name) for name in self.names] for row in self._rows.values()]
        return pd.DataFrame(rows, pd.Index(list(self._rows), name="step"), self.names, dtype=float)

    def __repr__(self) -> str:
        return f"Metrics of {len(self._rows)} steps: {', '.join(self.names)}"


class Run:
    """A folder that ``pretrain`` or a callback wrote; a notebook shows its table of snapshots and its main curves.

    Args:
        path: the folder.

    Raises:
        UsageError: there is no run.
    """

    def __init__(self, path: str | Path) -> None:
        self.files = RunDir.open_measured(Path(path))
        """Files of the run by name (docs/run-directory.md)."""

    @property
    def path(self) -> Path:
        """The folder."""
        return self.files.path

    @cached_property
    def config(self) -> RunConfig:
        """The whole config."""
        from ..trainer.config_file import read_config

        if self.files.is_foreign:
            raise UsageError(f"{self.path}: has no config.yaml: it holds the snapshots of another training")
        return read_config(self.files.config)

    @cached_property
    def birth(self) -> dict[str, Any]:
        """Birth certificate: digest, seed, versions."""
        return self.files.read_birth()

    @property
    def snapshots(self) -> Snapshots:
        """Snapshots of the run, birth first."""
        return Snapshots(self.files)

    @property
    def metrics(self) -> Metrics:
        """Training log of the run."""
        return Metrics(self.files)

    @property
    def checkpoints(self) -> list[int]:
        """Steps of its checkpoints."""
        return list(self.files.checkpoints_by_step())

    def load(self, step: int | None = None) -> Model:
        """Load the model of a checkpoint, by default of the last; 0 is its birth."""
        from .model import load

        return load(str(self.path) if step is None else f"{self.path}@{step}")

    def report(self, out: str | Path | None = None) -> Path:
        """Write the page, by default into the run's folder; return its path."""
        from ..report.run_page import build_report

        file = self.files.report if out is None else Path(out)
        build_report([self.files], file)
        return file

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}): {len(self.snapshots)} snapshots, checkpoints {self.checkpoints}"

    def _repr_html_(self) -> str:
        from ..report.notebook import run_html

        return run_html(self.files)
