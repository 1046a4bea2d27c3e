"""Findings of content: other tensors, other configs, and the same weights under several names."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import inf
from os.path import commonprefix
from typing import Any

import numpy as np

from ..findings.formatting import in_few_words, without_shared_folder
from ..metrics.weight_kinship import SHORTER, Steps, length_ratio, mean_distances, squared_distances
from .checkpoint import Judged, Member, Same, listed, weights_of
from .training_order import Place, Run, Training, at_step, chains, steps_of_chains
from .weight_samples import exact_difference
from .weights import Entry, describe_json

# ---------------------------------------------------------------- other tensors, other configs

#: Number of fields of a config that are reported with both values; only the names of further ones are reported.
_MOST_FIELDS = 4
#: A mean must be so many times as near as the nearest of the checkpoints that it is of.
CLOSER = 0.2
#: Width of the residual stream, as configs of this package and of ``transformers`` name it.
_WIDTHS = ("d_model", "hidden_size", "n_embd")


def _most_common(values: Sequence[Hashable]) -> Any:
    """Return the value of most checkpoints; ties go to the first."""
    return Counter(values).most_common(1)[0][0] if values else None


def of_one_shape(judged: Sequence[Judged]) -> list[Judged]:
    """Return the checkpoints whose tensors have the names and shapes of the majority. Reports deviating tensors of the
    others.
    """
    tensors = [(one, one.content.sampled.entries) for one in judged if one.content is not None]
    usual = dict(_most_common([tuple(sorted(own.items())) for _, own in tensors]) or ())
    for one, own in tensors:
        names = sorted(name for name in own.keys() | usual.keys() if own.get(name) != usual.get(name))
        if names:
            here, there = (found.get(names[0], "missing") for found in (own, usual))
            more = f", and {len(names) - 1} more tensors differ" if len(names) > 1 else ""
            one.found("tensors", f"{names[0]} is {here}, and {there} in most others{more}")
    return [one for one, own in tensors if _shapes(own) == _shapes(usual)]


def _shapes(entries: Mapping[str, Entry]) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in entries.items()}


def compare_configs(judged: Sequence[Judged]) -> None:
    """Report configs and tokenizers that differ from the majority."""
    configs = [(one, one.content.config) for one in judged if one.content and one.content.config is not None]
    names = {name for _, config in configs for name in config}
    usual = {name: _most_common([_written(config.get(name)) for _, config in configs]) for name in names}
    for one, config in configs:
        own = {name: _written(config.get(name)) for name in sorted(names, key=_by_weight)}
        other = [name for name in own if own[name] != usual[name]]
        for name in other[:_MOST_FIELDS]:
            field, value, of_most = _where_they_differ(name, json.loads(own[name]), json.loads(usual[name]))
            one.found("config", f"its config has {field} {value}, and that of most others {of_most}")
        if more := other[_MOST_FIELDS:]:
            fields = f"{len(more)} more field{'s' if len(more) > 1 else ''}"
            one.found("config", f"its config differs from most others in {fields}: {', '.join(more)}")
    _compare_tokenizers([(one, one.content.tokenizer) for one in judged if one.content])


def _written(value: Any) -> str:
    """Write a config's value in full; the order of keys is none of it."""
    return json.dumps(value, sort_keys=True)


def _where_they_differ(field: str, own: Any, usual: Any) -> tuple[str, str, str]:
    """Return the name of a field and two values of it in a few words, of the first field inside where these words are
    the same; of long texts from the place on where they differ.
    """
    said = describe_json(own), describe_json(usual)
    if said[0] != said[1]:
        return field, *said
    if not isinstance(own, dict | list):
        n_shared = len(commonprefix([str(own), str(usual)]))  # noqa: RUF071, of any text
        return f"{field}[{n_shared}:]", describe_json(str(own)[n_shared:]), describe_json(str(usual)[n_shared:])
    of_own, of_usual = (dict(value.items() if isinstance(value, dict) else enumerate(value)) for value in (own, usual))
    name = next(name for name in [*of_own, *of_usual] if _inside(of_own, name) != _inside(of_usual, name))
    if name not in of_own or name not in of_usual:
        values = [describe_json(of[name]) if name in of else "missing" for of in (of_own, of_usual)]
        return f"{field}.{name}", values[0], values[1]
    return _where_they_differ(f"{field}.{name}", of_own[name], of_usual[name])


