"""Log of a run, ``metrics.jsonl``: its lines are read by step, appended, cut back, and written as a table."""

from __future__ import annotations

import json
import os
from array import array as numbers
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from annotated_types import Interval

from ..errors import RunError
from ..files import atomic_path, check_file, csv_text, parse_json, strict, write_failure
from ..messages import one_line
from ..schema import SchemaError, check
from .records import Number, RunDir

#: Bytes that a line of a log has at most. The log itself may have any number: it is read a line at a time.
_LINE_BYTES = 1 << 24

MetricsLine = dict[str, Number]


def _metrics_line(record: Any) -> dict[str, float]:
    if isinstance(record, dict) and "step" not in record:
        raise SchemaError("it has no step")
    check(record, MetricsLine)
    check(record["step"], Annotated[int, Interval(ge=-1, le=1 << 62)], "step")
    return record


def _lines_of_now(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines up to the length that the file has now: one that grows as fast as it is read has no end.

    The first bytes of a line that is too long are the last that is yielded.
    """
    left, size = os.fstat(file.fileno()).st_size, 0
    while size <= _LINE_BYTES and (line := file.readline(min(left, _LINE_BYTES + 1))):
        size = len(line)
        left -= size
        yield line


def metrics_lines(path: Path) -> Iterator[dict[str, float]]:
    """Read a ``metrics.jsonl`` a line at a time, in file order, without a last line that a crash broke off.

    Raises:
        RunError: the file cannot be read, or a line of it is damaged; it is named.
    """
    if not os.path.lexists(path):
        return
    check_file(path)
    wrong: RunError | None = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines_of_now(file), start=1):
                if wrong is not None:
                    raise wrong
                if len(line) > _LINE_BYTES:
                    raise RunError(f"{path}: line {number} has more than {_LINE_BYTES:,} bytes; remove it to go on")
                try:
                    yield _metrics_line(parse_json(line.removesuffix(b"\n").decode("utf-8"), not_finite=True))
                except ValueError as error:
                    # A fault only if another line follows.
                    wrong = RunError(f"{path}: line {number} is not JSON ({one_line(error)}); remove it to go on")
                except SchemaError as error:
                    raise RunError(f"{path}: line {number} is damaged ({error}); remove it to go on") from None
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read all lines of a ``metrics.jsonl``; see :func:`metrics_lines`."""
    return list(metrics_lines(path))


class _Column:
    """Numbers of one name in a log, by step."""

    __slots__ = ("is_sorted", "steps", "values")

    def __init__(self) -> None:
        self.steps: numbers[int] = numbers("q")
        self.values: list[float] = []
        self.is_sorted = True

    def add(self, step: int, value: float) -> None:
        """Add the number of a step."""
        self.is_sorted = self.is_sorted and (not self.steps or step > self.steps[-1])
        self.steps.append(step)
        self.values.append(value)

    def sort(self) -> None:
        """Put the numbers in the order of steps; the last of several for one step stays."""
        if not self.is_sorted:
            found = dict(sorted(dict(zip(self.steps, self.values, strict=True)).items()))
            self.steps, self.values, self.is_sorted = numbers("q", found), list(found.values()), True

    def place(self, step: int) -> int | None:
        """Find the place of a step; None if it has no number."""
        place = bisect_left(self.steps, step)
        return place if place < len(self.steps) and self.steps[place] == step else None


class MetricsLog(Mapping[int, Mapping[str, float]]):
    """Lines of a training log merged by step, in step order; the later of two lines for one step holds.

    Numbers are kept by name, in place of an object with all names for each step: that takes a quarter of the memory.
    """

    def __init__(self, lines: Iterable[Mapping[str, float]] = ()) -> None:
        self._columns: dict[str, _Column] = {}
        for line in lines:
            step = int(line["step"])
            for name, value in line.items():
                if name not in self._columns:
                    self._columns[name] = _Column()
                self._columns[name].add(step, value)
        for column in self._columns.values():
            column.sort()
        self._steps = self._columns["step"].steps if self._columns else numbers("q")

    @property
    def names(self) -> list[str]:
        """Names of all that was logged, in the order in which they came."""
        return [name for name in self._columns if name != "step"]

    def series(self, name: str) -> dict[int, float]:
        """Return the numbers of a name by step, in step order; a step that has none is left out."""
        column = self._columns.get(name)
        return {} if column is None else dict(zip(column.steps, column.values, strict=True))

    def __getitem__(self, step: int) -> Mapping[str, float]:
        if not self._columns or self._columns["step"].place(step) is None:
            raise KeyError(step)
        return _MetricsOfStep(self._columns, step)

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


class _MetricsOfStep(Mapping[str, float]):
    """Numbers of one step of a log, by name."""

    __slots__ = ("_columns", "_step")

    def __init__(self, columns: Mapping[str, _Column], step: int) -> None:
        self._columns, self._step = columns, step

    def __getitem__(self, name: str) -> float:
        column = self._columns[name]
        if (place := column.place(self._step)) is None:
            raise KeyError(name)
        return column.values[place]

    def __iter__(self) -> Iterator[str]:
        return (name for name, column in self._columns.items() if column.place(self._step) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def metrics_by_step(run: RunDir) -> MetricsLog:
    """Read the ``metrics.jsonl`` of a run."""
    return MetricsLog(metrics_lines(run.metrics))


def append_metrics(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Append one line ``{"step": …, …}``; lines are written in one call, so that a crash breaks off the last only."""
    try:
        with path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(strict({"step": step, **metrics})) + "\n")
    except FileNotFoundError:
        raise RunError(
            f"{path.parent}: the run's folder is gone (moved or deleted); go on with it from its new place (birthmark "
            "pretrain --resume FOLDER), or start anew"
        ) from None
    except OSError as error:
        raise write_failure(path, error) from None


def write_metrics_csv(run: RunDir) -> list[str]:
    """Write ``metrics.csv``, the lines of ``metrics.jsonl`` with a row for each step and a column for each name.

    Returns:
        The names of the columns.
    """
    rows = metrics_by_step(run)
    columns = ["step", *sorted(rows.names)]
    # A row at a time: the table of a long run is not held in memory as text.
    with atomic_path(run.metrics_csv) as new, new.open("w", encoding="utf-8", newline="") as file:
        file.write(csv_text([columns]))
        file.writelines(csv_text([[row.get(name) for name in columns]]) for row in rows.values())
    return columns


def truncate_metrics(path: Path, last_step: int) -> list[int]:
    """Drop the lines after ``last_step``, so that a resumed run does not log one step twice.

    Returns:
        The steps, in the order of the lines left, whose training loss is logged.
    """
    logged, dropped = [], False
    for line in metrics_lines(path):
        if line["step"] > last_step:
            dropped = True
        elif "train/loss" in line:
            logged.append(int(line["step"]))
    # A log of weeks is written again only if a line goes, or a crash broke the last one off.
    if dropped or not _ends_whole(path):
        kept = (json.dumps(line) + "\n" for line in metrics_lines(path) if line["step"] <= last_step)
        with atomic_path(path) as new, new.open("w", encoding="utf-8") as file:
            file.writelines(kept)
    return logged


def _ends_whole(path: Path) -> bool:
    """Return True if a log exists and its last line is whole."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        if (size := file.seek(0, os.SEEK_END)) == 0:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"
