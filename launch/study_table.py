"""What came out of a study: figures per arm over its seeds, as a table for people, for papers and for programs."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..callbacks.records import Snapshot, atomic_path, write_text
from .story import number
from .study import Study, Trial
from .table import MISSING, format_value, join_rows, metrics_by_step, read_snapshots

# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────

SCALARS = {
    "sink_mass": "text_sink_mass",
    "sink_mass_normalised": "text_sink_mass_normalised",
    "sink_mass_largest_head": "text_sink_mass_max",
    "sink_mass_random": "sink_mass",
    "sink_mass_random_normalised": "sink_mass_normalised",
    "trigger_loss": "val_loss_trigger",
    "val_loss": "val_loss",
}
"""Figure → scalar of a row (launch/table.py), at the end of the run."""

ARRAYS = ("variance_discrepancy", "variance_discrepancy_out")
"""Arrays ``[L]`` of the random probe, at birth and at the end. (Where every sequence starts with one BOS, the variance
at position 0 is 0.)"""


class Spread(NamedTuple):
    """One figure over the seeds of an arm; NaN where there is none (or, for ``sd``, only one)."""

    mean: float
    sd: float
    """Unbiased."""
    min: float
    max: float
    n: int
    """Seeds that have the figure."""


def spread(values: Sequence[float]) -> Spread:
    """The figures of some seeds; those that are not numbers are left out."""
    seen = np.array([value for value in values if math.isfinite(value)], dtype=float)
    if not len(seen):
        return Spread(math.nan, math.nan, math.nan, math.nan, 0)
    sd = float(seen.std(ddof=1)) if len(seen) > 1 else math.nan
    return Spread(float(seen.mean()), sd, float(seen.min()), float(seen.max()), len(seen))


@dataclass(frozen=True)
class ArmResult:
    """What the runs of one arm tell."""

    arm: str
    n_runs: int
    """Runs that the figures are taken from."""
    step: int
    """Step at which they are taken."""
    figures: dict[str, Spread]
    """By the names of `SCALARS`, and ``ARRAY_birth.LAYER`` and ``ARRAY_end.LAYER`` with layers from 1."""
    uniform: float
    """The sink mass of uniform attention."""
    steps: list[int]
    """Steps that all of these runs measured."""
    sinks: np.ndarray
    """``[runs, steps]`` sink mass: on the task's text where it was measured, a share of the row's sum where rows do
    not sum to 1."""

    @property
    def sink(self) -> Spread:
        """The last of ``sinks``."""
        return spread(self.sinks[:, -1].tolist() if self.steps else [])

    def layers(self, moment: str) -> list[Spread]:
        """Variance discrepancy by layer at ``birth`` or at the ``end``: of what enters the output projection."""
        for array in reversed(ARRAYS):
            prefix = f"{array}_{moment}."
            found = [value for name, value in self.figures.items() if name.startswith(prefix)]
            if found:
                return found
        return []


class _Read(NamedTuple):
    trial: Trial
    rows: dict[int, dict[str, Any]]
    """By step."""
    snapshots: dict[int, Snapshot]


def read_results(study: Study, planned: Sequence[Trial]) -> list[ArmResult]:
    """Results of every arm that has a run, in the study's order.

    They are taken from the finished runs; where none is, from the last step that all runs of the arm have come to.

    Raises:
        RunError: a file of a run is damaged; the message names it.
    """
    results = []
    for arm in study.arms:
        reads = []
        for trial in planned:
            if trial.arm == arm and trial.started:
                snapshots = read_snapshots(trial.run)
                rows = {row["step"]: row for row in join_rows(snapshots, metrics_by_step(trial.run))}
                if rows:
                    reads.append(_Read(trial, rows, {snapshot.step: snapshot for snapshot in snapshots}))
        finished = [read for read in reads if read.trial.finished]
        if reads:
            results.append(_result(arm, finished or reads))
    return results


def _result(arm: str, reads: Sequence[_Read]) -> ArmResult:
    steps = sorted(set.intersection(*(set(read.rows) for read in reads)))
    step = steps[-1] if steps else 0
    ends = [read.rows.get(step, {}) for read in reads]
    figures = {name: spread([number(end.get(key)) for end in ends]) for name, key in SCALARS.items()}
    for array in ARRAYS:
        for moment, at in (("birth", 0), ("end", step)):
            found = [read.snapshots[at].arrays.get(array) for read in reads if at in read.snapshots]
            for layer, values in enumerate(zip(*(v for v in found if v is not None), strict=True), start=1):
                figures[f"{array}_{moment}.{layer}"] = spread([float(value) for value in values])
    measured = [at for at in steps if all(math.isfinite(_sink(read.rows[at])) for read in reads)]
    return ArmResult(
        arm=arm,
        n_runs=len(reads),
        step=step,
        figures=figures,
        uniform=next((number(end.get("sink_uniform")) for end in ends), math.nan),
        steps=measured,
        sinks=np.array([[_sink(read.rows[at]) for at in measured] for read in reads]),
    )


def _sink(row: Mapping[str, Any]) -> float:
    for key in ("text_sink_mass_normalised", "text_sink_mass", "sink_mass_normalised", "sink_mass"):
        if row.get(key) is not None:
            return number(row[key])
    return math.nan


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_COLUMNS = {
    "sink_mass": "sink mass",
    "sink_mass_normalised": "sink mass, rows normalised",
    "sink_mass_largest_head": "largest head",
    "sink_mass_random": "sink mass, random tokens",
    "sink_mass_random_normalised": "random tokens, rows normalised",
    "trigger_loss": "trigger loss",
    "val_loss": "validation loss",
    "birth": "σ²(0)/σ²(late) at birth",
    "end": "σ²(0)/σ²(late) at the end",
}
_OPTIONAL = ("sink_mass_normalised", "sink_mass_random_normalised")
_NARROW = ("sink_mass", "sink_mass_normalised", "trigger_loss", "val_loss", "end")


def _shown(results: Sequence[ArmResult]) -> list[str]:
    """Columns that a table has: only what rows that sum to 1 do not need is left out where nobody has it."""
    return [key for key in _COLUMNS if key not in _OPTIONAL or any(r.figures[key].n for r in results)]


def _cell(result: ArmResult, column: str, *, ranges: bool) -> str:
    if column not in ("birth", "end"):
        return _told(result.figures[column], ".3f", ranges=ranges)
    layers = result.layers(column)
    if len(layers) == 1:
        return _told(layers[0], ".3g", ranges=ranges)
    return ", ".join(format_value(layer.mean, ".3g") for layer in layers) or MISSING


def _told(value: Spread, spec: str, *, ranges: bool) -> str:
    """Mean ± sd (min–max); the mean alone of one seed."""
    if value.n < 2:
        return format_value(value.mean, spec)
    low, high = format_value(value.min, spec), format_value(value.max, spec)
    told = f"{format_value(value.mean, spec)} ± {format_value(value.sd, spec)}"
    return f"{told} ({low}–{high})" if ranges else told


def markdown(study: Study, results: Sequence[ArmResult]) -> str:
    """The table in Markdown."""
    columns = _shown(results)
    lines = [
        "| " + " | ".join(["arm", "runs", "step", *(_COLUMNS[column] for column in columns)]) + " |",
        "|" + "|".join(["---", *["---:"] * (len(columns) + 2)]) + "|",
    ]
    for result in results:
        cells = [_cell(result, column, ranges=True) for column in columns]
        runs = f"{result.n_runs}/{len(study.init_seeds)}"
        lines.append("| " + " | ".join([result.arm, runs, f"{result.step:,}", *cells]) + " |")
    uniform = ", ".join(sorted({format_value(result.uniform, ".3f") for result in results}))
    notes = (
        f"Mean ± sd (min–max) over init_seeds {', '.join(map(str, study.init_seeds))}. Sink mass: mean attention on "
        f"position 0 on held-out text of the task (uniform attention: {uniform}). Losses in nats per token. "
        "σ²(0)/σ²(late): variance of what enters the output projection at position 0 over its mean in the later half, "
        "random tokens" + ("; one figure per block." if any(len(r.layers("end")) > 1 for r in results) else ".")
    )
    return "\n".join([*lines, "", notes, ""])


def write_csv(results: Sequence[ArmResult], path: Path) -> None:
    """The table for programs: a row per arm, ``FIGURE_mean``, ``_sd``, ``_min``, ``_max`` and ``_n`` per figure."""
    names = list(dict.fromkeys(name for result in results for name in result.figures))
    with atomic_path(path) as new, new.open("w", newline="", encoding="utf-8") as f:
        table = csv.writer(f)
        table.writerow(["arm", "runs", "step", *(f"{name}_{part}" for name in names for part in Spread._fields)])
        for result in results:
            figures = [value for name in names for value in result.figures.get(name, spread([]))]
            told = ["" if isinstance(value, float) and math.isnan(value) else repr(value) for value in figures]
            table.writerow([result.arm, result.n_runs, result.step, *told])


def _rich_table(study: Study, results: Sequence[ArmResult], columns: Sequence[str], *, ranges: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("arm", no_wrap=True)
    table.add_column("runs", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    for column in columns:
        first, _, second = _COLUMNS[column].rpartition(" ")
        table.add_column(f"{first}\n{second}" if first else second, justify="right", no_wrap=True, overflow="ellipsis")
    for result in results:
        cells = [Text(_cell(result, column, ranges=ranges)) for column in columns]
        table.add_row(Text(result.arm), f"{result.n_runs}/{len(study.init_seeds)}", f"{result.step:,}", *cells)
    return table


def report_study(study: Study, results: Sequence[ArmResult], out: Path, console: Console) -> None:
    """Write ``table.md``, ``table.csv``, ``figure.png`` and ``figure.svg`` into ``out``, and print the table."""
    write_text(out / "table.md", markdown(study, results))
    write_csv(results, out / "table.csv")
    wide = _shown(results)
    narrow = [column for column in _NARROW if column in wide]
    for columns, ranges in ((wide, True), (wide, False), (narrow, False), (narrow[:-2], False)):
        table = _rich_table(study, results, columns, ranges=ranges)
        if Measurement.get(console, console.options, table).maximum < console.width:
            break
    console.print(table)
    written = "table.md table.csv"
    if importlib.util.find_spec("matplotlib"):
        from .study_pictures import draw_study

        draw_study(study, results, out)
        written += " figure.png figure.svg"
    else:
        written += " (no figure: pip install 'birthmark[plots]')"
    console.print(f"{out}: {written}", highlight=False, soft_wrap=True)
