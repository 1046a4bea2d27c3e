"""From the metrics of one pass to the scalars and arrays of a snapshot, checked against their declarations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import RunError
from ..metrics.quantities import MEASURED
from ..metrics.quantity import Quantity, Sizes
from .observed import Arrays, Observed, Scalars


@dataclass(frozen=True)
class Measurement:
    """All that one pass gives. Names, shapes and units: docs/run-directory.md."""

    scalars: dict[str, float]
    arrays: dict[str, np.ndarray]
    declared: tuple[Quantity, ...] = ()
    """Quantities of the user's own metrics."""


def summarise(metrics: Sequence[Observed], sizes: Sizes) -> Measurement:
    """Scalars and arrays of one pass, in the order of their declarations.

    Raises:
        RunError: a metric gives what it does not declare, or not what it declares.
    """
    scalars: Scalars = {}
    arrays: Arrays = {}
    for metric in metrics:
        own_scalars, own_arrays = metric.result()
        _check(metric, own_scalars, own_arrays, sizes)
        declared = [quantity.name for quantity in metric.quantities]
        scalars |= {name: own_scalars[name] for name in declared if name in own_scalars}
        arrays |= own_arrays
    theirs = tuple(q for metric in metrics for q in metric.quantities if q.name not in MEASURED)
    return Measurement({name: float(value) for name, value in scalars.items()}, arrays, theirs)


def _check(metric: Observed, scalars: Scalars, arrays: Arrays, sizes: Sizes) -> None:
    """RunError that names the metric, unless it gives what it declares."""
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
