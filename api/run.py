"""A run as an object: its config, metrics, snapshots and models; and pretraining one."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from ..errors import UsageError
from ..files import user_path
from ..findings.formatting import in_few_words
from ..measure.metrics_log import metrics_by_step
from ..measure.records import RunDir
from ..messages import one_line
from ..models.config import dotted
from ..report.terminal import RunConsole
from ..schema import quoted
from ..trainer.by_name.name_grammar import whole_run
from ..trainer.config import RunConfig
from ..trainer.config_file import build_config, read_config
from .display import Displayed
from .named_array import NamedArray, no_such, optional_library
from .snapshots import Snapshots, headlines

if TYPE_CHECKING:
    import pandas as pd

    from ..findings.verdict import Verdict
    from ..report.table import Table
    from ..trainer.run import Outcome
    from .model import Model


class Metrics(Displayed):
    """A run's training log: ``metrics["val_loss"]`` is an array over ``step``."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._rows = run, metrics_by_step(run)
        self.names = sorted(self._rows.names)
        """Names of all that was logged."""

    def __getitem__(self, name: str) -> NamedArray:
        """Return one metric at the steps that have it; null in the file is NaN."""
        if not self.names:
            raise UsageError(
                f"{name}: {self._run.path} has no training log; a callback writes measurements alone: see .snapshots"
            )
        if name not in self.names:
            raise no_such("metric", name, self.names)
        logged = self._rows.series(name)
        values = np.array(list(logged.values()), dtype=float)
        return NamedArray(values, ("step",), {"step": np.array(list(logged))}, name)

    def to_pandas(self) -> pd.DataFrame:
        """Convert all metrics to a frame: a row for each step, a column for each name."""
        pd = optional_library("pandas")
        rows = [[row.get(name) for name in self.names] for row in self._rows.values()]
        return pd.DataFrame(rows, pd.Index(list(self._rows), name="step"), self.names, dtype=float)

    def _title(self) -> str:
        return f"Metrics of {len(self._rows):,} steps"

    def _sentences(self) -> list[Verdict]:
        return [verdict for verdict in headlines(self._run) if verdict.key == "loss"]

    def _table(self) -> Table:
        from ..report.table import Column, Table

        found = [(name, self[name].values) for name in self.names]
        rows = [(name, len(values), values[0], values[-1], np.nanmin(values)) for name, values in found if len(values)]
        ends = (Column(title, format=".4g") for title in ("first", "last", "least"))
        return Table([Column("metric", "name"), Column("steps", format=",d"), *ends], rows)

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{', '.join(self.names)}"


class Run(Displayed):
    """A folder that ``pretrain`` or a callback wrote; a notebook shows its table of snapshots and its main curves.

    Args:
        path: the folder.

    Raises:
        UsageError: there is no run.
    """

    def __init__(self, path: str | Path) -> None:
        self.files = whole_run(
            fspath(path) if isinstance(path, PathLike) else str(path),
            "a Run is a whole run, and its load(step) a checkpoint",
        )
        """Files of the run by name (docs/run-directory.md)."""
        self._snapshots: tuple[object, Snapshots] | None = None
        self._metrics: tuple[object, Metrics] | None = None

    @property
    def path(self) -> Path:
        """The folder."""
        return self.files.path

    @cached_property
    def config(self) -> RunConfig:
        """The whole config."""
        from ..trainer.config_file import read_config

        if self.files.is_only_measured:
            raise UsageError(f"{self.path}: has no config.yaml: it holds the snapshots of another training")
        return read_config(self.files.config)

    @cached_property
    def birth(self) -> dict[str, Any]:
        """Birth certificate: digest, seed, versions."""
        return self.files.read_birth()

    @property
    def snapshots(self) -> Snapshots:
        """Snapshots of the run, birth first; the same object until one is added or replaced."""
        state = self.files.state_of_snapshots()
        if self._snapshots is None or self._snapshots[0] != state:
            self._snapshots = state, Snapshots(self.files)
        return self._snapshots[1]

    @property
    def metrics(self) -> Metrics:
        """Training log of the run; the same object until a line is added."""
        state = self.files.state_of_metrics()
        if self._metrics is None or self._metrics[0] != state:
            self._metrics = state, Metrics(self.files)
        return self._metrics[1]

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
        from ..report.run_page import build_pages

        file = self.files.report if out is None else Path(out)
        build_pages([self.files], file)
        return file

    def __fspath__(self) -> str:
        return str(self.path)

    def _title(self) -> str:
        steps = in_few_words([str(step) for step in self.checkpoints])
        return f"Run({str(self.path)!r}): {len(self.snapshots)} snapshots, checkpoints [{steps}]"

    def _sentences(self) -> list[Verdict]:
        return headlines(self.files)

    def _repr_html_(self) -> str:
        from ..report.notebook import run_html

        return run_html(self.files)


