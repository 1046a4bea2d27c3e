"""Pictures of lineage: a clustered matrix of models, and how often each null is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..text import shorten
from .style import INK, RUN_COLOURS, in_our_style, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def clustered(z_MM: np.ndarray) -> np.ndarray:
    """Order of models that puts kin side by side: leaves of average linkage on ``1 / (1 + z)``, z at least 0."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    near_MM = np.nan_to_num(np.clip(z_MM, 0, None), nan=0.0)
    distance_MM = 1 / (1 + near_MM)
    np.fill_diagonal(distance_MM, 0)
    return leaves_list(linkage(squareform(distance_MM, checks=False), "average", optimal_ordering=True))


@in_our_style
def draw_matrix(names: Sequence[str], z_MM: np.ndarray, verdicts_MM: np.ndarray, title: str) -> Figure:
    """Every pair of models, clustered: colour is z, a dot kin, a dash an undefined test.

    Args:
        names: of the models.
        z_MM: symmetric; the diagonal is not read.
        verdicts_MM: words, symmetric.
        title: what the numbers rest on.
    """
    order = clustered(z_MM)
    z_MM, verdicts_MM = z_MM[np.ix_(order, order)], verdicts_MM[np.ix_(order, order)]
    labels = [shorten(names[i], 32) for i in order]
    n = len(names)
    side = max(150, 22 * n)
    figure, axes = new_figure(side + 6 * max(map(len, labels)) + 70, side + 5 * max(map(len, labels)) + 40)
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
