"""Comparison of several runs: seeds of one config, differences of configs, and their effects.

Runs of one config that differ only in their seed are a group. Groups are compared over pairs: runs of the same seed,
whose births share every parameter that both configs have.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
from scipy import stats

from ..data.token_files import VALIDATION_FILES
from ..files import finite_or_nan
from ..metrics.quantities import LOGGED, MEASURED, SECTIONS, SHARES, over_training, shown_name
from ..metrics.quantity import Quantity
from ..yaml_files import parse_yaml
from .attention_sink import SinkReading
from .formatting import format_value
from .run_history import RunHistory
from .verdict import Group

_NO_CONFIG = ("name", "run_dir")
"""Fields that say where a run is kept, not what it is."""
_LEVEL = 0.95
_COMPARED = ("val/loss", "val/loss_trigger")
_SINK = SECTIONS["sink"].headline
_SINKS = [
    name
    for of_documents in (True, False)
    for mass in [SinkReading("bias", of_documents).mass]
    for name in (SHARES[mass], mass)
]
"""Names that a compared sink mass may have: where documents begin, at position 0, and both as shares of the row."""
_COMPARED_SCALARS = (
    *(
        quantity.name
        for quantity, shown in over_training(MEASURED.values())
        if not shown.page_only and quantity.name not in SHARES.values()
    ),
    SECTIONS["aggregation"].headline,
)
_PROBES: Mapping[Group, str] = {"bias_text": "text", "bias": "random"}
"""Group of a probe's scalars → its name."""


def flat_config(run: RunHistory) -> dict[str, Any]:
    """Return the fields of a run's config by dotted name; empty for a training by another program."""
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
    """Common fields and differences of several runs' configs."""

    groups: Sequence[str]
    """Name of each run's group."""
    fields: Sequence[str]
    """Fields in which runs differ, the seed first."""
    values: Sequence[Sequence[str]]
    """``[runs][fields]``; "" where a config has no such field, or null."""
    first_of_seed: Sequence[bool]
    """True for each run whose seed no earlier run of its group has."""

    @property
    def several_seeds(self) -> set[str]:
        """Groups of more than one seed."""
        seen = Counter(group for group, is_first in zip(self.groups, self.first_of_seed, strict=True) if is_first)
        return {group for group, count in seen.items() if count > 1}


def compare_configs(runs: Sequence[RunHistory]) -> Comparison:
    """Group runs, and find the fields in which their configs differ.

    Raises:
        UsageError: a run's config is not YAML; the message names it.
    """
    configs = [flat_config(run) for run in runs]
    for config in configs:
        for name in (*_NO_CONFIG, *(name for name in config if name.startswith("log."))):
            config.pop(name, None)
    names = list(dict.fromkeys(name for config in configs for name in config))
    # A training by another program has no config to compare.
    held = [config for config in configs if config]
    differing = [name for name in names if len({_in_words(config.get(name)) for config in held}) > 1]
    fields = sorted(differing, key=lambda name: name != "init_seed")
    values = [[_in_words(config.get(name)) for name in fields] for config in configs]
    keys = [tuple(_in_words(config.get(name)) for name in fields if name != "init_seed") for config in configs]
    # A training by another program has no config: each forms its own group.
    keys = [key if run.config else (f"run {run.index}",) for key, run in zip(keys, runs, strict=True)]
    members = {key: [run for run, other in zip(runs, keys, strict=True) if other == key] for key in keys}
    seeds = [(key, _in_words(config.get("init_seed"))) for key, config in zip(keys, configs, strict=True)]
    n_seeds = Counter(key for key, _ in set(seeds))
    names_of = {key: _group_name(found, n_seeds[key]) for key, found in members.items()}
    if len(set(names_of.values())) < len(names_of):
        names_of = {key: f"{name} ({i})" for i, (key, name) in enumerate(names_of.items(), start=1)}
    is_first = [seed not in seeds[:place] for place, seed in enumerate(seeds)]
    return Comparison([names_of[key] for key in keys], fields, values, is_first)


def _in_words(value: Any) -> str:
    return "" if value is None else str(value)