# ---------------------------------------------------------------- pretraining from Python


def pretrain(
    config: RunConfig | Mapping[str, Any] | str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Run:
    """Train a model, with a snapshot at birth and at every checkpoint, like ``birthmark pretrain``.

    Args:
        config: a config, its fields (nested or dotted), a YAML file, or the name of a config that comes with the
            package, such as ``demo``.
        overrides: fields that replace the config's, by dotted names or nested: ``{"trainer.max_steps": 100}``.
        run_dir: the run's folder; by default the config's own, else ``runs/NAME``.
        resume: go on with the run in that folder.
        progress: print the training's progress.

    Raises:
        UsageError: an impossible config, or a folder that is in use.
        RunError: training failed on the way; all checkpoints so far are intact.
        KeyboardInterrupt: Ctrl-C, or a notebook's interrupt, after the checkpoint of the step; ``resume=True`` goes on.
    """
    if isinstance(config, RunConfig):
        config = dataclasses.asdict(config)
    if isinstance(config, Mapping):
        from ..trainer.lr_schedule import with_continued_rate

        named, found = "run", build_config(with_continued_rate(dotted(config) | dotted(overrides or {})))
    else:
        if not isinstance(config, (str, PathLike)):
            raise UsageError(f"config is {one_line(quoted(config))}: give a config, its fields, a file or a name")
        named, found = Path(config).stem, read_config(config, overrides)
    if run_dir is not None:
        found = dataclasses.replace(found, run_dir=str(run_dir))
    found = in_its_folder(found, named)
    console = RunConsole(RunDir(Path(found.run_dir)).metrics, quiet=not progress)
    _, outcome = run_training(found, resume=resume, console=console, report=False)
    if outcome.stopped_by:
        # All is saved. The program that called ends as it would without a run, and starts no next one.
        signal.raise_signal(signal.Signals[outcome.stopped_by])
    return Run(outcome.run.path)


def in_its_folder(config: RunConfig, name: str) -> RunConfig:
    """Give a config a name and a folder if it lacks them: ``name`` and ``runs/NAME``.

    In a sweep of W&B, whose runs have one config, the folder has the run's id in its name too.
    """
    name = config.name or name
    of_sweep = f"-{os.environ['WANDB_RUN_ID']}" if {"WANDB_SWEEP_ID", "WANDB_RUN_ID"} <= os.environ.keys() else ""
    return dataclasses.replace(config, name=name, run_dir=str(user_path(config.run_dir or f"runs/{name}{of_sweep}")))


def run_training(config: RunConfig, *, resume: bool, console: Console, report: bool) -> tuple[RunConfig, Outcome]:
    """Train in the run's folder, and write its page if requested; return the config, with the model that it starts
    from, and the outcome.
    """
    from ..trainer.initial_model import resolve_init_from
    from ..trainer.run import pretrain as train

    config = resolve_init_from(config)
    return config, train(config, RunDir(Path(config.run_dir)), resume=resume, console=console, report=report)