def _inside(fields: Mapping[Any, Any], name: Any) -> str:
    return _written(fields[name]) if name in fields else ""


def _by_weight(field: str) -> tuple[bool, bool, str]:
    """Return the sort key of a field: those that make a different model come first."""
    return field != "model_type", field not in _WIDTHS, field


def _compare_tokenizers(tokenizers: Sequence[tuple[Judged, dict[str, str]]]) -> None:
    names = dict.fromkeys(name for _, parts in tokenizers for name in parts)
    usual = {name: _most_common([parts[name] for _, parts in tokenizers if name in parts]) for name in names}
    for one, parts in tokenizers:
        if other := [name for name in parts if parts[name] != usual[name]]:
            more = f" and {len(other) - 3} more parts" if len(other) > 3 else ""
            one.found("tokenizer", f"its tokenizer has another {', '.join(other[:3])}{more} than that of most others")


def alike(judged: Sequence[Judged]) -> list[Same]:
    """Group the checkpoints by their sampled weights, in the order of the first of each."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        assert one.content is not None
        groups[one.content.sampled.digest].append(one)
    found = []
    for members in groups.values():
        assert members[0].content is not None
        same = Same(members, members[0].content.sampled.values, None)
        same.place = min(same.claims, default=None)
        found.append(same)
    return found


def part_runs(found: Sequence[Same]) -> list[str]:
    """Part runs that have the same steps and other weights, as two of one seed have: behind the last checkpoint that
    they share each is a training by itself. Return a line for each parting.
    """
    held: dict[Training, dict[str, dict[int, set[int]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
    for number, same in enumerate(found):
        for one in same.members:
            if (place := one.member.place) is not None:
                held[place.chain][one.member.source][place.step].add(number)
    notes = []
    for training, weights in held.items():
        runs_of_steps, parted = _runs_of_steps(weights)
        notes += parted
        for one in (one for same in found for one in same.members):
            place = one.member.place
            if place is not None and place.chain == training:
                run = runs_of_steps[place.step][one.member.source]
                one.member = replace(one.member, place=place._replace(run=run))
    for same in found:
        same.place = min(same.claims, default=None)
    return notes


def _runs_of_steps(weights: Mapping[str, Mapping[int, set[int]]]) -> tuple[dict[int, dict[str, Run]], list[str]]:
    """Return the run that each source of one training is of, by step, and a line for each parting.

    Args:
        weights: source → step → numbers of the weights that it has at this step.
    """
    sources = sorted(weights)
    names = dict(zip(sources, without_shared_folder(sources), strict=True))
    until = {pair: _same_until(*pair, weights) for pair in combinations(sources, 2)}
    run: dict[str, Run] = dict.fromkeys(sources, ())
    found, notes = {}, []
    for step in sorted({step for by_step in weights.values() for step in by_step}):
        together = {source: {source} for source in sources}
        for (a, b), last in until.items():
            if last is not None and last >= step and together[a] is not together[b]:
                joined = together[a] | together[b]
                together |= dict.fromkeys(joined, joined)
        parted, shared = set(), -1
        for (a, b), last in until.items():
            if last is not None and last < step and together[a] is not together[b]:
                parted |= together[a] | together[b]
                shared = max(shared, int(last))
        before = dict(run)
        for source in parted:
            name = " and ".join(sorted(names[one] for one in together[source]))
            run[source] = run[source] if run[source][-1:] == (name,) else (*run[source], name)
        if new := sorted({run[source][-1] for source in parted if run[source] != before[source]}):
            behind = f" behind step {shared}" if shared >= 0 else ""
            notes.append(f"{in_few_words(new)}: the same steps and other weights, each judged by itself{behind}")
        found[step] = dict(run)
    return found, notes


def _same_until(a: str, b: str, weights: Mapping[str, Mapping[int, set[int]]]) -> float | None:
    """Return the step up to which two sources are one training: inf if they never part, −1 if they begin apart; None if
    they have nothing that tells.

    It is the step for which fewest checkpoints contradict, by equal weights behind it and other ones before: a single
    checkpoint may be a copy, or have been changed.
    """
    common = sorted(weights[a].keys() & weights[b].keys())
    if not common:
        return None
    is_same = [bool(weights[a][step] & weights[b][step]) for step in common]
    wrong = [is_same[:n].count(False) + is_same[n:].count(True) for n in range(len(common) + 1)]
    n_shared = max(n for n, count in enumerate(wrong) if count == min(wrong))
    if n_shared == len(common) - 1 and not _is_of_others(a, b, common[-1], weights):
        # The last one alone tells nothing: a run that went apart, or a checkpoint that was changed.
        return inf if n_shared else None
    return inf if n_shared == len(common) else common[n_shared - 1] if n_shared else -1


def _is_of_others(a: str, b: str, step: int, weights: Mapping[str, Mapping[int, set[int]]]) -> bool:
    """Return True if another source has the weights of one of two at a step."""
    own = weights[a][step] | weights[b][step]
    return any(own & by_step.get(step, set()) for source, by_step in weights.items() if source not in (a, b))


def say_means(members: Sequence[Same]) -> None:
    """Report checkpoints without a step that are the mean of the ends of the last stage's ingredients."""
    ends: dict[Any, Same] = {}
    for same in sorted((one for one in members if one.place is not None), key=lambda one: one.place or at_step(0)):
        assert same.place is not None
        ends[same.place.chain] = same
        for n_partings in range(len(same.place.run)):
            ends.pop(same.place.chain._replace(run=same.place.run[:n_partings]), None)
    last = [same for chain, same in ends.items() if chain[0] == max(stage for stage, *_ in ends)]
    if len(last) < 2:
        return
    shared = set.intersection(*(set(same.values) for same in last))
    mean = {name: np.mean([same.values[name] for same in last], axis=0) for name in shared}
    for one in (one for one in members if not one.claims):
        distance_M = mean_distances(squared_distances([one.values, mean, *(same.values for same in last)]))[0]
        if distance_M[1] < CLOSER * distance_M[2:].min():
            one.is_mean = True
            for judged in one.members:
                judged.notes.append(f"is the mean of {listed([same.members[0] for same in last])}")


