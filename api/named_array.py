"""Arrays whose dimensions have names and coordinates."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..findings.formatting import format_value
from ..messages import one_line
from ..schema import quoted
from .display import Displayed

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from ..report.table import Table

#: Rows and columns that a notebook shows of an array.
_MOST_CELLS = 40


@dataclass(frozen=True, eq=False)
class NamedArray(Displayed):
    """An array whose dimensions have a name and a coordinate for each index:
    ``run.snapshots["sink_mass"].sel(layer=2)``.

    NumPy takes it as an array. For more than selecting and averaging there are `to_xarray` and `to_pandas`.
    """

    values: np.ndarray
    dims: tuple[str, ...] = ()
    """A name for each dimension of ``values``, such as ``("layer", "head")``."""
    coords: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Coordinates of the indices, by dimension. Layers count from 1, heads and positions from 0."""
    name: str = ""
    label: str = ""
    """Name on axes and in tables."""
    unit: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the dimensions."""
        return self.values.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = np.asarray(self.values, dtype)
        return values.copy() if copy else values

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # Without this np.mean calls the method mean with arguments of its own.
        return function(*_without_names(args), **_without_names(kwargs))

    def __len__(self) -> int:
        return len(self.values)

    def __float__(self) -> float:
        return float(self.values)

    def sel(self, **wanted: Any) -> NamedArray:
        """Select by coordinates: a single one removes its dimension, a list keeps it.

        Raises:
            UsageError: no such dimension or coordinate, or a slice.
        """
        return self.isel(**{dim: self._places(dim, value) for dim, value in wanted.items()})

    def isel(self, **places: Any) -> NamedArray:
        """Select by indices from 0: a number removes its dimension, a list or a slice keeps it."""
        for dim, place in places.items():
            self._check(dim)
            places[dim] = place if isinstance(place, slice) else self._indices(dim, place)
        values, dims, coords = self.values, self.dims, dict(self.coords)
        for dim, place in places.items():
            axis = dims.index(dim)
            if not isinstance(place, slice) and place.ndim == 0:
                values = values.take(int(place), axis)
                dims = dims[:axis] + dims[axis + 1 :]
                del coords[dim]
            else:
                chosen = np.arange(values.shape[axis])[place]
                values, coords[dim] = values.take(chosen, axis), coords[dim][chosen]
        return replace(self, values=values, dims=dims, coords=coords)

    def mean(self, dim: str | None = None) -> NamedArray:
        """Compute the mean over one dimension, by default over all."""
        return self._reduced(np.mean, dim)

    def max(self, dim: str | None = None) -> NamedArray:
        """Return the largest value along one dimension, by default of all."""
        return self._reduced(np.max, dim)

    def to_pandas(self) -> pd.Series[Any] | pd.DataFrame:
        """Convert to a series for one dimension, a frame for two; for more, a series with one level of its index for
        each. A single value is a series of one.
        """
        pd = optional_library("pandas")
        if self.values.ndim == 0:
            return pd.Series([self.values.item()], name=self.name)
        if self.values.ndim == 1:
            return pd.Series(self.values, self._index(pd, 0), name=self.name)
        if self.values.ndim == 2:
            return pd.DataFrame(self.values, self._index(pd, 0), self._index(pd, 1))
        index = pd.MultiIndex.from_product([self.coords[dim] for dim in self.dims], names=self.dims)
        return pd.Series(self.values.ravel(), index, name=self.name)

    def to_xarray(self) -> xr.DataArray:
        """Convert to a ``DataArray``, with label and unit as its attributes."""
        attrs = {key: value for key, value in (("long_name", self.label), ("units", self.unit)) if value}
        return optional_library("xarray").DataArray(self.values, dict(self.coords), self.dims, self.name or None, attrs)

    def _title(self) -> str:
        sizes = ", ".join(f"{dim}: {n}" for dim, n in zip(self.dims, self.shape, strict=True))
        return f"NamedArray {self.name} ({sizes}){f' in {self.unit}' if self.unit else ''}"

    def _sentences(self) -> list[str]:
        return [self.label] if self.label else []

    def _figures(self) -> list[tuple[str, str, str]]:
        held = self.values[np.isfinite(self.values)] if self.values.dtype.kind == "f" else self.values
        if not held.size or held.dtype.kind not in "fiu":
            return []
        found = {"mean": held.mean(), "least": held.min(), "largest": held.max()}
        return [(name, format_value(float(value), ".4g"), "") for name, value in found.items()]

    def _table(self) -> Table | None:
        from ..report.table import Column, Table

        if self.values.ndim not in (1, 2) or max(self.shape) > _MOST_CELLS or self.values.dtype.kind not in "fiu":
            return None
        rows, *columns = self.dims
        titles = [f"{columns[0]} {place}" for place in self.coords[columns[0]]] if columns else [self.name]
        numbers = self.values if columns else self.values[:, None]
        return Table(
            [Column(rows, "name"), *(Column(title, format=".4g") for title in titles)],
            [[at, *row] for at, row in zip(self.coords[rows], numbers.tolist(), strict=True)],
        )

    def __repr__(self) -> str:
        return f"<{self._title()}>\n{np.array2string(self.values, precision=4, threshold=20)}"

    def _check(self, dim: str) -> None:
        if dim not in self.dims:
            raise UsageError(f"{self.name or 'this array'} has no dimension {dim}; it has {', '.join(self.dims)}")

    def _places(self, dim: str, wanted: Any) -> Any:
        self._check(dim)
        if isinstance(wanted, slice):
            raise UsageError(f"{dim}: sel takes coordinates, not a slice; give a list of them, or isel a slice")
        known = {_key(value): place for place, value in enumerate(self.coords[dim].tolist())}
        given = _one_or_several(dim, wanted, "a coordinate", "fiuU")
        names = np.atleast_1d(given).tolist()
        for name in names:
            if _key(name) not in known:
                there = ", ".join(map(str, known)) if len(known) <= 12 else f"{min(known)} to {max(known)}"
                raise UsageError(f"{self.name or 'this array'} has no {dim} {name!r}; there are {there}")
        places = [known[_key(name)] for name in names]
        return places if given.ndim else places[0]

    def _indices(self, dim: str, wanted: Any) -> np.ndarray:
        """Return one index or several of a dimension as an array; a mask has an entry for each."""
        n = self.values.shape[self.dims.index(dim)]
        given = _one_or_several(dim, wanted, "an index", "iub")
        if given.dtype.kind == "b":
            if given.shape != (n,):
                raise UsageError(
                    f"{dim} {quoted(wanted)}: a mask has an entry for each of {n}; give indices, or a mask"
                )
            return given.nonzero()[0]
        if outside := [int(place) for place in np.atleast_1d(given) if not -n <= place < n]:
            raise UsageError(f"{dim} {outside[0]}: there are {n}; give indices from 0 to {n - 1}, or from -{n} to -1")
        return given

    def _reduced(self, how: Any, dim: str | None) -> NamedArray:
        if dim is None:
            return replace(self, values=how(self.values), dims=(), coords={})
        self._check(dim)
        dims = tuple(other for other in self.dims if other != dim)
        coords = {other: self.coords[other] for other in dims}
        return replace(self, values=how(self.values, axis=self.dims.index(dim)), dims=dims, coords=coords)

    def _index(self, pd: Any, axis: int) -> Any:
        return pd.Index(self.coords[self.dims[axis]], name=self.dims[axis])


def _without_names(given: Any) -> Any:
    """Replace named arrays in the arguments of a function of numpy by their values."""
    if isinstance(given, NamedArray):
        return given.values
    if isinstance(given, dict):
        return {name: _without_names(value) for name, value in given.items()}
    return type(given)(map(_without_names, given)) if type(given) in (list, tuple) else given


def _one_or_several(dim: str, wanted: Any, what: str, kinds: str) -> np.ndarray:
    """Return one selector or a list of them as an array; UsageError unless they have one of numpy's kinds."""
    try:
        given = np.asarray(wanted)
    except (TypeError, ValueError, RuntimeError):
        given = np.empty((), dtype=object)
    given = given if given.size else given.astype(int)
    if given.ndim > 1 or given.dtype.kind not in kinds:
        raise UsageError(f"{dim} {one_line(quoted(wanted))}: give {what}, or a list of them")
    return given


#: One NaN for all, which are unequal to one another: the dose of a model that was left unchanged.
_NAN = float("nan")


def _key(coordinate: Any) -> Any:
    """Return a coordinate as a key that NaN finds too."""
    return _NAN if isinstance(coordinate, float) and math.isnan(coordinate) else coordinate


def no_such(what: str, name: str, known: Iterable[str]) -> UsageError:
    """Make the error for an unknown name."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    hint = f"did you mean {close[0]}?" if close else "docs/quantities.md lists them"
    return UsageError(f"{name}: no such {what}; {hint}")


def optional_library(library: str) -> Any:
    """Import an optional library; UsageError with its install line if it is missing."""
    if importlib.util.find_spec(library) is None:
        raise UsageError(f"this needs {library}: pip install {library}")
    return importlib.import_module(library)
