"""Tables of a study of seeds: for people, for papers and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from ...files import csv_text, write_text
from ...report.terminal import Heading, print_table
from ...report.text import MISSING, format_value, markdown_table
from .file import SeedsStudy
from .results import SeedsResult
from .seed_shares import Share

#: Level of the F tests, below which an effect is reported.
_LEVEL = 0.05
TITLES = ["figure", "runs", "mean ± sd", "init", "data", "rest", "p (init)", "p (data)"]
EXPLAINED = (
    "Shares of the variance over runs, in percent, with 95 % intervals: init, what the birth's seed decides; data, "
    "what the data's seed decides; rest, what is left, with their interaction. Two random factors, one run for each "
    "pair: moments of the analysis of variance, generalised confidence intervals, and F tests. Few seeds tell little: "
    "read the intervals."
)


def _percent(share: Share | None) -> str:
    if share is None:
        return MISSING
    return f"{100 * share.value:.0f} ({100 * share.low:.0f}–{100 * share.high:.0f})"


def _p(value: float | None) -> str:
    if value is None:
        return MISSING
    return "< .001" if value < 0.001 else format_value(value, ".3f")


def rows_of(results: Sequence[SeedsResult]) -> list[list[str]]:
    """Build a row per figure, under `TITLES`."""
    rows = []
    for result in results:
        seen = result.values_NM[np.isfinite(result.values_NM)]
        sd = format_value(float(seen.std(ddof=1)), ".3g") if len(seen) > 1 else MISSING
        found = result.shares
        rows.append(
            [
                result.words,
                f"{result.n_runs}/{result.values_NM.size}",
                f"{format_value(float(seen.mean()), '.3g')} ± {sd}",
                *(_percent(share) for share in (found[:3] if found else [None] * 3)),
                _p(found.p_init if found else None),
                _p(found.p_data if found else None),
            ]
        )
    return rows


def outcome(results: Sequence[SeedsResult]) -> list[str]:
    """Say in sentences which seed decides each figure, if an F test finds one."""
    said = []
    for result in results:
        if result.shares is None:
            missing = result.values_NM.size - result.n_runs
            why = f"{missing} runs are not finished" if missing else "it is the same in all runs"
            said.append(f"{result.words.capitalize()}: no shares, {why}.")
            continue
        init, data, _, *ps = result.shares
        effects = zip(("init", "data"), (init, data), ps, strict=True)
        found = [f"{seed} {_percent(share)} %" for seed, share, p in effects if p < _LEVEL]
        words = " and ".join(found) if found else "no effect of either seed is seen"
        said.append(f"{result.words.capitalize()}: {words}.")
    return said


def grid_of(study: SeedsStudy, result: SeedsResult) -> tuple[list[str], list[list[str]]]:
    """Build a table of one figure over all runs: headings, and a row per birth."""
    headings = ["birth", *(f"data {seed}" for seed in study.data_seeds)]
    rows = [
        [f"init {seed}", *("–" if math.isnan(v) else f"{v:.4g}" for v in values)]
        for seed, values in zip(study.init_seeds, result.values_NM.tolist(), strict=True)
    ]
    return headings, rows


def markdown(study: SeedsStudy, results: Sequence[SeedsResult]) -> str:
    """Write all of ``table.md``: the shares, then every run."""
    lines = [f"# {study.name}", "", *(f"- {sentence}" for sentence in outcome(results)), ""]
    lines += [markdown_table(TITLES, rows_of(results), n_text=1), "", EXPLAINED]
    for result in results:
        lines += ["", f"## {result.words}", "", markdown_table(*grid_of(study, result), n_text=1)]
    return "\n".join(lines) + "\n"


def write_csv(study: SeedsStudy, results: Sequence[SeedsResult], path: Path) -> None:
    """Write the table for programs: a row per run, a column per figure."""
    rows: list[list[object]] = [["init_seed", "data_seed", *(result.name for result in results)]]
    for i, init in enumerate(study.init_seeds):
        for j, data in enumerate(study.data_seeds):
            values = [float(result.values_NM[i, j]) for result in results]
            rows.append([init, data, *(None if math.isnan(value) else value for value in values)])
    write_text(path, csv_text(rows))


def print_results(results: Sequence[SeedsResult], console: Console) -> None:
    """Print the shares."""
    print_table(console, [Heading(TITLES[0], "name"), *map(Heading, TITLES[1:])], rows_of(results))
