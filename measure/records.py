"""What a run leaves on disk: its directory, its snapshots and its metrics, written whole or not at all."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ..errors import RunError, UsageError
from ..files import (
    _disk_full,
    atomic_path,
    find_folder,
    list_folders,
    make_folder,
    read_json,
    remove_leftovers,
    strict,
    write_json,
    write_text,
)
from ..metrics.quantities import quantities_of
from ..metrics.quantity import Quantity


@dataclass(frozen=True)
class Snapshot:
    """One measurement of one model: scalars and ranked tokens (``summary``), arrays by name (``arrays``).

    Names, shapes and units: docs/run-directory.md.
    """

    summary: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def step(self) -> int:
        """Optimizer steps taken before this snapshot; 0 is birth."""
        return int(self.summary["step"])

    @property
    def bias(self) -> dict[str, float]:
        """The scalars, by name without the ``bias/`` prefix."""
        return self.summary["bias"]

    @property
    def quantities(self) -> dict[str, Quantity]:
        """Declarations of all that it may hold, by name: ours, and those of the user's metrics in it."""
        return quantities_of(self.summary)

    def scalars(self) -> dict[str, float]:
        """The scalars of every probe under the names that loggers use: ``bias/…``, ``bias_text/…``."""
        groups = {name: value for name, value in self.summary.items() if name == "bias" or name.startswith("bias_")}
        return {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}

    def write(self, folder: Path) -> None:
        """Write ``summary.json`` and ``arrays.safetensors`` into ``folder``, which appears whole or not at all."""
        with atomic_path(folder) as new:
            new.mkdir()
            save_file({k: np.ascontiguousarray(v) for k, v in self.arrays.items()}, new / "arrays.safetensors")
            write_json(new / "summary.json", self.summary)

    @classmethod
    def read(cls, folder: Path) -> Snapshot:
        """Read a snapshot folder; RunError names the file that is missing or damaged."""
        folder = find_folder(folder)
        summary = read_json(folder / "summary.json")
        if not isinstance(summary, dict) or not isinstance(summary.get("bias"), dict) or "step" not in summary:
            raise RunError(f"{folder / 'summary.json'}: damaged (no step or no bias in it)")
        try:
            quantities_of(summary)
        except ValueError as error:
            raise RunError(f"{folder / 'summary.json'}: damaged (quantities: {error})") from None
        file = folder / "arrays.safetensors"
        try:
            arrays = load_file(file)
        except FileNotFoundError:
            raise RunError(f"{file}: missing") from None
        except SafetensorError as error:
            raise RunError(f"{file}: damaged ({error}); delete the folder to go on without this snapshot") from None
        return cls(summary, arrays)


