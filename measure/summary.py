"""From the metrics of one pass to the scalars, arrays and tables of a snapshot, checked against their declarations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import RunError
from ..metrics.quantities import MEASURED, METRICS
from ..metrics.quantity import Quantity, Sizes
from .hf import HFModel
from .observed_metrics import Arrays, Observed, Scalars, SelfObserving, Setting, blanked


@dataclass(frozen=True)
class Measurement:
    """All results of one pass. Names, shapes and units: docs/quantities.md."""

    scalars: dict[str, float]
    arrays: dict[str, np.ndarray]
    declared: tuple[Quantity, ...] = ()
    """Quantities of the user's own metrics."""
    unseen: tuple[str, ...] = ()
    """Places that the model did not show, in words."""


def summarise(metrics: Sequence[Observed], setting: Setting) -> Measurement:
    """Collect the scalars and arrays of one pass, in the order of their declarations.

    Blocks that do not show an array's quantity have NaN in it. A metric that no block shows anything gives no result.

    Raises:
        RunError: a metric gives what it does not declare, or not what it declares.
    """
    scalars: Scalars = {}
    arrays: Arrays = {}
    unseen = [str(place) for place in setting.unseen]
    shown = [metric for metric in metrics if setting.shows(metric)]
    results = {metric: metric.result() for metric in sorted(shown, key=lambda metric: metric.is_solving)}
    for metric in metrics:
        if metric not in results:
            if isinstance(metric, SelfObserving) and metric.name not in METRICS:
                unseen.append(f"{metric.name} (it reads what no block shows)")
            continue
        missing, (metric_scalars, metric_arrays) = setting.missing(metric), results[metric]
        _check(metric, metric_scalars, metric_arrays, setting.sizes)
        by_name = {quantity.name: quantity for quantity in metric.quantities}
        metric_arrays = {name: blanked(array, by_name[name], missing) for name, array in metric_arrays.items()}
        if missing or (unseen and isinstance(setting.model, HFModel)):
            # A scalar that rests on no block is dropped. In a model of transformers that can happen for places that are
            # not shown separately.
            metric_scalars = {name: value for name, value in metric_scalars.items() if not np.isnan(value)}
        declared = [quantity.name for quantity in metric.quantities]
        scalars |= {name: metric_scalars[name] for name in declared if name in metric_scalars}
        arrays |= metric_arrays
    of_users = tuple(q for metric in metrics for q in metric.quantities if q.name not in MEASURED)
    return Measurement({name: float(value) for name, value in scalars.items()}, arrays, of_users, tuple(unseen))


def _check(metric: Observed, scalars: Scalars, arrays: Arrays, sizes: Sizes) -> None:
    """Raise RunError that names the metric, unless its results match its declarations."""
    declared = {quantity.name: quantity for quantity in metric.quantities}
    if undeclared := [name for name in (*arrays, *scalars) if name not in declared]:
        raise RunError(f"{metric.name}: gives {undeclared[0]!r}, which it does not declare")
    for name, quantity in declared.items():
        given = (not quantity.has_array or name in arrays) and (not quantity.has_scalar or name in scalars)
        if not given and not quantity.when:
            raise RunError(f"{metric.name}: does not give {name!r}, which it declares")
    for name, array in arrays.items():
        wanted = [sizes.of(axis) for axis in declared[name].axes]
        fits = len(wanted) == array.ndim and all(n is None or n == m for n, m in zip(wanted, array.shape, strict=True))
        if not fits:
            shape = ", ".join("any" if n is None else str(n) for n in wanted)
            raise RunError(
                f"{metric.name}: {name} has the shape {list(array.shape)}; its axes {', '.join(declared[name].axes)} "
                f"have [{shape}]"
            )


# ---------------------------------------------------------------- secondary sinks of a measurement as a table
# Positions and tokens (definitions §13).

#: Entries of the table for each probe.
N_LISTED = 10
_COLUMNS = ("importance", "position", "token", "heads")


def secondary_sinks(
    probe: str,
    arrays: Mapping[str, np.ndarray],
    epsilon: float,
    token_texts: Callable[[Sequence[int]], list[str]] | None,
) -> list[dict[str, Any]]:
    """List the secondary sinks of all blocks, one entry for each position and token, largest importance first.

    Args:
        probe: name of the probe.
        arrays: arrays of the measurement on it.
        epsilon: importance above which a key is a sink.
        token_texts: function from token ids to texts; None without a tokenizer: a token then reads ``[id]``.

    Returns:
        Entries with ``probe``, ``position``, ``id``, ``text``, ``blocks`` and ``heads`` (number with a sink there),
        and the largest ``importance``.
    """
    if "secondary_sink_importance" not in arrays:  # of a model whose attention is not seen
        return []
    columns = [arrays[f"secondary_sink_{name}"].ravel().tolist() for name in _COLUMNS]
    merged: dict[tuple[int, int], dict[str, Any]] = {}
    for importance, position, token, heads in zip(*columns, strict=True):
        if importance > epsilon:
            # The arrays are floating if some blocks have no attention.
            place = int(position), int(token)
            entry = merged.setdefault(place, {"blocks": 0, "heads": 0, "importance": 0.0})
            entry["blocks"] += 1
            entry["heads"] += int(heads)
            entry["importance"] = max(entry["importance"], importance)
    order = sorted(merged, key=lambda place: (-merged[place]["importance"], *place))[:N_LISTED]
    known = token_texts is not None and all(token >= 0 for _, token in order)
    tokens = [token for _, token in order]
    texts = token_texts(tokens) if known and token_texts is not None else [f"[{token}]" for token in tokens]
    return [
        {"probe": probe, "position": position, "id": token, "text": text, **merged[position, token]}
        for (position, token), text in zip(order, texts, strict=True)
    ]
