"""Pairs of models, kin and strangers, in groups: the births of each family, and models made from them by training or by
hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal

from birthmark.errors import UsageError
from birthmark.measure.hidden_states import FingerprintProbe
from birthmark.models.changes.change import decoder_of, weights_of
from birthmark.models.changes.table import read_change
from birthmark.models.config import ModelConfig
from birthmark.models.decoder import Decoder

from .bench_models import FAMILIES, LANGUAGE, OTHER_LANGUAGE, Model, Scale, seed_of, train
from .evidence import Evidence, gather
from .reordered import reordered

#: Tokens of a sequence of the probe.
PROBE_LEN = 16


#: Changes that people make to a trained model: rows of the table of `birthmark.models.changes`, with their settings, in
#: order.
CHANGES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "int8": [{"kind": "round", "to": "int8"}],
    "int4": [{"kind": "round", "to": "int4"}],
    "pruned 50 %": [{"kind": "prune", "share": 0.5}],
    "noise 10 %": [{"kind": "noise", "share": 0.1}],
    "merged 50 %": [{"kind": "merge", "share": 0.5}],
    "block dropped": [{"kind": "drop_blocks", "blocks": [1]}],
    "units permuted": [{"kind": "permute_units"}],
    "channels permuted": [{"kind": "permute_channels"}],
    "both permuted": [{"kind": "permute_channels"}, {"kind": "permute_units"}],
    "all permuted": [{"kind": "permute_channels"}],
    "signs flipped": [{"kind": "flip_signs"}],
    "channels scaled": [{"kind": "scale_channels"}],
    "rotated": [{"kind": "rotate"}],
}
#: Changes that also permute the hidden units and the channels of values.
VALUES_TOO = ("all permuted",)
MERGED = tuple(name for name, changes in CHANGES.items() if any(fields["kind"] == "merge" for fields in changes))
KIN_GROUPS = ("trained", "continued", *CHANGES)
STRANGER_GROUPS = ("births", "trained alike", "other language", "changed", "other families")
Relation = Literal["kin", "strangers"]


@dataclass(frozen=True)
class Pair:
    """Two models with the true answer."""

    relation: Relation
    group: str
    """Name of its group, in `KIN_GROUPS` or `STRANGER_GROUPS`."""
    family: str
    a: Evidence
    b: Evidence


@dataclass(frozen=True)
class Life:
    """The descendants of one birth."""

    birth: Evidence
    trained: Evidence
    continued: Evidence
    model: Model
    """Model after the first training."""
    loss: float
    """Loss at the end of the first training, in nats."""


def lead(family: str, i: int, scale: Scale, probe: FingerprintProbe) -> Life:
    """Draw a birth, train it, and continue the training on the other language."""
    model, name = FAMILIES[family](seed_of(family, i)), f"{family} {i}"
    birth = gather(f"{name} at birth", model, probe)
    loss = train(model, LANGUAGE, 0, scale.steps)
    trained, kept = gather(f"{name} trained", model, probe), copy.deepcopy(model)
    train(model, OTHER_LANGUAGE, scale.steps, scale.more_steps)
    return Life(birth, trained, gather(f"{name} continued", model, probe), kept, loss)


def changed(life: Life, kind: str, other: Life, seed: int, probe: FingerprintProbe) -> Evidence | None:
    """Return a trained model after one of `CHANGES`; None if its architecture does not allow the change.

    Args:
        life: the life whose model is changed.
        kind: the change.
        other: the life whose model is merged in, if the change is a merge.
        seed: seed of the change.
        probe: inputs.
    """
    if not isinstance(life.model, Decoder) or not isinstance(other.model, Decoder):
        return None
    found, merged = weights_of(life.model), weights_of(other.model)
    try:
        for fields in CHANGES[kind]:
            change = read_change(_allowed(fields, life.model.config))
            found = change(found, seed, merged if change.needs_other else None)
    except UsageError:
        return None
    if kind in VALUES_TOO:
        found = reordered(found, seed)
    return gather(f"{life.trained.name}, {kind}", decoder_of(found), probe)


def _allowed(fields: Mapping[str, Any], config: ModelConfig) -> Mapping[str, Any]:
    """Adapt a change to the architecture: under layer norm, flip the signs of all channels or of none.

    Layer norm subtracts the mean over channels, so that only all of them together can change their sign.
    """
    negated = fields["kind"] == "flip_signs" and config.norm == "layernorm"
    return {**fields, "share": 1.0} if negated else fields


def kin_of_family(family: str, scale: Scale, probe: FingerprintProbe, groups: Sequence[str]) -> Iterator[Pair]:
    """Yield the kin of some of `CHANGES` alone."""
    lives = [lead(family, i, scale, probe) for i in range(scale.n_trained)]
    for i, life in enumerate(lives):
        for kind in groups:
            found = changed(life, kind, lives[(i + 1) % len(lives)], i, probe)
            if found is not None:
                yield Pair("kin", kind, family, life.trained, found)


def of_family(family: str, scale: Scale, probe: FingerprintProbe, lives: list[Life]) -> Iterator[Pair]:
    """Yield all pairs within a family; the descendants of each birth are added to ``lives``."""
    births = iter(range(1000, 1000 + 2 * scale.n_births))
    for i in births:
        a, b = (gather(f"{family} {j}", FAMILIES[family](seed_of(family, j)), probe) for j in (i, next(births)))
        yield Pair("strangers", "births", family, a, b)
    lives += [lead(family, i, scale, probe) for i in range(scale.n_trained)]
    for life in lives:
        yield Pair("kin", "trained", family, life.birth, life.trained)
        yield Pair("kin", "continued", family, life.trained, life.continued)
    for one, other in combinations(lives, 2):
        yield Pair("strangers", "trained alike", family, one.trained, other.trained)
    for i, life in enumerate(lives):
        others = [other for other in lives if other is not life]
        for other in others:
            yield Pair("strangers", "other language", family, life.trained, other.continued)
        for kind in CHANGES:
            # The model that is merged in becomes kin of the result, so another one serves as the stranger.
            merged = lives[(i + 1) % len(lives)]
            found = changed(life, kind, merged, i, probe)
            if found is not None:
                yield Pair("kin", kind, family, life.trained, found)
                for other in others:
                    if kind not in MERGED or other is not merged:
                        yield Pair("strangers", "changed", family, other.trained, found)


def between_families(lives: Mapping[str, list[Life]]) -> Iterator[Pair]:
    """Pair trained models of different families that learned the same language."""
    for one, other in combinations(lives, 2):
        for a, b in product(lives[one], lives[other]):
            yield Pair("strangers", "other families", f"{one}; {other}", a.trained, b.trained)


def all_pairs(scale: Scale, say: Callable[[str], None], groups: Sequence[str] = ()) -> Iterator[Pair]:
    """Yield every pair of the bench; models that only one family needs are dropped after it.

    Args:
        scale: size of the bench.
        say: called with a line when a family is done.
        groups: changes to limit the bench to: only their kin are yielded.
    """
    probe = FingerprintProbe(n_inputs=scale.n_inputs, seq_len=PROBE_LEN)
    if groups:
        for family in FAMILIES:
            yield from kin_of_family(family, scale, probe, groups)
            say(family)
        return
    lives: dict[str, list[Life]] = {}
    for family in FAMILIES:
        lives[family] = []
        yield from of_family(family, scale, probe, lives[family])
        say(f"{family}: loss {', '.join(f'{life.loss:.2f}' for life in lives[family])}")
    yield from between_families(lives)
