"""Pictures of lineage: a clustered matrix of models, and error rates of nulls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..text import shorten
from .axes import turned_names
from .colour_bar import add_colour_bar
from .style import INK, PAPER, in_our_style, new_figure, pale_to_full

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: z up to which a pair stays pale, which one pair of strangers in a thousand passes by chance; z of full colour.
PALE_Z, FULL_Z = 3.0, 60.0
#: Models whose matrix has room for numbers.
_MOST_NUMBERED = 16


def clustered(z_MM: np.ndarray) -> np.ndarray:
    """Return an order of models that puts kin side by side: leaves of average linkage on ``1 / (1 + z)``, z at
    least 0.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    near_MM = np.nan_to_num(np.clip(z_MM, 0, None), nan=0.0)
    distance_MM = 1 / (1 + near_MM)
    np.fill_diagonal(distance_MM, 0)
    return leaves_list(linkage(squareform(distance_MM, checks=False), "average", optimal_ordering=True))


@in_our_style
def draw_matrix(names: Sequence[str], z_MM: np.ndarray, verdicts_MM: np.ndarray, title: str) -> Figure:
    """Draw every pair of models, clustered: z in numbers if there is room, kin in bold; a dash is an undefined test.

    Colour begins at z 3, so that strangers stay pale, and grows with the logarithm.

    Args:
        names: names of the models.
        z_MM: z, symmetric; the diagonal is not read.
        verdicts_MM: verdicts in words, symmetric.
        title: basis of the numbers.
    """
    order = clustered(z_MM)
    z_MM, verdicts_MM = z_MM[np.ix_(order, order)], verdicts_MM[np.ix_(order, order)]
    labels = [shorten(names[i], 32) for i in order]
    n = len(names)
    side = max(150, 22 * n)
    figure, axes = new_figure(side + 6 * max(map(len, labels)) + 70, side + 5 * max(map(len, labels)) + 40)
    axes.grid(visible=False)
    shares_MM = np.log(np.clip(z_MM, PALE_Z, FULL_Z) / PALE_Z) / np.log(FULL_Z / PALE_Z)
    shown = np.ma.masked_array(shares_MM, np.isnan(z_MM) | np.eye(n, dtype=bool))
    axes.imshow(shown, cmap=pale_to_full(), vmin=0, vmax=1)
    for row, column in np.ndindex(n, n):
        if row == column or not verdicts_MM[row, column]:
            continue
        kin, z = verdicts_MM[row, column] == "kin", z_MM[row, column]
        number = f"{z:.1f}" if abs(z) < 10 else f"{z:.0f}"
        text = "–" if np.isnan(z) else number if n <= _MOST_NUMBERED else "●" if kin else ""
        ink = PAPER if np.isfinite(z) and shares_MM[row, column] > 0.6 else INK
        weight = "bold" if kin else "normal"
        axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=6, fontweight=weight)
    turned_names(axes, labels, 60)
    axes.set_yticks(range(n), labels=labels, parse_math=False)
    axes.tick_params(length=0)
    ticks = np.log(np.array([PALE_Z, 10, 30, FULL_Z]) / PALE_Z) / np.log(FULL_Z / PALE_Z)
    what = "z (bold: kin; –: undefined)" if n <= _MOST_NUMBERED else "z (●: kin; –: undefined)"
    numbers = [f"≤ {PALE_Z:g}", "10", "30", f"≥ {FULL_Z:g}"]
    add_colour_bar([axes], pale_to_full(), ticks.tolist(), labels=numbers, label=what, share=0.7)
    axes.set_title(title, parse_math=False)
    return figure
