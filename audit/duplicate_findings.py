"""The same weights under several names: the place in training that they are of, and the names that are wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from ..metrics.between.weight_kinship import SHORTER, Steps, length_ratio
from .chains import chains, steps_of_chains
from .judged import Same, in_few_words, listed
from .places import Place
from .suite import Member, weights_of
from .weight_samples import exact_difference

#: Exponents (a, b) of laws of a curve: checkpoints of steps s and t are |s^b − t^b|^a apart. From a random walk to a
#: straight line, each from a training at one speed to one that becomes ever slower.
_LAWS = tuple(product(np.linspace(0.4, 1.0, 7), np.linspace(0.2, 1.0, 9)))
#: A law may hold if the logarithms of distances fit it as well as the best, up to so much.
_SLACK = 0.1
#: A claim is out of question if the distances misfit it so many times as much as the nearest.
_CLEARER = 1.4


def settle_duplicates(members: Sequence[Same], distance_MM: np.ndarray, *, scan: bool) -> None:
    """Find the place that each group of the same weights is of, and say of the others what they are.

    Args:
        members: of one birth.
        distance_MM: between every two of them.
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
    """The places that may be those of checkpoint ``i``: one where the others tell it, by the curve through them or by
    how far they are; none where they all lie elsewhere."""
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
    """The steps of all chains with checkpoint ``i`` at every place between the others, before and behind them."""
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
    """The claims of ``i`` that its distances to the checkpoints of the same training allow, under every law that fits
    the distances between those."""
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
    """Say of checkpoints with the same weights that they are.

    Args:
        same: of them.
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
    """Find a difference between two checkpoints of equal samples; None without one, or if they are not read whole."""
    if not (a.is_local and b.is_local):
        return None
    with weights_of(a) as ours, weights_of(b) as theirs:
        found = None if ours is None or theirs is None else exact_difference(ours, theirs)
    return None if found is None else f"{found.n_values:,} of {found.n_all:,} values (first {found.first})"