def _group_name(members: Sequence[RunHistory], n_seeds: int) -> str:
    """Return the name of a group's runs, and how many seeds it has if there are several: a mean over them is no run's
    number.
    """
    shortest = min((run.name for run in members), key=lambda name: (len(name), name))
    if n_seeds < 2:
        return shortest
    bare = {re.sub(r"[-_./ ]*(seed)?[-_./ ]*\d+$", "", run.name) for run in members} - {""}
    return f"{bare.pop() if len(bare) == 1 else shortest} ({n_seeds} seeds)"


# ── paired differences ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Difference:
    """Difference of a quantity between two groups of runs, at the last step that both have, paired by seed."""

    quantity: Quantity
    probe: str
    step: int
    """Number of optimizer steps of both runs, in every pair."""
    first: float
    """Mean over the pairs; NaN where there are none."""
    second: float
    mean: float
    """Mean of second − first."""
    interval: tuple[float, float] | None
    """Student's, of 95 %; None of fewer than two pairs."""
    largest: float
    """Largest size of a pair's difference; NaN where there are none."""
    n_pairs: int
    missing: Sequence[str]
    """Names of runs that have no finite number at that step: their pairs are left out."""
    unlike: str = ""
    """Reason why values of the two groups are no measure of one another; "" if there is none."""


def paired_differences(runs: Sequence[RunHistory], groups: Sequence[str]) -> list[tuple[str, str, list[Difference]]]:
    """Return (first group, second group, differences) for groups with common seeds, the first ones first."""
    by_group: dict[str, dict[Any, _Recorded]] = {}
    for run, group in zip(runs, groups, strict=True):
        # Trainings from one model begin alike, whatever seed their certificates have.
        seed = run.birth.get("init_from") or run.birth.get("init_seed")
        if seed is not None and seed not in (of_group := by_group.setdefault(group, {})):
            of_group[seed] = _Recorded.of(run)
    found = []
    for a, b in combinations(by_group, 2):
        seeds = [seed for seed in by_group[a] if seed in by_group[b]]
        pairs = [(by_group[a][seed], by_group[b][seed]) for seed in seeds]
        if pairs and (differences := _differences(pairs)):
            found.append((a, b, differences))
    return found


@dataclass(frozen=True)
class _Recorded:
    """Recorded values of every compared quantity of a run, after birth."""

    name: str
    values: Mapping[tuple[str, str], Mapping[int, float]]
    """(Quantity, probe) → step → value, NaN where it was recorded and is no number. Where rows of weights need not sum
    to 1, values are shares of the row: other runs' are.
    """
    shares: Container[tuple[str, str]]
    """Quantities and probes whose values are shares of such rows."""
    readings: Mapping[str, SinkReading]
    """Probe → the reading by which the run's sentences judge a sink: values of the sink mass are of it."""
    levels: Mapping[str, float]
    """Probe → sink mass of uniform attention."""
    tokens: Mapping[str, Any]
    """Facts of its data that a loss in nats per token depends on, as far as they are recorded."""
    texts: Sequence[tuple[str, float]]
    """(Hash, share) of each source of the text that it is validated on, in order; empty if a hash is not recorded, or
    is one of training files too.
    """
    ids: str
    """Hash of the files of tokens that it reads, "" if it reads text: the vocabulary of such files is recorded as that
    of the model, which may have more rows.
    """

    @classmethod
    def of(cls, run: RunHistory) -> _Recorded:
        values: dict[tuple[str, str], Mapping[int, float]] = {}
        for name in _COMPARED:
            values[name, ""] = {step: value for step, value in zip(*run.series(name), strict=True) if step > 0}
        shares = set()
        readings = {probe: SinkReading.on(run.last, group) for group, probe in _PROBES.items()}
        levels: dict[str, float] = {}
        for name in _COMPARED_SCALARS:
            for group, probe in _PROBES.items():
                judged = readings[probe].mass if name == _SINK else name
                held = [s for s in run.dated if s.step > 0 and judged in (s.summary.get(group) or {})]
                read = {s.step: shown_name(judged, s.summary[group]) for s in held}
                values[name, probe] = {s.step: finite_or_nan(s.summary[group][read[s.step]]) for s in held}
                if any(shown != judged for shown in read.values()):
                    shares.add((name, probe))
                if name == _SINK and held:
                    levels[probe] = MEASURED[judged].level(held[-1].summary, group)
        data = run.birth.get("data") or {}
        tokens = {name: data[name] for name in ("vocab_size", "tokenizer_hash") if data.get(name) is not None}
        sources = list((data.get("sources") or {"": data}).values())
        texts = [(str(one.get("content_hash") or ""), float(one.get("share", 1))) for one in sources]
        # Files of their own for validation share a hash with those of the training.
        if any(not content for content, _ in texts) or any(one.get("split") == VALIDATION_FILES for one in sources):
            texts = []
        ids = str(data.get("content_hash") or "") if {one.get("kind") for one in sources} == {"tokens"} else ""
        return cls(run.name, values, shares, readings, levels, tokens, sorted(texts), ids)

    def unlike(self, other: _Recorded, name: str, probe: str) -> str:
        """Say why a value of the other run is no measure of this one's; "" if there is no reason."""
        if name in _COMPARED:
            known = () if self.ids and self.ids == other.ids else self.tokens.keys() & other.tokens.keys()
            if any(self.tokens[fact] != other.tokens[fact] for fact in known):
                return "nats per token of other tokens, which cannot be compared"
            differ = self.texts and other.texts and self.texts != other.texts
            return "on data of another hash or in other shares, which may be other text" if differ else ""
        if name != _SINK:
            return ""
        if (place := self.readings[probe].place) != (other_place := other.readings[probe].place):
            return f"on {other_place} against {place}"
        ends = [run.levels.get(probe, math.nan) for run in (other, self)]
        if not math.isfinite(sum(ends)) or math.isclose(*ends, rel_tol=1e-4):
            return ""
        second, first = (format_value(end, MEASURED[_SINK].format) for end in ends)
        return f"uniform attention gives {second} against {first}"


