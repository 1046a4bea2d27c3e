"""Pictures over training and of token preference: one pure function each, arrays in, matplotlib figure out.

Figures are about 360 points wide, so that their text stays readable when a page shows them on a phone. Those of layers
and heads: `layer_pictures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .labels import stack
from .panels import whole
from .style import (
    INK,
    MUTED,
    REFERENCE,
    count,
    legend,
    line,
    log_axis,
    new,
    no_ticks,
    picture,
    run_colour,
    run_marker,
    short,
    step_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# ── over training ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Curve:
    """One quantity of one run over training."""

    run: int
    """Which run of the page: decides the colour."""
    name: str
    """Name of the run for the legend; empty where there is no other."""
    steps: Sequence[float]
    values: Sequence[float]
    role: str = ""
    """What the curve is, where a picture holds several per run; one role has one ``style``."""
    style: Mapping[str, Any] = field(default_factory=dict)
    """Line properties beside the colour."""
    markers: bool = True
    quantity: str = ""
    """What its numbers are called."""


@dataclass(frozen=True)
class Control:
    """The grey level that a quantity is judged against: a line, or the band from −values to +values."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    band: bool = False
    quantity: str = ""
    """What its numbers are called."""
    run: int | None = None
    """Which run's they are; None if they are common to all."""