@dataclass(frozen=True)
class RunDir:
    """The files of one run, by name (docs/run-directory.md)."""

    path: Path

    @property
    def config(self) -> Path:  # noqa: D102
        return self.path / "config.yaml"

    @property
    def birth(self) -> Path:  # noqa: D102
        return self.path / "birth.json"

    @property
    def metrics(self) -> Path:  # noqa: D102
        return self.path / "metrics.jsonl"

    @property
    def metrics_csv(self) -> Path:  # noqa: D102
        return self.path / "metrics.csv"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's JSON; there is none where the data is no text."""
        return self.path / "tokenizer.json"

    @property
    def report(self) -> Path:  # noqa: D102
        return self.path / "report.html"

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after ``step`` optimizer steps."""
        return self.path / "checkpoints" / f"step-{step:08d}"

    def snapshot(self, step: int) -> Path:
        """Folder of the snapshot after ``step`` optimizer steps."""
        return self.path / "snapshots" / f"step-{step:08d}"

    def checkpoints(self) -> list[Path]:
        """All checkpoint folders, oldest first."""
        return list_folders(self.path / "checkpoints", "step-*")

    def checkpoints_by_step(self) -> dict[int, Path]:
        """All checkpoint folders by their step, oldest first."""
        return {step_of(folder): folder for folder in self.checkpoints()}

    def snapshot_folders(self) -> list[Path]:
        """All snapshot folders, birth first."""
        return list_folders(self.path / "snapshots", "step-*")

    def snapshots(self) -> list[Snapshot]:
        """All snapshots, birth first."""
        return [Snapshot.read(folder) for folder in self.snapshot_folders()]

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Write a snapshot where it belongs, and remove what writers of snapshots that died have left there.

        One process at a time writes, others wait: the hidden folders that this one finds have no living writer.
        """
        folder = self.snapshot(snapshot.step)
        make_folder(folder.parent)
        with FileLock(self.path / ".snapshots.lock"):
            remove_leftovers(folder.parent, "step-*")
            snapshot.write(folder)

    def remove_leftovers(self) -> None:
        """Remove what an earlier process has left half written; the caller holds the run's lock."""
        for folder in (self.path / "checkpoints", self.path / "snapshots"):
            remove_leftovers(folder, "step-*")
        for file in (self.config, self.birth, self.metrics, self.tokenizer, self.metrics_csv):
            remove_leftovers(self.path, file.name)

    @classmethod
    def is_run(cls, path: Path) -> bool:
        """Whether ``path`` holds a run that has been born."""
        run = cls(path)
        return run.config.is_file() and run.birth.is_file()

    @property
    def is_foreign(self) -> bool:
        """Whether nothing here says that we trained it: at most its snapshots are ours."""
        return not (self.birth.exists() or self.config.exists())

    @classmethod
    def open_measured(cls, path: Path) -> RunDir:
        """An existing run, or the snapshots of a training that is not ours, without birth or config; UsageError if
        ``path`` holds neither."""
        measured = cls(path)
        return measured if measured.is_foreign and measured.snapshot_folders() else cls.open(path)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run; UsageError if ``path`` does not hold one."""
        if not cls.is_run(path):
            raise UsageError(
                f"{path}: not a run (no config.yaml and birth.json in it); give the folder that `pretrain` wrote"
            )
        return cls(path)


def step_of(folder: Path) -> int:
    """The step that a checkpoint's or a snapshot's folder is named after."""
    return int(folder.name.removeprefix("step-"))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All lines of a ``metrics.jsonl``, in file order; a last line that a crash broke off is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    records: list[dict[str, float]] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise RunError(f"{path}: line {number} is not JSON; remove it to go on") from None
    return records


def metrics_by_step(run: RunDir) -> dict[int, dict[str, float]]:
    """The lines of ``metrics.jsonl`` by step, in step order; where a step is logged twice, the later line holds."""
    merged: dict[int, dict[str, float]] = {}
    for number, record in enumerate(read_metrics(run.metrics), start=1):
        if not isinstance(record, dict) or "step" not in record:
            raise RunError(f"{run.metrics}: line {number} has no step; remove it to go on")
        merged.setdefault(int(record["step"]), {}).update(record)
    return dict(sorted(merged.items()))


def append_metrics(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Append one line ``{"step": …, …}``; lines are written in one call, so that a crash breaks off the last only."""
    try:
        with path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(strict({"step": step, **metrics})) + "\n")
    except OSError as error:
        raise _disk_full(path, error) from None


def write_metrics_csv(run: RunDir) -> None:
    """Write ``metrics.csv``: the lines of ``metrics.jsonl`` as one row per step and one column per name."""
    rows = metrics_by_step(run)
    names = sorted({name for row in rows.values() for name in row} - {"step"})
    with atomic_path(run.metrics_csv) as new, new.open("w", newline="", encoding="utf-8") as f:
        table = csv.DictWriter(f, ["step", *names])
        table.writeheader()
        table.writerows(rows.values())


def truncate_metrics(path: Path, last_step: int) -> None:
    """Drop the lines after ``last_step``, so that a resumed run does not log one step twice."""
    kept = [r for r in read_metrics(path) if r["step"] <= last_step]
    write_text(path, "".join(json.dumps(r) + "\n" for r in kept))
