"""Pictures of several models: matrices of models and layers, predictions by position, and of lineage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from ...findings.formatting import format_value, shorten
from ...metrics.seedprint import Fingerprint
from .axes import add_colour_bar, turned_names, whole_ticks
from .panels import MAX_PANELS
from .style import (
    INK,
    PAPER,
    in_figure_style,
    new_figure,
    pale_to_full,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Models whose matrix has room for numbers, and layers.
_MOST_NUMBERED = 10


def _matrix(axes: Axes, values: np.ndarray, ends: tuple[float, float], title: str, *, bar: bool = True) -> Any:
    """Draw a map, with numbers in it if there is room; cells that are not numbers stay empty."""
    axes.grid(visible=False)
    image = axes.imshow(np.ma.masked_invalid(values), cmap=pale_to_full(), vmin=ends[0], vmax=ends[1])
    if max(values.shape) <= _MOST_NUMBERED:
        for row, column in np.argwhere(np.isfinite(values)):
            value = values[row, column]
            dark = (value - ends[0]) / (ends[1] - ends[0]) > 0.6
            text = format_value(float(value), ".2f" if ends[1] >= 1 else ".2g")
            axes.text(column, row, text, ha="center", va="center", color=PAPER if dark else INK, fontsize=6)
    if title:
        axes.set_title(title, parse_math=False)
    if bar:
        ticks = np.linspace(*ends, 5).tolist()
        add_colour_bar([axes], image.get_cmap(), ticks, limits=ends, share=0.7)
    return image


@in_figure_style
def draw_layer_matrices(pairs: Sequence[tuple[str, str, np.ndarray]]) -> Figure:
    """Draw CKA of every layer of one model with every layer of another, a panel for each pair, at most `MAX_PANELS`.

    Args:
        pairs: names of two models, and CKA ``[L_a + 1, L_b + 1]``.
    """
    shown = pairs[:MAX_PANELS]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, grid = new_figure(40 + 170 * columns, 10 + 152 * rows, rows, columns, squeeze=False)
    image: Any = None
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, (a, b, cka_PQ) in zip(grid.flat, shown, strict=False):
        image = _matrix(axes, cka_PQ, (0.0, 1.0), "", bar=False)
        axes.invert_yaxis()
        axes.set_xlabel(f"layer of {shorten(b, 20)}", parse_math=False)
        axes.set_ylabel(f"layer of {shorten(a, 20)}", parse_math=False)
        whole_ticks(axes.xaxis)
        whole_ticks(axes.yaxis)
    ticks = [0, 0.2, 0.4, 0.6, 0.8, 1]
    add_colour_bar(grid.ravel(), image.get_cmap(), ticks, label="CKA (layer 0: embeddings)", share=0.6)
    return figure


# ---------------------------------------------------------------- pictures of lineage
# A clustered matrix of models, and error rates of nulls.

#: z up to which a pair stays pale, which one pair of strangers in a thousand passes by chance; z of full colour.
PALE_Z, FULL_Z = 3.0, 60.0
#: Models whose matrix has room for numbers.
_MOST_NUMBERED_MODELS = 16


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


@in_figure_style
def draw_matrix(names: Sequence[str], tests: Iterable[tuple[int, int, Fingerprint]], title: str) -> Figure:
    """Draw every pair of models, clustered: z in numbers if there is room, kin in bold; a dash is an undefined test.

    Colour begins at z 3, so that strangers stay pale, and grows with the logarithm.

    Args:
        names: names of the models.
        tests: indices of two models, and their test.
        title: basis of the numbers.
    """
    n = len(names)
    z_MM, verdicts_MM = np.full((n, n), np.nan), np.full((n, n), "", dtype=object)
    for a, b, found in tests:
        z_MM[[a, b], [b, a]], verdicts_MM[[a, b], [b, a]] = found.z, found.verdict
    order = clustered(z_MM)
    z_MM, verdicts_MM = z_MM[np.ix_(order, order)], verdicts_MM[np.ix_(order, order)]
    labels = [shorten(names[i], 32) for i in order]
    side = max(150, 22 * n)
    longest = max(map(len, labels))
    lines = wrap(title, (side + 70) // 6)
    figure, axes = new_figure(side + 6 * longest + 70, side + 5 * longest + 28 + 12 * len(lines))
    axes.grid(visible=False)
    shares_MM = np.log(np.clip(z_MM, PALE_Z, FULL_Z) / PALE_Z) / np.log(FULL_Z / PALE_Z)
    shown = np.ma.masked_array(shares_MM, np.isnan(z_MM) | np.eye(n, dtype=bool))
    axes.imshow(shown, cmap=pale_to_full(), vmin=0, vmax=1)
    for row, column in np.ndindex(n, n):
        if row == column or not verdicts_MM[row, column]:
            continue
        kin, z = verdicts_MM[row, column] == "kin", z_MM[row, column]
        number = f"{z:.1f}" if abs(z) < 10 else f"{z:.0f}"
        text = "–" if np.isnan(z) else number if n <= _MOST_NUMBERED_MODELS else "●" if kin else ""
        ink = PAPER if np.isfinite(z) and shares_MM[row, column] > 0.6 else INK
        weight = "bold" if kin else "normal"
        axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=6, fontweight=weight)
    turned_names(axes, labels, 60)
    axes.set_yticks(range(n), labels=labels, parse_math=False)
    axes.tick_params(length=0)
    ticks = np.log(np.array([PALE_Z, 10, 30, FULL_Z]) / PALE_Z) / np.log(FULL_Z / PALE_Z)
    what = "z (bold: kin; –: undefined)" if n <= _MOST_NUMBERED_MODELS else "z (●: kin; –: undefined)"
    numbers = [f"≤ {PALE_Z:g}", "10", "30", f"≥ {FULL_Z:g}"]
    add_colour_bar([axes], pale_to_full(), ticks.tolist(), labels=numbers, label=what, share=0.7)
    axes.set_title("\n".join(lines), parse_math=False)
    return figure
