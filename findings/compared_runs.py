"""Several runs beside each other: which are seeds of one config, where configs differ, and what that makes of it.

Runs of one config that differ in their seed alone are a group. Groups are compared over pairs: runs of the same seed,
whose births share every parameter that both configs have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy import stats

from ..files import finite_or_nan
from ..metrics.quantities import LOGGED, MEASURED
from ..metrics.quantity import Quantity
from ..yaml_files import parse_yaml
from .history import RunHistory

_NO_CONFIG = ("name", "run_dir")
"""Fields that say where a run is kept, not what it is."""
_LEVEL = 0.95
_MOST_PAIRS = 6
"""Comparisons that a page shows."""
_COMPARED = ("val/loss", "val/loss_trigger")
_COMPARED_SCALARS = ("sink_mass", "alignment", "rank_persistence", "preference_ratio", "variance_discrepancy")


def flat_config(run: RunHistory) -> dict[str, Any]:
    """The fields of a run's config by their dotted names; empty for a training that is not ours."""
    return _flat(parse_yaml(run.config, str(run.folder.config))) if run.config else {}


def _flat(value: Any, before: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {before: value}
    found: dict[str, Any] = {}
    for key, entry in value.items():
        found |= _flat(entry, f"{before}.{key}" if before else str(key))
    return found


@dataclass(frozen=True)
class Comparison:
    """What the configs of several runs have in common."""

    groups: Sequence[str]
    """Per run the name of its group."""
    fields: Sequence[str]
    """Fields in which runs differ, the seed first."""
    values: Sequence[Sequence[str]]
    """``[runs][fields]``; "" where a config has no such field, or null."""

    @property
    def several_seeds(self) -> set[str]:
        """Groups of more than one run."""
        return {group for group, count in Counter(self.groups).items() if count > 1}


def compare_configs(runs: Sequence[RunHistory]) -> Comparison:
    """Groups of runs, and the fields in which their configs differ.

    Raises:
        UsageError: a run's config is no YAML; the message names it.
    """
    configs = [flat_config(run) for run in runs]
    for config in configs:
        for name in (*_NO_CONFIG, *(name for name in config if name.startswith("log."))):
            config.pop(name, None)
    names = list(dict.fromkeys(name for config in configs for name in config))
    # What was trained elsewhere has no config to differ.
    held = [config for config in configs if config]
    differing = [name for name in names if len({_told(config.get(name)) for config in held}) > 1]
    fields = sorted(differing, key=lambda name: name != "init_seed")
    values = [[_told(config.get(name)) for name in fields] for config in configs]
    keys = [tuple(_told(config.get(name)) for name in fields if name != "init_seed") for config in configs]
    # What is not ours has no config: each is for itself.
    keys = [key if run.config else (f"run {run.index}",) for key, run in zip(keys, runs, strict=True)]
    members = {key: [run for run, other in zip(runs, keys, strict=True) if other == key] for key in keys}
    names_of = {key: _group_name(found) for key, found in members.items()}
    if len(set(names_of.values())) < len(names_of):
        names_of = {key: f"{name} ({i})" for i, (key, name) in enumerate(names_of.items(), start=1)}
    return Comparison([names_of[key] for key in keys], fields, values)


def _told(value: Any) -> str:
    return "" if value is None else str(value)


def _group_name(members: Sequence[RunHistory]) -> str:
    """The shortest name of a group's runs: what its seeds' names begin with."""
    return min((run.name for run in members), key=lambda name: (len(name), name))


# ── paired differences ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Difference:
    """A quantity at the end of the runs of two groups, paired by their seed."""

    quantity: Quantity
    probe: str
    first: float
    """Mean over the pairs."""
    second: float
    mean: float
    """Of second − first."""
    interval: tuple[float, float] | None
    """Student's, of 95 %; None of one pair."""
    n_pairs: int


def paired_differences(runs: Sequence[RunHistory], groups: Sequence[str]) -> list[tuple[str, str, list[Difference]]]:
    """(first group, second group, differences) of groups that have seeds in common, the first ones first."""
    by_group: dict[str, dict[Any, RunHistory]] = {}
    for run, group in zip(runs, groups, strict=True):
        seed = run.birth.get("init_seed")
        if seed is not None:
            by_group.setdefault(group, {}).setdefault(seed, run)
    found = []
    for a, b in combinations(by_group, 2):
        seeds = [seed for seed in by_group[a] if seed in by_group[b]]
        pairs = [(by_group[a][seed], by_group[b][seed]) for seed in seeds]
        if pairs and (differences := _differences(pairs)):
            found.append((a, b, differences))
    return found[:_MOST_PAIRS]


def _differences(pairs: Sequence[tuple[RunHistory, RunHistory]]) -> list[Difference]:
    ends = [(LOGGED[name], "", [(_logged(a, name), _logged(b, name)) for a, b in pairs]) for name in _COMPARED]
    for name in _COMPARED_SCALARS:
        for group, probe in (("bias_text", "text"), ("bias", "random")):
            values = [(_scalar(a, name, group), _scalar(b, name, group)) for a, b in pairs]
            ends.append((MEASURED[name], probe, values))
    found = []
    for quantity, probe, values in ends:
        both = np.array([pair for pair in values if all(map(math.isfinite, pair))]).reshape(-1, 2)
        if len(both):
            found.append(_difference(quantity, probe, both))
    if not any(difference.probe == "text" for difference in found):
        found = [Difference(d.quantity, "", d.first, d.second, d.mean, d.interval, d.n_pairs) for d in found]
    return found


def _difference(quantity: Quantity, probe: str, both: np.ndarray) -> Difference:
    """The mean difference of ``[pairs, 2]`` and its interval."""
    apart, n = both[:, 1] - both[:, 0], len(both)
    mean, interval = float(apart.mean()), None
    if n > 1:
        reach = float(stats.t.ppf((1 + _LEVEL) / 2, n - 1) * apart.std(ddof=1) / math.sqrt(n))
        interval = (mean - reach, mean + reach)
    first, second = both.mean(0)
    return Difference(quantity, probe, float(first), float(second), mean, interval, n)


def _logged(run: RunHistory, name: str) -> float:
    """The last value of a logged quantity."""
    values = [value for value in run.series(name)[1] if math.isfinite(value)]
    return values[-1] if values else math.nan


def _scalar(run: RunHistory, name: str, group: str) -> float:
    """A scalar of the newest snapshot after birth."""
    return finite_or_nan((run.last.summary.get(group) or {}).get(name)) if run.last else math.nan