@picture
def curves(
    shown: Sequence[Curve],
    *,
    ylabel: str,
    x_axis: Callable[[Axes], None],
    controls: Sequence[Control] = (),
    from_zero: bool = False,
) -> Figure:
    """Curves over steps, or over blocks: colour is the run, line style the role, grey the control.

    Args:
        shown: the curves.
        ylabel: what they are.
        x_axis: sets scale, ticks and label of x.
        controls: what they are judged against.
        from_zero: show the zero of the quantity.
    """
    figure, axes = new(360, 200)
    several = any(curve.name for curve in shown)
    entries: dict[str, Any] = {}
    for curve in shown if several else ():
        entries[curve.name] = line(color=run_colour(curve.run), marker=_marker(curve))
    for curve in shown:
        values = np.asarray(curve.values, dtype=float)
        look = {"color": run_colour(curve.run), **curve.style}
        every = 1 if curve.markers else max(1, len(values) // 8)
        axes.plot(
            curve.steps,
            np.where(np.isfinite(values), values, np.nan),
            marker=_marker(curve),
            markevery=every,
            zorder=3,
            **look,
        )
        if curve.role:
            entries.setdefault(curve.role, line(**look | ({"color": INK} if several else {})))
    for control in controls:
        values = np.asarray(control.values, dtype=float)
        if control.band:
            # Bands of several runs lie on one another: together they should not grow black.
            band = {"color": MUTED, "alpha": 0.25 / len(controls) ** 0.5, "linewidth": 0}
            entries[control.label] = axes.fill_between(control.steps, -values, values, zorder=1, **band)
            axes.axhline(0, color=MUTED, linewidth=0.6, zorder=2)
        else:
            axes.plot(control.steps, values, zorder=1, **REFERENCE)
            entries[control.label] = line(**REFERENCE)
    if from_zero:
        low, high = axes.get_ylim() if any(np.any(curve.values) for curve in shown) else (0.0, 1.0)
        axes.set_ylim(min(low, -0.03 * high), high)
    axes.set_ylabel(ylabel)
    if all(float(value).is_integer() for curve in shown for value in curve.values):
        whole(axes.yaxis)
    x_axis(axes)
    legend(figure, list(entries.items()))
    return figure


def over_training(
    shown: Sequence[Curve],
    *,
    ylabel: str,
    controls: Sequence[Control] = (),
    linear_until: float | None = None,
    from_zero: bool = False,
) -> Figure:
    """`curves` over optimizer steps, which are logarithmic behind ``linear_until``."""
    last = max((max(curve.steps) for curve in shown), default=0)
    return curves(
        shown,
        ylabel=ylabel,
        x_axis=lambda axes: step_axis(axes, last, linear_until),
        controls=controls,
        from_zero=from_zero,
    )


def _marker(curve: Curve) -> str:
    """Dense curves need no markers, unless only the marker tells two runs of one colour apart."""
    marker = run_marker(curve.run)
    return marker if curve.markers or marker != run_marker(0) else ""


# ── token preference ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TokenPath:
    """Where the rank of one token went."""

    text: str
    ranks: Sequence[float]
    """Rank in p̄ at every step, from 1."""
    favourite_at_birth: bool
    favourite_now: bool


@picture
def rank_paths(
    steps: Sequence[float], paths: Sequence[TokenPath], *, run: int, top: int, linear_until: float | None = None
) -> Figure:
    """Ranks of birth's and of today's ``top`` favourites over training; even down to ``top``, logarithmic below.

    Every token's text stands at both ends, with its rank where that is below ``top``.
    """
    height = 340
    figure, axes = new(360, height)
    axes.set_yscale("symlog", linthresh=top, linscale=top / 4.5)
    lowest = max((np.nanmax(path.ranks) for path in paths), default=top)
    for path in sorted(paths, key=lambda path: path.favourite_at_birth):
        axes.plot(steps, path.ranks, marker="o", markersize=2, clip_on=False, **_path_look(path, run))
    step_axis(axes, max(steps), linear_until)
    axes.set_xlim(min(steps), max(steps))
    axes.set_ylim(max(lowest, top + 1) * 1.15, 0.6)
    for end in (0, -1):
        _name_ends(axes, paths, end, run, top, gap=9.2 / (height - 65))
    decades = 10.0 ** np.arange(np.floor(np.log10(top)) + 1, np.ceil(np.log10(max(lowest, top + 1))) + 1)
    # The tokens' names stand where ticks would.
    axes.set_yticks([top, *decades[decades <= lowest]], labels=[])
    axes.yaxis.set_tick_params(length=0)
    axes.yaxis.set_minor_locator(no_ticks())
    axes.set_title("rank in p̄")
    axes.axhspan(0.6, top + 0.5, color=MUTED, alpha=0.1, linewidth=0, zorder=0)
    colours = {"among birth's favourites": run_colour(run), "favourites now only": MUTED}
    legend(figure, [(label, line(color=colour)) for label, colour in colours.items()])
    return figure


def _path_look(path: TokenPath, run: int) -> dict[str, Any]:
    return {"color": run_colour(run)} if path.favourite_at_birth else {"color": MUTED, "linewidth": 0.9}


def _name_ends(axes: Axes, paths: Sequence[TokenPath], end: int, run: int, top: int, gap: float) -> None:
    """Texts of all tokens beside their paths, moved apart where they would lie on one another."""
    from matplotlib.patches import ConnectionPatch
    from matplotlib.transforms import ScaledTranslation

    x, side, away = (0.0, "right", -1) if end == 0 else (1.0, "left", 1)
    aside = axes.transAxes + ScaledTranslation(11 * away / 72, 0, axes.figure.dpi_scale_trans)
    scale = axes.yaxis.get_transform().transform
    low, high = scale(np.array(axes.get_ylim(), dtype=float))
    at = (scale(np.array([path.ranks[end] for path in paths], dtype=float)) - low) / (high - low)
    for path, point, place in zip(paths, at, stack(at, gap, 0.0, 1.0), strict=True):
        rank = path.ranks[end]
        words = [f"‹{short(path.text, 10)}›", f"{rank:,.0f}" if rank > top else ""]
        text = " ".join(word for word in words[::away] if word)
        axes.annotate(
            text, (x, place), (13 * away, 0), xycoords="axes fraction", ha=side, va="center", fontsize=7.5,
            textcoords="offset points", family="DejaVu Sans Mono", parse_math=False, annotation_clip=False,
            color=INK if rank <= top else MUTED,
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
        """Ranks, closer for the first ones, and V·p̄ of the tokens that have them."""
        size = len(self.mean_prob)
        ranks = np.unique(np.geomspace(1, size, 300).astype(int))
        return ranks, np.sort(self.mean_prob.astype(float))[::-1][ranks - 1] * size


@picture
def preference_distribution(distributions: Sequence[Distribution]) -> Figure:
    """p̄ in descending order as a multiple of the uniform level, both axes logarithmic; dashed at birth."""
    figure, axes = new(360, 230)
    several = any(d.name for d in distributions)
    entries = {d.name: line(color=run_colour(d.run)) for d in distributions if several}
    for d in distributions:
        ranks, p = d.points()
        look = {"color": run_colour(d.run), "linestyle": "-" if d.now else (0, (3, 1.5))}
        axes.plot(ranks, np.where(p > 0, p, np.nan), **look)
        entries.setdefault("now" if d.now else "at birth", line(**look | ({"color": INK} if several else {})))
    axes.axhline(1, **REFERENCE, zorder=1)
    entries["uniform"] = line(**REFERENCE)
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.3), max(high, 3))
    log_axis(axes.xaxis)
    axes.xaxis.set_major_formatter(count)
    log_axis(axes.yaxis)
    axes.set_xlabel("token, by rank in p̄")
    axes.set_ylabel("V · p̄")
    legend(figure, list(entries.items()))
    return figure
