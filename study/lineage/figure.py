"""Pictures of a study of lineage: births and their descendants over training, and all of its models side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...report.pictures.axes import count_formatter
from ...report.pictures.fingerprints import draw_matrix
from ...report.pictures.saving import save_both
from ...report.pictures.style import (
    INK,
    MUTED,
    REFERENCE,
    RUN_COLOURS,
    add_legend,
    in_our_style,
    legend_line,
    new_figure,
)
from .comparison import describe_probe
from .file import LineageStudy
from .pairs import StudyModel, last_step
from .results import PairResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3
_DOTS = {True: "o", False: "^"}
"""Marker of a pair with (True) or without (False) a birth."""
_LOOKS: dict[str, dict[str, Any]] = {
    "kin": {"color": RUN_COLOURS[0], "linewidth": 1.1},
    "stranger": {"color": RUN_COLOURS[1]},
}


def draw_lineage(study: LineageStudy, results: Sequence[PairResult], out: Path) -> list[str]:
    """Write ``figure`` and, if there is a pair, ``matrix`` of the first test, each as PNG and SVG; return the files'
    names.
    """
    drawn = {"figure": over_training(study, results)}
    if results:
        drawn["matrix"] = _all_models(study, results)
    return [file for name, figure in drawn.items() for file in save_both(figure, out, name)]


def _all_models(study: LineageStudy, results: Sequence[PairResult]) -> Figure:
    """Draw births, last checkpoints and ends of continued runs under the first test."""
    test = next(iter(study.tests))
    there = dict.fromkeys(model for result in results for model in (result.a, result.b))
    last = last_step(there)
    models = [model for model in there if model.step in (0, last) or model.continuation]
    n = len(models)
    z_MM, verdicts_MM = np.full((n, n), np.nan), np.full((n, n), "", dtype=object)
    for result in results:
        if result.a in models and result.b in models:
            i, j, found = models.index(result.a), models.index(result.b), result.fingerprints[test]
            z_MM[[i, j], [j, i]], verdicts_MM[[i, j], [j, i]] = found.z, found.verdict
    title = f"{test}: {describe_probe(study.tests[test].probe)}"
    return draw_matrix([model.label for model in models], z_MM, verdicts_MM, title)


def _age(model: StudyModel, last: int) -> int:
    """Return the optimizer steps since a model's birth; a base ends at ``last``."""
    return model.step + (last if model.continuation else 0)


@in_our_style
def over_training(study: LineageStudy, results: Sequence[PairResult]) -> Figure:
    """Draw z of all pairs by the age of the younger model, a panel per test.

    Blue: one birth; orange: two. Circles: a birth and another model; triangles: two trained models. Filled: kin by the
    test.
    """
    n = len(study.tests)
    columns = min(n, _COLUMNS)
    figure, grid = new_figure(
        60 + 150 * columns,
        20 + 140 * -(-n // columns),
        -(-n // columns),
        columns,
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    last = max((result.b.step for result in results if result.table == 1), default=0)
    for axes, test in zip(grid.flat, study.tests, strict=False):
        _panel(axes, results, test, last)
    for axes in list(grid.flat)[n:]:
        axes.set_visible(False)
    low, high = grid[0][0].get_ylim()
    grid[0][0].set_ylim(min(low, -4), max(high, 12))
    for axes in grid[:, 0]:
        axes.set_ylabel("z")
    for place, axes in enumerate(grid.flat):
        if place + columns >= n:
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("optimizer steps since birth")
    dot: dict[str, Any] = {"linestyle": "none", "markersize": 3.2}
    entries = [
        ("a model and its birth", legend_line(**_LOOKS["kin"], marker="o", markersize=3.2)),
        ("another birth", legend_line(**dot, marker="o", **_LOOKS["stranger"])),
        ("two trained models", legend_line(**dot, marker="^", color=MUTED)),
        ("not called kin", legend_line(**dot, marker="o", color=INK, markerfacecolor="none")),
    ]
    if study.continuations:
        entries.append(("end of the base", legend_line(**REFERENCE)))
    add_legend(figure, entries)
    return figure


def _panel(axes: Axes, results: Sequence[PairResult], test: str, last: int) -> None:
    axes.set_title(test)
    axes.set_yscale("symlog", linthresh=3, linscale=0.8)
    axes.set_yticks([0, 3, 10, 30, 100, 300], labels=["0", "3", "10", "30", "100", "300"])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(count_formatter())
    axes.locator_params(axis="x", nbins=5)
    axes.axhline(0, color=MUTED, linewidth=0.6, zorder=1)
    paths: dict[tuple[int, str], list[tuple[float, float]]] = {}
    aside = 0.03 * max((_age(result.b, last) for result in results), default=0)
    for result in results:
        found = result.fingerprints[test]
        if found.verdict == "undefined":
            continue
        newborn, colour = result.a.step == 0, _LOOKS[result.expected]["color"]
        age = float(_age(result.b, last)) if newborn else _age(result.b, last) + aside
        axes.plot(
            age, found.z, _DOTS[newborn], color=colour, markersize=3.2, zorder=3 if result.expected == "kin" else 2,
            markerfacecolor=colour if found.verdict == "kin" else "none", markeredgewidth=0.7,
        )  # fmt: skip
        if result.expected == "kin" and newborn:
            paths.setdefault((result.a.seed, result.b.continuation), []).append((age, found.z))
    for (seed, continuation), points in paths.items():
        before = paths.get((seed, ""), [])[-1:] if continuation else []
        axes.plot(*zip(*before, *points, strict=True), **_LOOKS["kin"], zorder=2)
    if any(result.b.continuation for result in results):
        axes.axvline(last, **REFERENCE, zorder=1)
