"""The pictures of a report: one pure function each, arrays in, matplotlib figure out.

Figures are about 360 points wide, so that their text stays readable when a page shows them on a phone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .canvas import (
    DEPTH,
    INK,
    MUTED,
    PAPER,
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
    save_png,
    short,
    step_axis,
    to_svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Control", "Curve", "Distribution", "TokenPath", "contraction", "importance", "over_training",
    "preference_distribution", "rank_paths", "save_png", "sink_heatmap", "to_svg",
]  # fmt: skip

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


@dataclass(frozen=True)
class Control:
    """The grey level that a quantity is judged against: a line, or the band from −values to +values."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    band: bool = False


@picture
def over_training(
    curves: Sequence[Curve],
    *,
    ylabel: str,
    controls: Sequence[Control] = (),
    linear_until: float | None = None,
    from_zero: bool = False,
) -> Figure:
    """Curves over optimizer steps: colour is the run, line style the role, grey the control.

    ``linear_until`` makes the steps logarithmic behind that step; ``from_zero`` shows the zero of the quantity.
    """
    figure, axes = new(360, 200)
    several = any(curve.name for curve in curves)
    entries: dict[str, Any] = {}
    for curve in curves if several else ():
        entries[curve.name] = line(color=run_colour(curve.run), marker=_marker(curve))
    for curve in curves:
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
        low, high = axes.get_ylim() if any(np.any(curve.values) for curve in curves) else (0.0, 1.0)
        axes.set_ylim(min(low, -0.03 * high), high)
    axes.set_ylabel(ylabel)
    step_axis(axes, max((max(curve.steps) for curve in curves), default=0), linear_until)
    legend(figure, list(entries.items()))
    return figure


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
    """Ranks of birth's and of today's ``top`` favourites over training; even down to ``top``, logarithmic below."""
    figure, axes = new(360, 290)
    axes.set_yscale("symlog", linthresh=top, linscale=top / 4.5)
    lowest = max((np.nanmax(path.ranks) for path in paths), default=top)
    for path in sorted(paths, key=lambda path: path.favourite_at_birth):
        look = {"color": run_colour(run)} if path.favourite_at_birth else {"color": MUTED, "linewidth": 0.9}
        axes.plot(steps, path.ranks, marker="o", markersize=2, clip_on=False, **look)
        ends = [(0, "right", -6)] * path.favourite_at_birth + [(-1, "left", 6)] * path.favourite_now
        for end, side, offset in ends:
            axes.annotate(
                f"‹{short(path.text, 10)}›", (steps[end], path.ranks[end]), (offset, 0), ha=side, va="center",
                textcoords="offset points", family="DejaVu Sans Mono", fontsize=7.5, parse_math=False,
                color=INK, annotation_clip=False,
            )  # fmt: skip
    step_axis(axes, max(steps), linear_until)
    axes.set_xlim(min(steps), max(steps))
    axes.set_ylim(max(lowest, top + 1) * 1.15, 0.6)
    decades = 10.0 ** np.arange(np.floor(np.log10(top)) + 1, np.ceil(np.log10(max(lowest, top + 1))) + 1)
    # The tokens' names stand where the labels of the first ranks would.
    axes.set_yticks([top, *decades[decades <= lowest]], labels=["", *(count(d) for d in decades[decades <= lowest])])
    axes.yaxis.set_minor_locator(no_ticks())
    axes.set_title("rank in p̄")
    axes.axhspan(0.6, top + 0.5, color=MUTED, alpha=0.1, linewidth=0, zorder=0)
    colours = {"among birth's favourites": run_colour(run), "favourites now only": MUTED}
    legend(figure, [(label, line(color=colour)) for label, colour in colours.items()])
    return figure


@dataclass(frozen=True)
class Distribution:
    """p̄ of one run at one time."""

    run: int
    name: str
    mean_prob: np.ndarray
    now: bool


@picture
def preference_distribution(distributions: Sequence[Distribution]) -> Figure:
    """p̄ in descending order as a multiple of the uniform level, both axes logarithmic; dashed at birth."""
    figure, axes = new(360, 230)
    several = any(d.name for d in distributions)
    entries = {d.name: line(color=run_colour(d.run)) for d in distributions if several}
    for d in distributions:
        size = len(d.mean_prob)
        ranks = np.unique(np.geomspace(1, size, 300).astype(int))
        p = np.sort(d.mean_prob.astype(float))[::-1][ranks - 1] * size
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


# ── per layer ────────────────────────────────────────────────────────────────────────────────────────────────────────


