"""A study of seeds: its file (docs/studies.md), its runs, and the share of each seed in the variance of a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from ...errors import UsageError
from ...files import finite_or_nan
from ...findings.run_history import join_rows
from ...measure.metrics_log import metrics_by_step
from ...study.study_file import Reader, ScaledStudy, read_scaled_study, where
from ...study.trials import Trial, make_trial
from ...trainer.config_file import read_config

_FIELDS = ("base", "init_seeds", "data_seeds")


@dataclass(frozen=True, kw_only=True)
class SeedsStudy(ScaledStudy):
    """A study file of the kind ``seeds``, checked and with its paths resolved."""

    data_seeds: tuple[int, ...]
    """Data seeds with each of which every birth is trained."""


def read_seeds_study(file: Path) -> SeedsStudy:
    """Read and check a study file of the kind ``seeds``; UsageError names the file and the field."""
    return read_scaled_study(file, _FIELDS, _at_one_scale)


def _at_one_scale(reader: Reader, name: str, content: Mapping[str, Any], prefixes: Mapping[str, str]) -> SeedsStudy:
    """Return the study at one scale; ``prefixes`` give the places of fields that are not at the top of the file."""

    if "base" not in content:
        raise UsageError(f"{reader.file}: base is missing")
    return SeedsStudy(
        file=reader.file,
        name=name,
        base=reader.path(content["base"], where(prefixes, "base")),
        init_seeds=_seeds(reader, content.get("init_seeds", 3), where(prefixes, "init_seeds")),
        data_seeds=_seeds(reader, content.get("data_seeds", 3), where(prefixes, "data_seeds")),
    )


def _seeds(reader: Reader, value: Any, field: str) -> tuple[int, ...]:
    """Read a number of seeds, from 0 on, or the seeds themselves; at least two."""
    seeds = tuple(range(value)) if type(value) is int and value > 0 else reader.seeds(value, field)
    if len(seeds) < 2:
        raise reader.wrong(field, value, "give at least 2: one seed has no variance")
    return seeds


# ---------------------------------------------------------------- runs of a study of seeds


def data_arm(data_seed: int) -> str:
    """Name the folder, and the column of a table, of the runs of one order of the data."""
    return f"data-{data_seed}"


def seeds_trials(study: SeedsStudy, out: Path, overrides: Mapping[str, Any] | None = None) -> list[Trial]:
    """List every run of ``study`` in the folder ``out``: birth by birth, each with every order of the data.

    Args:
        study: the study.
        out: the study's folder.
        overrides: dotted fields that replace those of the base.

    Raises:
        UsageError: the base is impossible, or a field that the study sets is overridden.
    """
    if "data.data_seed" in (overrides or {}):
        raise UsageError("--set data.data_seed: the study sets it for every run, leave it out")
    configs = {
        seed: read_config(study.base, {**(overrides or {}), "data.data_seed": seed}) for seed in study.data_seeds
    }
    return [
        make_trial(study.name, data_arm(data), init, configs[data], out / data_arm(data))
        for init in study.init_seeds
        for data in study.data_seeds
    ]


# ---------------------------------------------------------------- shares of a variance that two crossed seeds make
# Two random factors, one run for each pair.
#
# `y[i, j] = μ + a[i] + b[j] + e[i, j]`, all three random and independent; `e` is the remainder, the interaction of
# the two seeds and everything else that differs between two runs. The components are estimated by the moments of the
# analysis of variance (Searle, Casella and McCulloch, Variance Components, 1992, ch. 4). Their shares have
# generalised confidence intervals (Weerahandi, J. Am. Stat. Assoc. 88, 1993), which Burdick, Borror and Montgomery
# (Design and Analysis of Gauge R&R Studies, 2005) recommend for this very design; no exact interval of a share of the
# total is known.

#: Draws of an interval; their own error is well below that of an interval from a few seeds.
_DRAWS = 20_000


class Share(NamedTuple):
    """A share of the total variance, from 0 to 1."""

    value: float
    low: float
    high: float


class Shares(NamedTuple):
    """Shares of the sources of a variance."""

    init: Share
    data: Share
    rest: Share
    """Share of the interaction, and of everything that neither seed decides."""
    p_init: float
    """Chance of an F as large without any effect of the birth; exact for normal effects."""
    p_data: float


class Squares(NamedTuple):
    """Mean squares of the two-way analysis of variance, with their degrees of freedom."""

    init: float
    data: float
    rest: float
    n: int
    """Births."""
    m: int
    """Orders of the data."""

    @property
    def freedom(self) -> tuple[int, int, int]:
        """Degrees of freedom of the births, the orders and the rest."""
        return self.n - 1, self.m - 1, (self.n - 1) * (self.m - 1)


def mean_squares(values_NM: np.ndarray) -> Squares:
    """Compute mean squares of ``[births, orders]``, at least two of each, all finite; those of rounding alone are 0.

    Raises:
        ValueError: there are fewer, or one is not finite.
    """
    n, m = values_NM.shape
    if n < 2 or m < 2 or not np.isfinite(values_NM).all():
        raise ValueError(f"{n} × {m} values: needs two of each at least, all finite")
    # A common offset would cost digits.
    centred = values_NM - values_NM.mean()
    by_init, by_data = centred.mean(1), centred.mean(0)
    rest = centred - by_init[:, None] - by_data[None, :]
    rounding = (1e-12 * float(np.abs(values_NM).max())) ** 2

    def per_freedom(squares: float, freedom: int) -> float:
        return squares / freedom if squares / freedom > rounding else 0.0

    return Squares(
        init=per_freedom(float(m * (by_init**2).sum()), n - 1),
        data=per_freedom(float(n * (by_data**2).sum()), m - 1),
        rest=per_freedom(float((rest**2).sum()), (n - 1) * (m - 1)),
        n=n,
        m=m,
    )


def variance_shares(values_NM: np.ndarray, confidence: float = 0.95, draws: int = _DRAWS) -> Shares | None:
    """Estimate the shares of ``[births, orders]``; None if all values are the same.

    A component below 0 counts 0. The draws of the intervals are the same at every call.

    Args:
        values_NM: one figure of every run.
        confidence: confidence of each interval, two-sided.
        draws: number of draws of the pivotal quantities.

    Raises:
        ValueError: see :func:`mean_squares`.
    """
    found = mean_squares(values_NM)
    components = _components(np.array(found.init), np.array(found.data), np.array(found.rest), found)
    total = float(components.sum())
    if total == 0:
        return None
    rng = np.random.Generator(np.random.Philox(key=0))
    squares = (found.init, found.data, found.rest)
    init, data, rest = (ms * df / rng.chisquare(df, draws) for ms, df in zip(squares, found.freedom, strict=True))
    pivots = _components(init, data, rest, found)
    sums = pivots.sum(0)
    tail = (1 - confidence) / 2
    low, high = np.quantile(pivots / np.where(sums > 0, sums, 1.0), [tail, 1 - tail], axis=1)
    of_init, of_data, of_rest = (
        Share(float(component) / total, float(a), float(b))
        for component, a, b in zip(components, low, high, strict=True)
    )
    return Shares(of_init, of_data, of_rest, _p(found.init, found, 0), _p(found.data, found, 1))


def _components(init: np.ndarray, data: np.ndarray, rest: np.ndarray, of: Squares) -> np.ndarray:
    """Compute the variances ``[3, …]`` that have these mean squares as their expectations, none below 0."""
    return np.stack([np.maximum((init - rest) / of.m, 0.0), np.maximum((data - rest) / of.n, 0.0), rest])


def _p(square: float, found: Squares, factor: int) -> float:
    """Return p of the F test of a factor."""
    if found.rest == 0:
        return 0.0 if square > 0 else 1.0
    return float(stats.f.sf(square / found.rest, found.freedom[factor], found.freedom[2]))


# ---------------------------------------------------------------- results of a study of seeds
# A figure of every run, and the sources of its variance.

FIGURES = {
    "val_loss": ("final loss", ("val_loss",)),
    "trigger_loss": ("trigger loss", ("val_loss_trigger",)),
    "sink_mass": ("sink mass", ("text_sink_mass", "sink_mass")),
    "alignment": ("alignment", ("alignment",)),
    "overlap_10": ("top-10 overlap", ("overlap_10",)),
    "rank_persistence": ("preference ρ", ("rank_persistence",)),
}
"""Figure → its words, and the scalars of a row (findings/run_history.py) at the end of a run, of which the first
that is there counts."""


@dataclass(frozen=True)
class SeedsResult:
    """A figure of all runs."""

    name: str
    """Name in `FIGURES`."""
    values_NM: np.ndarray
    """``[births, orders]``; NaN where a run is not finished or does not have it."""
    shares: Shares | None
    """None where a run is missing, or all are the same."""

    @property
    def words(self) -> str:
        """Name of the figure in words."""
        return FIGURES[self.name][0]

    @property
    def n_runs(self) -> int:
        """Runs that have it."""
        return int(np.isfinite(self.values_NM).sum())


def read_seeds_results(study: SeedsStudy, trials: Sequence[Trial]) -> list[SeedsResult]:
    """Read every figure that a finished run has, in the order of `FIGURES`.

    Raises:
        RunError: a file of a run is damaged; the message names it.
    """
    ends = {(t.seed, t.arm): _end(t) for t in trials if t.finished}
    results = []
    for name, (_, keys) in FIGURES.items():
        values = np.array(
            [
                [_first(ends.get((init, data_arm(data)), {}), keys) for data in study.data_seeds]
                for init in study.init_seeds
            ]
        )
        if np.isfinite(values).any():
            whole = np.isfinite(values).all()
            results.append(SeedsResult(name, values, variance_shares(values) if whole else None))
    return results


def _end(trial: Trial) -> dict[str, object]:
    rows = join_rows(trial.run.snapshots(), metrics_by_step(trial.run))
    return rows[-1] if rows else {}


def _first(row: dict[str, object], keys: Sequence[str]) -> float:
    return next((value for key in keys if np.isfinite(value := finite_or_nan(row.get(key)))), float("nan"))