# ---------------------------------------------------------------- the same weights under several names
# The place in training that they are of, and the names that are wrong.

#: Exponents (a, b) of laws of a curve: checkpoints of steps s and t are |s^b − t^b|^a apart. From a random walk to a
#: straight line, each from a training at one speed to one that becomes ever slower.
_LAWS = tuple(product(np.linspace(0.4, 1.0, 7), np.linspace(0.2, 1.0, 9)))
#: A law may hold if the logarithms of distances fit it as well as the best, up to so much.
_SLACK = 0.1
#: A claim is out of question if the distances misfit it so many times as much as the nearest.
_CLEARER = 1.4


def settle_duplicates(members: Sequence[Same], distance_MM: np.ndarray, *, scan: bool) -> None:
    """Find the place of each group of equal weights, and report the other claims.

    Args:
        members: checkpoints of one birth.
        distance_MM: distance between every two of them.
        scan: compare all values of those whose samples are alike.
    """
    settled = {i: same.claims[0] for i, same in enumerate(members) if len(same.claims) == 1}
    for i, same in enumerate(members):
        if len(same.claims) > 1:
            same.right = _settle(i, same.claims, settled, distance_MM)
            # A name without a step, such as main, is that of the last checkpoint.
            last = max([*settled.values(), *same.claims])
            if last in same.right and any(one.member.place is None for one in same.members):
                same.right = [last]
            same.place = (same.right or same.claims)[0]
        if len(same.members) > 1:
            say_duplicates(same, scan=scan)


def _settle(i: int, claims: Sequence[Place], settled: dict[int, Place], distance_MM: np.ndarray) -> list[Place]:
    """Return the possible places of checkpoint ``i``: one if the others decide it, by the curve through them or by
    distances; none if they all contradict.
    """
    steps = {claim: steps_of_chains(chains({**settled, i: claim}, distance_MM)) for claim in claims}
    fitting = [one for one in claims if not any(_is_shorter(steps[other], steps[one], distance_MM) for other in claims)]
    if not fitting:
        return []
    if any(_is_shorter(other, steps[fitting[0]], distance_MM) for other in _everywhere(i, settled, distance_MM)):
        return []
    return fitting if len(fitting) == 1 else _by_distance(i, fitting, settled, distance_MM)