@picture
def contraction(profiles: Sequence[tuple[bool, np.ndarray, np.ndarray]], *, run: int) -> Figure:
    """Contraction of the residual stream along depth, at birth (dashed, hollow) and now (solid).

    Args:
        profiles: (now?, after attention ``[L]``, after the MLP ``[L+1]``, where 0 is the embeddings) of a snapshot.
        run: Which run of the page.
    """
    figure, axes = new(360, 200)
    colour = run_colour(run)
    size = 2.4 if max(len(mlp) for _, _, mlp in profiles) > 16 else 3.8
    entries = []
    for now, attention, mlp in profiles:
        blocks = np.arange(len(mlp))
        x, y = np.concatenate([blocks, blocks[1:] - 0.5]), np.concatenate([mlp, attention])
        order = np.argsort(x)
        look: dict[str, Any] = {"color": colour, "linestyle": "-" if now else (0, (3, 1.5)), "linewidth": 1.1}
        axes.plot(x[order], y[order], **look)
        dots: dict[str, Any] = {"color": colour, "markerfacecolor": colour if now else PAPER, "markeredgewidth": 0.8}
        axes.plot(blocks[1:] - 0.5, attention, "^", markersize=size, zorder=3, **dots)
        axes.plot(blocks, mlp, "o", markersize=size, zorder=3, **dots)
        entries.append(("now" if now else "at birth", line(**look)))
    axes.set_ylim(min(axes.get_ylim()[0], -0.03), 1.03)  # one range for all runs that stand side by side
    axes.set_ylabel("mean cosine")
    axes.set_xlabel("block (0: embeddings)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    for label, marker in (("after attention", "^"), ("after MLP", "o")):
        entries.append((label, line(color=INK, linestyle="", marker=marker, markersize=3.8)))
    legend(figure, entries)
    return figure


@picture
def sink_heatmap(panels: Sequence[tuple[str, np.ndarray]]) -> Figure:
    """Sink mass by block and head, one panel per (title, ``[L, H]`` array), all on the fixed range 0 to 1."""
    n_layers, n_heads = (max(array.shape[i] for _, array in panels) for i in (0, 1))
    figure, grid = new(360, 62 + min(max(16 * n_layers, 150), 190), columns=len(panels), squeeze=False, sharey=True)
    for axes, (title, array) in zip(grid[0], panels, strict=True):
        rows, columns = array.shape
        extent = (-0.5, columns - 0.5, rows + 0.5, 0.5)
        axes.imshow(array, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="none", extent=extent)
        if n_heads * len(panels) <= 16 and n_layers <= 16:
            for (layer, head), value in np.ndenumerate(array):
                shade = "#ffffff" if value < 0.55 else "#000000"  # in the cell, so in no colour of the page
                axes.text(
                    head, layer + 1, f"{value:.2f}".lstrip("0"), color=shade, fontsize=7, ha="center", va="center"
                )
        axes.set_title(title)
        axes.set_xlabel("head")
        axes.grid(False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            axis.set_tick_params(length=0)
    grid[0][0].set_ylabel("block")
    _colour_bar(figure, grid[0], "sink mass")
    return figure


def _colour_bar(figure: Figure, panels: Sequence[Axes], label: str) -> None:
    """One image instead of matplotlib's 256 rectangles."""
    bar = figure.colorbar(panels[0].images[0], ax=list(panels), aspect=18, pad=0.03, label=label, ticks=[0, 0.5, 1])
    for part in (bar.outline, bar.solids):
        if part is not None:
            part.set_visible(False)
    ramp = np.linspace(0, 1, 128)[:, None]
    bar.ax.imshow(ramp, cmap="cividis", aspect="auto", extent=(0, 1, 0, 1), origin="lower", interpolation="none")
    bar.ax.grid(False)
    bar.ax.tick_params(length=0)


@picture
def importance(panels: Sequence[tuple[str, np.ndarray]]) -> Figure:
    """Importance over key position, mean over heads, one curve per block, panels per (title, ``[L, H, T]`` array)."""
    from matplotlib.colors import LinearSegmentedColormap

    figure, grid = new(360, 200, columns=len(panels), squeeze=False, sharey=True)
    depth = LinearSegmentedColormap.from_list("depth", list(DEPTH))
    n_layers = max(array.shape[0] for _, array in panels)
    colours = [depth(i / max(n_layers - 1, 1)) for i in range(n_layers)]
    for axes, (title, array) in zip(grid[0], panels, strict=True):
        length = array.shape[2]
        keys = np.arange(length)
        # A row of uniform attention gives 1/(t+1) to each key; the mean runs over the queries t ≥ j.
        uniform = np.cumsum(1 / (keys[::-1] + 1.0))[::-1] / (length - keys)
        for layer, values in enumerate(array.mean(axis=1)):
            shown = _extremes(values)
            axes.plot(shown, np.where(values > 0, values, np.nan)[shown], color=colours[layer], linewidth=1.1)
        axes.plot(keys, uniform, **REFERENCE)
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel("key position")
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    low, high = grid[0][0].get_ylim()
    grid[0][0].set_ylim(10 ** np.floor(np.log10(low)), max(high, 1.0))
    log_axis(grid[0][0].yaxis)
    grid[0][0].set_ylabel("importance")
    named = sorted({round(i * (n_layers - 1) / 3) for i in range(4)})
    entries = [(f"block {i + 1}", line(color=colours[i])) for i in named]
    legend(figure, [*entries, ("uniform", line(**REFERENCE))])
    return figure


def _extremes(values: np.ndarray, limit: int = 256) -> np.ndarray:
    """Indices of the least and the greatest of each group of neighbours: fewer points, and no peak is lost."""
    if len(values) <= limit:
        return np.arange(len(values))
    groups = np.array_split(np.arange(len(values)), limit // 2)
    return np.unique([group[pick(values[group])] for group in groups for pick in (np.argmin, np.argmax)])
