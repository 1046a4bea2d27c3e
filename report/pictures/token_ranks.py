"""Pictures of token preference: paths of favourites' ranks, and p̄ over all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..text import shorten
from .axes import count_formatter, fix_ticks, log_axis, step_axis
from .labels import spread_apart, text_width
from .style import INK, MUTED, REFERENCE, add_legend, in_figure_style, legend_line, new_figure, run_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_NAME_SIZE, _NAME_FONT = 7.5, "DejaVu Sans Mono"


@dataclass(frozen=True)
class TokenPath:
    """Rank of one token over training."""

    text: str
    ranks: Sequence[float]
    """Rank in p̄ at every step, from 1."""
    favourite_at_birth: bool
    favourite_now: bool


@in_figure_style
def draw_rank_paths(
    steps: Sequence[float],
    paths: Sequence[TokenPath],
    *,
    run: int,
    top: int,
    linear_until: float | None = None,
    start: str = "birth",
) -> Figure:
    """Draw the ranks of birth's and of today's ``top`` favourites over training; evenly spaced down to ``top``,
    logarithmic below.

    Every token's text is shown at both ends, with its rank if that is below ``top``.
    """
    from .engine.measured_layout import layout_of

    height = 340
    figure, axes = new_figure(360, height)
    axes.set_yscale("symlog", linthresh=top, linscale=top / 4.5)
    lowest = max((np.nanmax(path.ranks) for path in paths), default=top)
    for path in sorted(paths, key=lambda path: path.favourite_at_birth):
        axes.plot(steps, path.ranks, marker="o", markersize=2, clip_on=False, **_path_look(path, run))
    step_axis(axes, max(steps), linear_until)
    axes.set_xlim(min(steps), max(steps))
    axes.set_ylim(max(lowest, top + 1) * 1.15, 0.6)
    for end, side in ((0, "left"), (-1, "right")):
        widest = max((text_width(_words(path, end, top), _NAME_SIZE, _NAME_FONT) for path in paths), default=0.0)
        layout_of(figure).keep_free(axes, **{side: widest + 13})
        _name_ends(axes, paths, end, run, top, gap=9.2 / (height - 65))
    decades = 10.0 ** np.arange(np.floor(np.log10(top)) + 1, np.ceil(np.log10(max(lowest, top + 1))) + 1)
    # The tokens' names stand where ticks would.
    fix_ticks(axes.yaxis, [top, *decades[decades <= lowest].tolist()])
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.set_title("rank in p̄")
    axes.axhspan(0.6, top + 0.5, color=MUTED, alpha=0.1, linewidth=0, zorder=0)
    colours = {f"among {start}'s favourites": run_colour(run), "favourites now only": MUTED}
    add_legend(figure, [(label, legend_line(color=colour)) for label, colour in colours.items()])
    return figure


def _path_look(path: TokenPath, run: int) -> dict[str, Any]:
    return {"color": run_colour(run)} if path.favourite_at_birth else {"color": MUTED, "linewidth": 0.9}


def _words(path: TokenPath, end: int, top: int) -> str:
    """Return a token's text for one end, with its rank on the far side if that is below ``top``."""
    rank = path.ranks[end]
    words = [f"‹{shorten(path.text, 10)}›", f"{rank:,.0f}" if rank > top else ""]
    return " ".join(word for word in (words if end else words[::-1]) if word)


def _name_ends(axes: Axes, paths: Sequence[TokenPath], end: int, run: int, top: int, gap: float) -> None:
    """Write the texts of all tokens beside their paths, moved apart where they would overlap."""
    from matplotlib.patches import ConnectionPatch
    from matplotlib.transforms import ScaledTranslation

    x, side, away = (0.0, "right", -1) if end == 0 else (1.0, "left", 1)
    aside, beside = (
        axes.transAxes + ScaledTranslation(points * away / 72, 0, axes.figure.dpi_scale_trans) for points in (11, 13)
    )
    scale = axes.yaxis.get_transform().transform
    low, high = scale(np.array(axes.get_ylim(), dtype=float))
    at = (scale(np.array([path.ranks[end] for path in paths], dtype=float)) - low) / (high - low)
    for path, point, place in zip(paths, at, spread_apart(at, gap, 0.0, 1.0), strict=True):
        axes.text(
            x, place, _words(path, end, top), transform=beside, ha=side, va="center", fontsize=_NAME_SIZE,
            family=_NAME_FONT, parse_math=False, color=INK if path.ranks[end] <= top else MUTED,
        )  # fmt: skip
        axes.add_artist(
            ConnectionPatch((x, point), (x, place), axes.transAxes, aside, color=MUTED, linewidth=0.4, clip_on=False)
        )


@dataclass(frozen=True)
class Distribution:
    """p̄ of one run at one time."""

    run: int
    name: str
    mean_prob: np.ndarray
    now: bool

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ranks, closer for the first ones, and V·p̄ of the tokens at these ranks."""
        size = len(self.mean_prob)
        ranks = np.unique(np.geomspace(1, size, 300).astype(int))
        return ranks, np.sort(self.mean_prob.astype(float))[::-1][ranks - 1] * size


@in_figure_style
def draw_preference(distributions: Sequence[Distribution]) -> Figure:
    """Draw p̄ in descending order as a multiple of the uniform level, both axes logarithmic; dashed at birth."""
    figure, axes = new_figure(360, 230)
    several = any(d.name for d in distributions)
    entries = {d.name: legend_line(color=run_colour(d.run)) for d in distributions if several}
    for d in distributions:
        ranks, p = d.points()
        look = {"color": run_colour(d.run), "linestyle": "-" if d.now else (0, (3, 1.5))}
        axes.plot(ranks, np.where(p > 0, p, np.nan), **look)
        entries.setdefault("now" if d.now else "at birth", legend_line(**look | ({"color": INK} if several else {})))
    axes.axhline(1, **REFERENCE, zorder=1)
    entries["uniform"] = legend_line(**REFERENCE)
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.3), max(high, 3))
    log_axis(axes.xaxis)
    axes.xaxis.set_major_formatter(count_formatter())
    log_axis(axes.yaxis)
    axes.set_xlabel("token, by rank in p̄")
    axes.set_ylabel("V · p̄")
    add_legend(figure, list(entries.items()))
    return figure
