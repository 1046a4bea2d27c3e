"""Loggers of figures, under the same names: metrics.jsonl always; W&B, TensorBoard, a CSV file on request."""

from __future__ import annotations

import csv
import importlib.util
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from ..errors import UsageError
from ..files import csv_text, strict, write_failure, write_text
from ..measure.metrics_log import append_metrics, write_metrics_csv
from ..measure.records import RunDir, Snapshot
from .config import LogConfig
from .wandb_run import (
    TOKEN_COLUMNS,
    WandbRun,
    block_curves,
    by_blocks,
    chart_groups,
    head_tables,
    sink_map,
    token_rows,
    wandb_mode,
)


class _RunFile(Logger):
    """Base of loggers into the run's own folder."""

    def __init__(self, run: RunDir) -> None:
        super().__init__()
        self.run = run

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.run.path.name

    @property
    def version(self) -> str:
        """Always "": a run has only its name."""
        return ""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the config is in ``config.yaml``."""


class JsonLinesLogger(_RunFile):
    """Logger that appends every call's metrics as one line to a run's ``metrics.jsonl``."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one line."""
        assert step is not None
        append_metrics(self.run.metrics, step, metrics)


class CsvLogger(_RunFile):
    """Logger that keeps a run's ``metrics.csv`` up to date: a row at the end of its step, like `write_metrics_csv`
    writes them all.

    It begins with what ``metrics.jsonl`` has, so that a run that goes on neither loses rows nor has them twice.
    """

    def __init__(self, run: RunDir) -> None:
        super().__init__(run)
        self._columns = write_metrics_csv(run)
        self._row: dict[str, Any] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add the metrics to the row of their step; write the row before it if that is complete."""
        if self._row and self._row["step"] != step:
            self._write_row()
        self._row |= {"step": step, **strict(metrics)}

    def finalize(self, status: str) -> None:
        """Write the last row."""
        if self._row:
            self._write_row()

    def _write_row(self) -> None:
        row, self._row = self._row, {}
        if new := row.keys() - self._columns:
            with self.run.metrics_csv.open(newline="", encoding="utf-8") as file:
                _, *rows = [dict(zip(self._columns, cells, strict=True)) for cells in csv.reader(file)]
            self._columns = ["step", *sorted({*self._columns, *new} - {"step"})]
            write_text(self.run.metrics_csv, csv_text([self._columns, *map(self._cells, rows)]))
        try:
            with self.run.metrics_csv.open("a", newline="", encoding="utf-8") as file:
                file.write(csv_text([self._cells(row)]))
        except OSError as error:
            raise write_failure(self.run.metrics_csv, error) from None

    def _cells(self, row: Mapping[str, Any]) -> list[Any]:
        return [row.get(name) for name in self._columns]


def check_installed(config: LogConfig) -> None:
    """Raise UsageError if a logger is missing, with its install line, or if WANDB_MODE is invalid."""
    if "tensorboard" in config.loggers and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("log.loggers has tensorboard, which is missing: pip install tensorboard")
    wandb_mode(config)


def tensorboard_logger(run: RunDir, first_step: int) -> TensorBoardLogger:
    """Open TensorBoard's log in the run's folder ``tensorboard``; entries of an earlier start from ``first_step`` on
    are hidden, since they are logged again.
    """
    return TensorBoardLogger(run.path, name="tensorboard", version="", purge_step=first_step)


def close_loggers(loggers: Iterable[Logger], error: BaseException | None) -> None:
    """Close the loggers: files get their last lines, W&B the run's files. ``error``: the failure of the run."""
    for logger in loggers:
        if isinstance(logger, WandbRun):
            logger.close(error)
        else:
            logger.finalize("success" if error is None else "failed")


def log_snapshot(loggers: Iterable[Logger], snapshot: Snapshot) -> None:
    """Show a snapshot in W&B and TensorBoard, if they are among the loggers.

    Both get its scalars as charts in groups, a curve for each block, and sink mass as a map of the heads; W&B also gets
    its preferred tokens and what it has of every head as tables.
    """
    shown = [logger for logger in loggers if isinstance(logger, (WandbLogger, TensorBoardLogger))]
    if not shown:
        return
    scalars, picture = chart_groups(snapshot) | block_curves(snapshot), sink_map(snapshot)
    for logger in shown:
        if isinstance(logger, TensorBoardLogger):
            logger.log_metrics(scalars, snapshot.step)
            if picture is not None:
                logger.experiment.add_image("bias/sink_heatmap", picture, snapshot.step, dataformats="HWC")
            continue
        import wandb

        objects: dict[str, Any] = {
            f"bias/{name}_by_head{part}": wandb.Table(columns=["layer", "head", name], data=rows)
            for name, table in head_tables(snapshot).items()
            for part, rows in by_blocks(table, wandb.Table.MAX_ROWS).items()
        }
        objects["bias/preferred_tokens"] = wandb.Table(columns=list(TOKEN_COLUMNS), data=token_rows([snapshot]))
        if picture is not None:
            objects["bias/sink_heatmap"] = wandb.Image(picture, caption=f"step {snapshot.step}")
        logger.log_metrics(scalars | objects, snapshot.step)