def _is_shorter(other: Steps, steps: Steps, distance_MM: np.ndarray) -> bool:
    return length_ratio(other, steps, distance_MM) < SHORTER


def _everywhere(i: int, settled: dict[int, Place], distance_MM: np.ndarray) -> Iterator[Steps]:
    """Yield the steps of all chains with checkpoint ``i`` at every place between, before and after the others."""
    found = chains(settled, distance_MM)
    for number, chain in enumerate(found):
        rest = [other for other in found if other is not chain]
        for at in range(len(chain.own) + 1):
            own = [*chain.own[:at], i, *chain.own[at:]]
            later = [
                other._replace(begins_from=i)
                if at and at == len(chain.own) and other.begins_from == own[at - 1]
                else other
                for other in rest
            ]
            yield steps_of_chains([*later[:number], chain._replace(own=own), *later[number:]])


def _by_distance(i: int, claims: list[Place], settled: dict[int, Place], distance_MM: np.ndarray) -> list[Place]:
    """Return the claims of ``i`` that its distances to the checkpoints of the same training allow, under every law that
    fits the distances between those.
    """
    others = {place.step: k for k, place in settled.items() if place.chain == claims[0].chain}
    if len(others) < 2 or any(claim.chain != claims[0].chain or claim.step in others for claim in claims):
        return claims
    steps, places = np.array([*others], dtype=float), [*others.values()]
    a, b = np.triu_indices(len(steps), 1)
    between, away = distance_MM[np.ix_(places, places)][a, b], distance_MM[i, places]
    fits: list[tuple[float, list[Place]]] = []
    for straight, slowing in _LAWS:
        along = steps**slowing
        gaps = straight * np.log(np.abs(along[a] - along[b]))
        scale = float((np.log(between) - gaps).mean())
        expected = [scale + straight * np.log(np.abs(float(claim.step) ** slowing - along)) for claim in claims]
        misfits = [float(np.sqrt(np.square(np.log(away) - of_claim).mean())) for of_claim in expected]
        near = [claim for claim, misfit in zip(claims, misfits, strict=True) if misfit <= _CLEARER * min(misfits)]
        fits.append((float((np.log(between) - gaps).std()), near))
    best = min(misfit for misfit, _ in fits)
    return sorted({claim for misfit, near in fits if misfit <= best + _SLACK for claim in near})


def say_duplicates(same: Same, *, scan: bool) -> None:
    """Report checkpoints with the same weights.

    Args:
        same: the checkpoints.
        scan: compare all of their values first.
    """
    known = same.right[0] if len(same.right) == 1 else None
    genuine = next((one for one in same.members if known is not None and one.member.place == known), None)
    for one in same.members:
        others = [other for other in same.members if other is not one]
        beside = others[0] if genuine is None or one is genuine else genuine
        if scan and (difference := _difference(one.member, beside.member)) is not None:
            one.found(
                "values", f"its weights are those of {beside.label} but for {difference}: one of them was changed"
            )
        elif len(same.claims) < 2 or one.member.place is None or one is genuine:
            one.notes.append(f"has the weights of {listed(others)}")
        else:
            one.found("duplicate", f"has the weights of {listed(others)}; {_on_the_curve(same.right)}")


def _on_the_curve(right: Sequence[Place]) -> str:
    if len(right) == 1:
        return f"on the curve they are at {right[0].words}"
    if not right:
        return "on the curve they are at none of these"
    return f"nothing tells which is right: {in_few_words([place.words for place in right])}"


def _difference(a: Member, b: Member) -> str | None:
    """Find a difference between two checkpoints of equal samples; None without one, or unless they are read whole."""
    if not (a.is_local and b.is_local):
        return None
    with weights_of(a) as weights_a, weights_of(b) as weights_b:
        found = None if weights_a is None or weights_b is None else exact_difference(weights_a, weights_b)
    return None if found is None else f"{found.n_values:,} of {found.n_all:,} values (first {found.first})"
