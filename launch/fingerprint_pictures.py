"""Pictures of lineage: a clustered matrix of models, and how often each null is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .canvas import INK, MUTED, REFERENCE, RUN_COLOURS, legend, line, new, picture, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .calibration import Rates


def clustered(z_MM: np.ndarray) -> np.ndarray:
    """Order of models that puts kin side by side: leaves of average linkage on ``1 / (1 + z)``, z at least 0."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    near_MM = np.nan_to_num(np.clip(z_MM, 0, None), nan=0.0)
    distance_MM = 1 / (1 + near_MM)
    np.fill_diagonal(distance_MM, 0)
    return leaves_list(linkage(squareform(distance_MM, checks=False), "average", optimal_ordering=True))


@picture
def matrix(names: Sequence[str], z_MM: np.ndarray, verdicts_MM: np.ndarray, title: str) -> Figure:
    """Every pair of models, clustered: colour is z, a dot kin, a dash an undefined test.

    Args:
        names: of the models.
        z_MM: symmetric; the diagonal is not read.
        verdicts_MM: words, symmetric.
        title: what the numbers rest on.
    """
    order = clustered(z_MM)
    z_MM, verdicts_MM = z_MM[np.ix_(order, order)], verdicts_MM[np.ix_(order, order)]
    labels = [short(names[i], 32) for i in order]
    n = len(names)
    side = max(150, 22 * n)
    figure, axes = new(side + 6 * max(map(len, labels)) + 70, side + 5 * max(map(len, labels)) + 40)
    axes.grid(visible=False)
    # Beyond a few tens all are as certain, and the weaker kin would look like strangers.
    shown = np.ma.masked_array(np.clip(z_MM, 0, None) ** 0.5, np.isnan(z_MM) | np.eye(n, dtype=bool))
    image = axes.imshow(shown, cmap=_ramp(), vmin=0, vmax=max(5.0, float(shown.max()) if shown.count() else 5.0))
    for row, column in np.ndindex(n, n):
        if row != column and verdicts_MM[row, column] != "stranger":
            mark = "–" if verdicts_MM[row, column] == "undefined" else "●"
            axes.text(column, row, mark, ha="center", va="center", color=INK, fontsize=6)
    for axis, turn in ((axes.xaxis, 60), (axes.yaxis, 0)):
        axis.set_ticks(range(n), labels=labels, rotation=turn, parse_math=False, ha="right")
        axis.set_tick_params(length=0)
    bar = figure.colorbar(image, ax=axes, shrink=0.7, ticks=[0, 5**0.5, 5, 10, 20, 50])
    bar.ax.set_yticklabels(["≤ 0", "5", "25", "100", "400", "2500"])
    bar.outline.set_visible(False)
    bar.set_label("z")
    axes.set_title(title, parse_math=False)
    return figure


def _ramp() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("kinship", ["#f1f3f5", RUN_COLOURS[5], RUN_COLOURS[0]])


@picture
def rates(found: Sequence[Rates], level: float, title: str) -> Figure:
    """Share of strangers and of kin that each null calls kin, with 95 % intervals; the dashed line is the level."""
    figure, (left, right) = new(460, 60 + 26 * len(found), 1, 2, sharey=True)
    places = np.arange(len(found))
    for axes, what, colour, heading in (
        (left, "strangers", RUN_COLOURS[1], "strangers called kin"),
        (right, "kin", RUN_COLOURS[0], "kin called kin"),
    ):
        for place, rate in zip(places, found, strict=True):
            share = getattr(rate, what)
            if share.n_defined:
                axes.plot([share.low, share.high], [place, place], color=colour, linewidth=1.6)
                axes.plot([share.rate], [place], "o", color=colour, markersize=4.5)
            note = f"{share.n_undefined} of {share.n} undefined" if share.n_undefined else ""
            axes.annotate(note, (1, place), xycoords=("axes fraction", "data"), xytext=(0, 5), color=MUTED,
                          textcoords="offset points", ha="right", fontsize=6.5)  # fmt: skip
        axes.set_title(heading)
        axes.set_xlabel("share of defined tests, 95 % interval")
    left.set_xscale("symlog", linthresh=level, linscale=0.5)
    left.set_xlim(-0.0005, 1.05)
    left.set_xticks([0, level, 0.1, 1], labels=["0", f"{level:g}", "0.1", "1"])
    left.axvline(level, **REFERENCE)
    right.set_xlim(-0.03, 1.03)
    left.set_yticks(places, labels=[rate.null for rate in found])
    left.set_ylim(len(found) - 0.4, -0.6)
    legend(figure, [(title, line(linestyle="none")), (f"level {level:g}", line(**REFERENCE))])
    return figure