def _differences(pairs: Sequence[tuple[_Recorded, _Recorded]]) -> list[Difference]:
    compared = [(LOGGED[name], "") for name in _COMPARED]
    compared += [(MEASURED[name], probe) for name in _COMPARED_SCALARS for probe in _PROBES.values()]
    differences = [_difference(quantity, probe, pairs) for quantity, probe in compared]
    found = [difference for difference in differences if difference is not None]
    if not any(difference.probe == "text" for difference in found):
        found = [replace(difference, probe="") for difference in found]
    return found


def _difference(quantity: Quantity, probe: str, pairs: Sequence[tuple[_Recorded, _Recorded]]) -> Difference | None:
    """Compute the mean difference over pairs and its interval; None if the two groups have no common step.

    The step is one for all pairs, so that a run that diverged or stopped is left out by name and not compared early.
    """
    key = quantity.name, probe
    if quantity.name == _SINK and all(run.readings[probe].of_documents for pair in pairs for run in pair):
        quantity = MEASURED[pairs[0][0].readings[probe].mass]
    if any(key in run.shares for pair in pairs for run in pair):
        quantity = MEASURED[SHARES[quantity.name]]
    of_groups = [{step for pair in pairs for step in pair[side].values[key]} for side in (0, 1)]
    if not (common := of_groups[0] & of_groups[1]):
        return None
    step = max(common)
    values = np.array([[run.values[key].get(step, math.nan) for run in pair] for pair in pairs])
    is_finite = np.isfinite(values)
    missing = [
        run.name
        for pair, there in zip(pairs, is_finite, strict=True)
        for run, exists in zip(pair, there, strict=True)
        if not exists
    ]
    both = values[is_finite.all(1)]
    apart, n = both[:, 1] - both[:, 0], len(both)
    if n == 0:
        return Difference(quantity, probe, step, math.nan, math.nan, math.nan, None, math.nan, 0, missing)
    unlike = next(filter(None, (a.unlike(b, *key) for a, b in pairs)), "")
    mean, interval = float(apart.mean()), None
    if n > 1:
        reach = _quantile(n - 1) * float(apart.std(ddof=1)) / math.sqrt(n)
        interval = (mean - reach, mean + reach)
    first, second = both.mean(0)
    largest = float(np.abs(apart).max())
    return Difference(quantity, probe, step, float(first), float(second), mean, interval, largest, n, missing, unlike)


@cache
def _quantile(degrees: int) -> float:
    """Return the two-sided quantile of Student's t."""
    return float(stats.t.ppf((1 + _LEVEL) / 2, degrees))


