"""What is wrong by content: other tensors, other configs, the same weights under several steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from .judged import Judged, Same, listed
from .suite import Member, weights_of
from .weight_samples import exact_difference
from .weights import describe_json

#: Fields of a config that are named with both values; of the others the names.
_MOST_FIELDS = 4
#: Width of the residual stream, as models of ours and of ``transformers`` name it.
_WIDTHS = ("d_model", "hidden_size", "n_embd")


def _most_common(values: Sequence[Hashable]) -> Any:
    """The value of most checkpoints; of equally many that of the first."""
    return Counter(values).most_common(1)[0][0] if values else None


def of_one_shape(judged: Sequence[Judged]) -> list[Judged]:
    """The checkpoints that have the tensors that most have; of the others says what is different."""
    tensors = [
        (one, {name: str(entry) for name, entry in one.content.sampled.entries.items()})
        for one in judged
        if one.content is not None
    ]
    usual = dict(_most_common([tuple(sorted(own.items())) for _, own in tensors]) or ())
    for one, own in tensors:
        names = sorted(name for name in own.keys() | usual.keys() if own.get(name) != usual.get(name))
        if names:
            here, there = (found.get(names[0], "missing") for found in (own, usual))
            more = f", and {len(names) - 1} more tensors differ" if len(names) > 1 else ""
            one.found("tensors", f"{names[0]} is {here}, and {there} in most others{more}")
    return [one for one, own in tensors if own == usual]


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
        same.step = min(same.claims, default=None)
        found.append(same)
    return found


def say_duplicates(same: Same, *, fits: bool, scan: bool) -> None:
    """Say of checkpoints with the same weights that they are.

    Args:
        same: of them.
        fits: whether ``same.step`` fits the curve, and the other steps do not.
        scan: compare all of their values first.
    """
    right = next((one for one in same.members if fits and one.member.step == same.step), None)
    for one in same.members:
        others = [other for other in same.members if other is not one]
        beside = others[0] if right in (None, one) else right
        assert beside is not None
        if scan and (difference := _difference(one.member, beside.member)) is not None:
            one.found(
                "values", f"its weights are those of {beside.label} but for {difference}: one of them was changed"
            )
        elif len(same.claims) < 2 or one.member.step is None or one is right:
            one.notes.append(f"has the weights of {listed(others)}")
        else:
            why = f"; on the curve they are at {same.label}" if right is not None else ""
            one.found("duplicate", f"has the weights of {listed(others)}{why}")


def _difference(a: Member, b: Member) -> str | None:
    """Where two checkpoints differ whose samples are alike; None: nowhere, or they are not read whole."""
    if not (a.is_local and b.is_local):
        return None
    with weights_of(a) as ours, weights_of(b) as theirs:
        found = None if ours is None or theirs is None else exact_difference(ours, theirs)
    return None if found is None else f"{found.n_values:,} of {found.n_all:,} values (first {found.first})"
