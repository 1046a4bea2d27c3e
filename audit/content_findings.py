"""What is wrong by content: other tensors, other configs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ..metrics.between.weight_kinship import mean_distances, squared_distances
from .judged import Judged, Same, listed
from .places import at_step
from .weights import Entry, describe_json

#: Fields of a config that are named with both values; of the others the names.
_MOST_FIELDS = 4
#: A mean must be so many times as near as the nearest of the checkpoints that it is of.
CLOSER = 0.2
#: Width of the residual stream, as models of ours and of ``transformers`` name it.
_WIDTHS = ("d_model", "hidden_size", "n_embd")


def _most_common(values: Sequence[Hashable]) -> Any:
    """The value of most checkpoints; of equally many that of the first."""
    return Counter(values).most_common(1)[0][0] if values else None


def of_one_shape(judged: Sequence[Judged]) -> list[Judged]:
    """The checkpoints whose tensors have the names and shapes of most. Says which tensors of any are not as in most."""
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
    """Say which configs and tokenizers are not those of most."""
    configs = [(one, one.content.config) for one in judged if one.content and one.content.config is not None]
    names = {name for _, config in configs for name in config}
    usual = {name: _most_common([describe_json(config.get(name)) for _, config in configs]) for name in names}
    for one, config in configs:
        own = {name: describe_json(config.get(name)) for name in sorted(names, key=_by_weight)}
        other = [name for name in own if own[name] != usual[name]]
        for name in other[:_MOST_FIELDS]:
            one.found("config", f"its config has {name} {own[name]}, and that of most others {usual[name]}")
        if more := other[_MOST_FIELDS:]:
            fields = f"{len(more)} more field{'s' if len(more) > 1 else ''}"
            one.found("config", f"its config differs from most others in {fields}: {', '.join(more)}")
    _compare_tokenizers([(one, one.content.tokenizer) for one in judged if one.content])


def _by_weight(field: str) -> tuple[bool, bool, str]:
    """What makes a model another one comes first."""
    return field != "model_type", field not in _WIDTHS, field


def _compare_tokenizers(tokenizers: Sequence[tuple[Judged, dict[str, str]]]) -> None:
    names = dict.fromkeys(name for _, parts in tokenizers for name in parts)
    usual = {name: _most_common([parts[name] for _, parts in tokenizers if name in parts]) for name in names}
    for one, parts in tokenizers:
        if other := [name for name in parts if parts[name] != usual[name]]:
            more = f" and {len(other) - 3} more parts" if len(other) > 3 else ""
            one.found("tokenizer", f"its tokenizer has another {', '.join(other[:3])}{more} than that of most others")


def alike(judged: Sequence[Judged]) -> list[Same]:
    """The checkpoints by their sampled weights, in the order of the first of each."""
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


def say_means(members: Sequence[Same]) -> None:
    """Say of checkpoints without a step that they are the mean of the ends of the last stage's ingredients."""
    ends: dict[Any, Same] = {}
    for same in sorted((one for one in members if one.place is not None), key=lambda one: one.place or at_step(0)):
        assert same.place is not None
        ends[same.place.chain] = same
    last = [same for chain, same in ends.items() if chain[0] == max(stage for stage, *_ in ends)]
    if len(last) < 2:
        return
    mean = {name: np.mean([same.values[name] for same in last], axis=0) for name in last[0].values}
    for one in (one for one in members if not one.claims):
        distance_M = mean_distances(squared_distances([one.values, mean, *(same.values for same in last)]))[0]
        if distance_M[1] < CLOSER * distance_M[2:].min():
            one.is_mean = True
            for judged in one.members:
                judged.notes.append(f"is the mean of {listed([same.members[0] for same in last])}")