# ── in sentences ─────────────────────────────────────────────────────────────────────────────────────────────────────

_MOST_SENTENCES = 3
"""Comparisons of two groups that have a sentence of their own."""
_ONE_PAIR = "one pair cannot tell an effect of the config from chance"


def comparison_in_words(runs: Sequence[RunHistory], groups: Sequence[str]) -> list[str]:
    """Say how each group of runs differs from another in sink mass and loss, in one sentence for two groups; none for
    one run, or for more groups than sentences can compare.
    """
    found = paired_differences(runs, groups)
    if len(found) > _MOST_SENTENCES or len(runs) < 2:
        return []
    if found:
        return [comparison_sentence(first, second, differences) for first, second, differences in found]
    if len(runs) > 2:
        return []
    a, b = runs
    rests_on = "they share no seed, so that the difference may be the seed's"
    if groups[0] == groups[1]:
        rests_on = "they differ in no field but seeds, so that the difference is chance"
    differences = _differences([(_Recorded.of(a), _Recorded.of(b))])
    return [comparison_sentence(a.name, b.name, differences, rests_on)] if differences else []


def comparison_sentence(first: str, second: str, differences: Sequence[Difference], rests_on: str = _ONE_PAIR) -> str:
    """Compare two groups of runs in sink mass, on text if measured, and validation loss.

    Args:
        first: name of the first group.
        second: name of the second, which the sentence is about.
        differences: all differences of the two groups.
        rests_on: conclusion where there is one pair alone.
    """
    by_name = {(d.quantity.name, d.probe): d for d in differences}
    keys = ((name, probe) for probe in ("text", "", "random") for name in _SINKS)
    mass = next((by_name[key] for key in keys if key in by_name), None)
    chosen = [d for d in (mass, by_name.get(("val/loss", ""))) if d is not None] or list(differences[:1])
    known = [d for d in chosen if d.n_pairs]
    if not known:
        return f"{first} and {second} cannot be compared: no pair has finite numbers of both."
    steps = {d.step for d in known}
    parts = [_difference_in_words(d, first if i == 0 else "", with_step=len(steps) > 1) for i, d in enumerate(known)]
    when = f" at step {known[0].step:,}" if len(steps) == 1 else ""
    end = f"; {rests_on}" if any(d.interval is None for d in known) else ""
    return f"{second} has {' and '.join(parts)}{when}{end}."


def _difference_in_words(difference: Difference, first: str, *, with_step: bool) -> str:
    """Write one difference: its direction, both means, and its interval if there is one."""
    spec, name = difference.quantity.format, difference.quantity.label
    is_loss = difference.quantity.name.startswith("val/")
    if is_loss:
        name = "validation loss" if difference.quantity.name == "val/loss" else name
    elif difference.probe:
        name += " on text" if difference.probe == "text" else " on random tokens"
    means = [format_value(value, spec) for value in (difference.second, difference.first)]
    than = f" than {first}" if first else ""
    if means[0] == means[1]:
        what = f"the same {name}{f' as {first}' if first else ''}"
    elif is_loss:
        what = f"a {'higher' if difference.mean > 0 else 'lower'} {name}{than}"
    else:
        what = f"{'more' if difference.mean > 0 else 'less'} {name}{than}"
    numbers = means[0] if means[0] == means[1] else f"{means[0]} against {means[1]}"
    if with_step:
        numbers += f" at step {difference.step:,}"
    is_same = means[0] == means[1] and format_value(difference.largest, spec) == format_value(0.0, spec)
    if difference.interval is not None and is_same:
        numbers += "; the same in every pair, to the digits shown"
    elif difference.interval is not None:
        low, high = difference.interval
        ends = " to ".join(signed(end, spec) for end in difference.interval)
        holds = f", which holds 0: {difference.n_pairs} pairs cannot tell" if low <= 0 <= high else ""
        numbers += f"; {signed(difference.mean, spec)}, {100 * _LEVEL:.0f} % interval {ends}{holds}"
    return f"{what} ({numbers}{difference.unlike and f'; {difference.unlike}'})"


def signed(value: float, spec: str) -> str:
    """Write a difference, with its sign."""
    text = format_value(value, spec)
    return f"+{text}" if value > 0 else text
