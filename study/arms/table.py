"""Tables of a study of arms: for people, for papers and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from ...files import csv_text, write_text
from ...measure.config import SnapshotConfig
from ...report.terminal import Heading, print_left_out, print_table, table_width
from ...report.text import MISSING, format_value, markdown_table
from .file import ArmStudy
from .results import ArmResult, Spread, spread

_COLUMNS = {
    "sink_mass": "sink mass",
    "sink_mass_normalised": "sink mass, rows normalised",
    "sink_mass_largest_head": "largest head",
    "document_sink_mass": "document sink mass",
    "sink_key": "sink at key",
    "sink_key_importance": "its importance",
    "sink_mass_random": "sink mass, random tokens",
    "sink_mass_random_normalised": "random tokens, rows normalised",
    "trigger_loss": "trigger loss",
    "val_loss": "validation loss",
    "largest_value": "largest value",
    "kurtosis": "kurtosis",
    "birth": "σ²(0)/σ²(late) at birth",
    "end": "σ²(0)/σ²(late) at the end",
}
_OUTLIERS = ("largest_value", "kurtosis")
_ABOUT_OUTLIERS = (
    "Largest value and kurtosis: of the residual stream on that text, behind the block where they are largest. "
)
_OPTIONAL = ("sink_mass_normalised", "document_sink_mass", "sink_mass_random_normalised", "trigger_loss", *_OUTLIERS)
_FORMATS = {"sink_key": ".3g", **dict.fromkeys(_OUTLIERS, "ratio")}
_Detail = Literal["range", "sd", "mean"]
_NARROW = ("sink_mass", "sink_mass_normalised", "trigger_loss", "val_loss", "end")


def _shown(results: Sequence[ArmResult]) -> list[str]:
    """Choose the columns of the table; columns for documents, triggers, outliers, rows that do not sum to 1, and sinks
    at keys other than the first appear only if an arm has them.
    """
    shown = [key for key in _COLUMNS if key not in _OPTIONAL or any(r.figures[key].n for r in results)]
    if not any(_sink_is_elsewhere(r) for r in results):
        shown = [key for key in shown if key not in ("sink_key", "sink_key_importance")]
    return shown


def _sink_is_elsewhere(result: ArmResult) -> bool:
    """Return True if a key other than the first is above the sink rate's threshold in a seed."""
    none = spread([])
    key, importance = (result.figures.get(name, none) for name in ("sink_key", "sink_key_importance"))
    return key.n > 0 and key.max > 0 and importance.max > SnapshotConfig.sink_epsilon


def _cell(result: ArmResult, column: str, detail: _Detail) -> str:
    if column not in ("birth", "end"):
        return _format_spread(result.figures[column], _FORMATS.get(column, ".3f"), detail)
    layers = result.layers(column)
    if len(layers) == 1:
        return _format_spread(layers[0], ".3g", detail)
    return ", ".join(format_value(layer.mean, ".3g") for layer in layers) or MISSING


def _format_spread(value: Spread, spec: str, detail: _Detail) -> str:
    """Write mean ± sd (min–max), or the part of it that ``detail`` asks for; only the mean for one seed."""
    mean, sd, low, high = (format_value(part, spec) for part in value[:4])
    if value.n < 2 or detail == "mean":
        return mean
    return f"{mean} ± {sd} ({low}–{high})" if detail == "range" else f"{mean} ± {sd}"


def titles_and_rows(study: ArmStudy, results: Sequence[ArmResult]) -> tuple[list[str], list[list[str]]]:
    """Build the table: its headings, and a row per arm."""
    columns = _shown(results)
    rows = [
        [
            result.arm,
            f"{result.n_runs}/{len(study.init_seeds)}",
            f"{result.step:,}",
            *(_cell(result, column, "range") for column in columns),
        ]
        for result in results
    ]
    return ["arm", "runs", "step", *(_COLUMNS[column] for column in columns)], rows


def notes(study: ArmStudy, results: Sequence[ArmResult]) -> str:
    """Explain the table's figures."""
    levels = {format_value(result.uniform, ".3f") for result in results}
    uniform = ", ".join(sorted(levels - {MISSING} or levels))
    outliers = any(result.figures[name].n for result in results for name in _OUTLIERS)
    return (
        f"Mean ± sd (min–max) over init_seeds {', '.join(map(str, study.init_seeds))}. Sink mass: mean attention on "
        f"position 0 on held-out text of the task (uniform attention: {uniform}). Losses in nats per token. "
        f"{_ABOUT_OUTLIERS if outliers else ''}"
        "σ²(0)/σ²(late): variance of what enters the output projection at position 0 over its mean in the later half, "
        "random tokens" + ("; one figure per block." if any(len(r.layers("end")) > 1 for r in results) else ".")
    )


def markdown(study: ArmStudy, results: Sequence[ArmResult]) -> str:
    """Write the table in Markdown."""
    return f"{markdown_table(*titles_and_rows(study, results), n_text=1)}\n\n{notes(study, results)}\n"


def write_csv(results: Sequence[ArmResult], path: Path) -> None:
    """Write the table for programs: a row per arm, ``FIGURE_mean``, ``_sd``, ``_min``, ``_max`` and ``_n`` per
    figure.
    """
    names = list(dict.fromkeys(name for result in results for name in result.figures))
    titles = ["arm", "runs", "step", *(f"{name}_{part}" for name in names for part in Spread._fields)]
    rows: list[Sequence[object]] = [titles]
    for result in results:
        figures = [value for name in names for value in result.figures.get(name, spread([]))]
        cells = [None if isinstance(value, float) and math.isnan(value) else repr(value) for value in figures]
        rows.append([result.arm, result.n_runs, result.step, *cells])
    write_text(path, csv_text(rows))


def _in_short(
    study: ArmStudy, results: Sequence[ArmResult], columns: Sequence[str], detail: _Detail
) -> tuple[list[Heading], list[list[str]]]:
    """Build headings and cells of some columns."""
    headings = [Heading("arm", "name"), Heading("runs"), Heading("step")]
    for column in columns:
        first, _, second = _COLUMNS[column].rpartition(" ")
        headings.append(Heading(f"{first}\n{second}" if first else second))
    rows = [
        [
            result.arm,
            f"{result.n_runs}/{len(study.init_seeds)}",
            f"{result.step:,}",
            *(_cell(result, column, detail) for column in columns),
        ]
        for result in results
    ]
    return headings, rows


def print_results(study: ArmStudy, results: Sequence[ArmResult], console: Console) -> None:
    """Print the widest form of the table that fits the console."""
    wide = _shown(results)
    narrow = [column for column in _NARROW if column in wide]
    loss = "trigger_loss" if "trigger_loss" in narrow else "val_loss"
    narrowest = [column for column in narrow if column == loss or column.startswith("sink_mass")]
    forms: tuple[tuple[list[str], _Detail], ...] = (
        (wide, "range"),
        (wide, "sd"),
        (narrow, "sd"),
        (narrowest, "sd"),
        (narrow, "mean"),
        (narrowest, "mean"),
    )
    for columns, detail in forms:
        table = _in_short(study, results, columns, detail)
        if table_width(*table) < console.width:
            break
    print_table(console, *table)
    print_left_out(console, [_COLUMNS[name] for name in wide if name not in columns], "table.csv has every column")
