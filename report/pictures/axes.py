"""Shared axes of pictures: optimizer steps, positions, blocks, logarithmic ones, and the numbers at their ticks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...findings.formatting import format_value, power_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import EngFormatter


OF_ZEROS = (0.0, 4.0)
"""Ends of an axis on which everything is 0: its ticks are whole numbers, not fractions of nothing."""

#: The largest number that an axis shows, and the smallest on a logarithmic one: beyond, differences and ratios of
#: floats overflow.
_LARGEST, _SMALLEST = 1e150, 1e-150


def on_axis(values: Sequence[float] | np.ndarray | float, log: bool = False) -> np.ndarray:
    """Return the numbers that an axis can show, float64; NaN for those not finite, too large or without a logarithm."""
    numbers = np.asarray(values, dtype=float)
    lowest = _SMALLEST if log else -_LARGEST
    return np.where((numbers >= lowest) & (numbers <= _LARGEST), numbers, np.nan)


# ── numbers at ticks ─────────────────────────────────────────────────────────────────────────────────────────────────


def count_formatter() -> EngFormatter:
    """Make a formatter for ticks of a count: 0, 10, 1k, 1.5k, 10M."""
    from matplotlib.ticker import EngFormatter

    formatter = EngFormatter(sep="")
    # Numbers below 1 are written out: a fraction of a step is not a milli-step.
    formatter.ENG_PREFIXES = {
        exponent: prefix for exponent, prefix in EngFormatter.ENG_PREFIXES.items() if exponent >= 0
    }
    return formatter


def power_of_ten(value: float, _: object = None) -> str:
    """Write a tick of a logarithmic axis.

    matplotlib's formatters write powers as mathematics, in a font that a page lacks.
    """
    exponent = round(np.log10(value)) if value > 0 else 0
    if not np.isclose(value, 10.0**exponent, rtol=1e-6):
        return ""
    return format_value(value, "g") if -3 <= exponent <= 3 else power_text(exponent)


def fix_ticks(axis: Any, ticks: Sequence[float], labels: Sequence[str] | None = None) -> None:
    """Put ticks only at these places; their texts are ``labels``, or those of the axis' formatter.

    Unlike ``set_ticks`` it creates no ticks yet, and keeps the limits.
    """
    from matplotlib.ticker import FixedFormatter, FixedLocator

    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(no_ticks())
    if labels is not None:
        axis.set_major_formatter(FixedFormatter(list(labels)))


def no_ticks() -> Any:
    """Make a tick locator that finds none."""
    from matplotlib.ticker import NullLocator

    return NullLocator()


def log_axis(axis: Any) -> None:
    """Label only the decades of a logarithmic axis."""
    axis.set_major_formatter(power_of_ten)
    axis.set_minor_locator(no_ticks())


def whole_ticks(axis: Any) -> None:
    """Put ticks at whole numbers only."""
    axis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def turned_names(axes: Axes, names: Sequence[str], angle: float) -> None:
    """Put names below a map's columns, which rise to them at ``angle`` degrees."""
    axes.set_xticks(
        range(len(names)), labels=names, rotation=angle, ha="right", rotation_mode="anchor", parse_math=False
    )


def log_ticks(axis: Any, low: float, high: float) -> None:
    """Put at least three ticks between ``low`` and ``high`` on a logarithmic axis, all of them labelled."""
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    every = max(1, (len(decades) + 3) // 6)
    wanted = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))
    for parts in wanted:
        ticks = [part * 10.0**d for d in decades if d % every == 0 for part in parts]
        ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(ticks) >= 3:
            break
    fix_ticks(axis, ticks, [power_of_ten(tick) or format_value(tick, "g") for tick in ticks])


def log_heights(axes: Axes, values: Sequence[np.ndarray], least: float | None = None) -> None:
    """Set a logarithmic y axis around all positive ``values``, down to ``least`` if they do not go lower."""
    every = np.concatenate([np.ravel(v) for v in values])
    every = every[np.isfinite(every) & (every > 0)]
    low, high = (float(every.min()), float(every.max())) if len(every) else (1.0, 10.0)
    low = min(low, high / 3, high if least is None else least)
    margin = (high / low) ** 0.06
    # In this order: a scale on its own looks for positive values, and warns where there are none.
    axes.set_ylim(low / margin, high * margin)
    axes.set_yscale("log")
    log_ticks(axes.yaxis, low / margin, high * margin)


# ---------------------------------------------------------------- colour bar beside a map


def add_colour_bar(
    panels: Sequence[Axes],
    colours: Any,
    ticks: Sequence[float],
    *,
    limits: tuple[float, float] = (0, 1),
    labels: Sequence[str] | None = None,
    label: str = "",
    share: float = 1.0,
) -> None:
    """Add the bar to the right of maps.

    Args:
        panels: axes of a figure of `new_figure`; the bar goes to their right.
        colours: a colour map, or its name.
        ticks: numbers that the bar shows.
        limits: numbers of the first and the last colour.
        labels: the ticks' texts; by default their numbers.
        label: name of the numbers.
        share: share of the panels' height.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    bar = panels[0].figure.colorbar(ScalarMappable(Normalize(*limits), colours), ax=list(panels), shrink=share)
    bar.set_ticks(list(ticks), labels=labels or [format_value(tick, ".3g") for tick in ticks])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    bar.set_label(label)
