"""Picture of a study of robustness: z after every change, for kin and for strangers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...metrics.seedprint import level_z
from ...report.pictures.saving import save_both
from ...report.pictures.style import (
    MUTED,
    REFERENCE,
    RUN_COLOURS,
    add_legend,
    in_our_style,
    legend_line,
    new_figure,
)
from .file import RobustnessStudy
from .results import ChangedTest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOT: dict[str, Any] = {"linestyle": "none", "markersize": 3.4, "markeredgewidth": 0.8}
_LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "stranger": ("strangers", {"color": RUN_COLOURS[1], "marker": "o", "markersize": 2.2, "alpha": 0.5}),
    "birth": ("own birth", {"color": RUN_COLOURS[0], "marker": "o", "markerfacecolor": "none"}),
    "trained": ("what it was made from", {"color": RUN_COLOURS[0], "marker": "o"}),
    "merged": ("what was merged in", {"color": RUN_COLOURS[2], "marker": "D"}),
    "teacher": ("its teacher", {"color": RUN_COLOURS[3], "marker": "^"}),
}
"""Relation of a pair → its words and its marker, those in front last."""


def draw_robustness(study: RobustnessStudy, results: Sequence[ChangedTest], out: Path) -> list[str]:
    """Write ``figure`` as PNG and SVG; return the files' names."""
    return save_both(z_by_change(study, results), out, "figure")


@in_our_style
def z_by_change(study: RobustnessStudy, results: Sequence[ChangedTest]) -> Figure:
    """Draw a row for each change, a panel for each test, a dot for each pair of models."""
    changes = list(dict.fromkeys(r.change for r in results))
    figure, grid = new_figure(
        130 + 230 * len(study.tests),
        70 + 13 * len(changes),
        1,
        len(study.tests),
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for axes, test in zip(grid[0], study.tests, strict=True):
        _panel(axes, [r for r in results if r.test == test], changes, level_z(study.tests[test].recipe.null))
        axes.set_title(test)
    grid[0][0].set_yticks(range(len(changes)), labels=changes, parse_math=False)
    grid[0][0].set_ylim(len(changes) - 0.4, -0.6)
    shown = {_look(r) for r in results}
    entries = [(words, legend_line(**{**_DOT, **look})) for name, (words, look) in _LOOKS.items() if name in shown]
    add_legend(figure, [*reversed(entries), ("p = .01", legend_line(**REFERENCE))])
    return figure


def _look(result: ChangedTest) -> str:
    if result.group == "own":
        return result.reference
    if result.group == "second":
        return result.role if result.reference == "trained" else ""
    return "stranger"


def _panel(axes: Axes, results: Sequence[ChangedTest], changes: Sequence[str], level: float) -> None:
    axes.set_xscale("symlog", linthresh=3, linscale=0.8)
    axes.set_xticks([-30, -10, -3, 0, 3, 10, 30, 100], labels=["−30", "−10", "−3", "0", "3", "10", "30", "100"])
    axes.minorticks_off()
    axes.set_xlabel("z")
    axes.axvline(0, color=MUTED, linewidth=0.6, zorder=1)
    axes.axvline(level, **REFERENCE, zorder=1)
    for front, (name, (_, look)) in enumerate(_LOOKS.items()):
        points = [
            (r.found.z, changes.index(r.change)) for r in results if _look(r) == name and r.found.verdict != "undefined"
        ]
        if points:
            axes.plot(*zip(*points, strict=True), **{**_DOT, **look}, zorder=2 + front)
