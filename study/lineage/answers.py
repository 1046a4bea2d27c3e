"""Answers to "do these models share a birth?" in one sentence, never stronger than the tests behind it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from ...findings.thresholds import threshold
from ...findings.wording import in_prose, p_in_prose
from ...metrics.seedprint import Fingerprint
from .compare import ModelPair

#: Caveats that a reader needs beside the answer.
CANNOT_TELL = (
    "The test cannot tell which model came first, nor why two share a birth. Drift from a known start can: "
    "birthmark fingerprint START CHECKPOINT …, START being a birth (CONFIG@SEED) or the pretrained model that training "
    "went on from; z falls as training goes on."
)
_TERMS = "z: standard deviations above what the null expects; kin: p < .01; {what}; stranger: a birth of another seed."
_OF_HIDDEN_STATES = "k: dimensions compared; N: inputs that every model read"
_OF_WEIGHTS = "k: units of blocks compared; N: tokens whose vectors aligned the channels"


def terms(null: str) -> str:
    """Explain the columns of a table of tests."""
    return _TERMS.format(what=_OF_WEIGHTS if null == "matched" else _OF_HIDDEN_STATES)


def answer_of_models(names: Sequence[str], pairs: Sequence[ModelPair], strangers: Sequence[Fingerprint]) -> str:
    """Say which of some models share a birth.

    Args:
        names: names of the models.
        pairs: tests of all pairs.
        strangers: tests of these models against births of other seeds, as the control; may be empty.
    """
    found = [(pair.a, pair.b, pair.fingerprint) for pair in pairs]
    most = max((test.z for test in strangers if not isnan(test.z)), default=float("nan"))
    if len(names) == 2:
        return _of_two(names[0], names[1], found[0][2], most)
    return _of_many(names, found, most)


def _control(most: float) -> str:
    return "without strangers as a control" if isnan(most) else f"against strangers at most {in_prose(most, 1)}"


def _is_clear(test: Fingerprint, most: float) -> bool:
    """Return True if z exceeds the largest control by the margin, or if there are no controls."""
    return isnan(most) or test.z >= most + threshold("lineage_margin")


def _of_two(a: str, b: str, test: Fingerprint, most: float) -> str:
    if test.verdict == "undefined":
        return f"Whether {b} shares its birth with {a} cannot be told: {test.reason}."
    numbers = f"z {in_prose(test.z, 1)}, {p_in_prose(test.log10_p)}, {_control(most)}"
    if test.verdict == "stranger" and test.reversed:
        return (
            f"{a} and {b} are no plain strangers: {numbers}; z this far below 0 hints at kin with signs flipped, which "
            "--null matched undoes."
        )
    if test.verdict == "stranger":
        return f"{a} and {b} are strangers, as far as this test can see: {numbers}."
    if not _is_clear(test, most):
        return f"Whether {b} shares its birth with {a} cannot be told: strangers do nearly as well ({numbers})."
    return f"{b} shares its birth with {a}: {numbers}."


def _of_many(names: Sequence[str], found: Sequence[tuple[int, int, Fingerprint]], most: float) -> str:
    kin = [(a, b, test) for a, b, test in found if test.verdict == "kin" and _is_clear(test, most)]
    undefined = sum(test.verdict == "undefined" for *_, test in found)
    unclear = sum(test.verdict == "kin" and not _is_clear(test, most) for *_, test in found)
    groups = _groups(len(names), [(a, b) for a, b, _ in kin])
    apart = max((t.z for a, b, t in found if not isnan(t.z) and groups[a] is not groups[b]), default=float("nan"))
    families = [group for group in {id(group): group for group in groups}.values() if len(group) > 1]
    left = f"; {undefined + unclear} of {len(found)} pairs cannot be told" if undefined + unclear else ""
    if not families:
        beside = "no test was possible" if isnan(apart) else f"z at most {in_prose(apart, 1)}, {_control(most)}"
        return f"None of the {len(names)} models is seen to share a birth with another: {beside}{left}."
    least = min(test.z for *_, test in kin)
    numbers = f"kin have z {in_prose(least, 1)} or more, {_control(most)}"
    if len(families) == 1 and len(families[0]) == len(names):
        return f"All {len(names)} models share one birth: {numbers}{left}."
    together = "; ".join(" and ".join(filter(None, [", ".join(m[:-1]), m[-1]])) for m in _named(names, families))
    others = "" if isnan(apart) else f", other pairs at most {in_prose(apart, 1)}"
    return f"A birth is shared by {together}: {numbers}{others}{left}."


def _named(names: Sequence[str], families: Sequence[Sequence[int]]) -> list[list[str]]:
    return [[names[i] for i in sorted(family)] for family in families]


def _groups(n: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return, for each model, those that it is connected with, itself included; one list per group."""
    groups = [[i] for i in range(n)]
    for a, b in edges:
        if groups[a] is not groups[b]:
            merged = groups[a] + groups[b]
            for i in merged:
                groups[i] = merged
    return groups


def answer_of_seeds(name: str, ranked: Sequence[tuple[int, Fingerprint]]) -> str:
    """Name the seed that a model was born from, among candidates sorted best first."""
    (seed, best), n = ranked[0], len(ranked)
    rest = [test.z for _, test in ranked[1:] if not isnan(test.z)]
    most = max(rest, default=float("nan"))
    if best.verdict == "undefined":
        return f"Which seed {name} was born from cannot be told: {best.reason}."
    others = f", the other {n - 1} at most {in_prose(most, 1)}" if rest else ", without another to compare with"
    numbers = f"z {in_prose(best.z, 1)}, {p_in_prose(best.log10_p)} for {n} candidate{'s' if n > 1 else ''}{others}"
    if best.verdict == "stranger":
        return f"None of {n} seeds is seen in {name}: the best, {seed}, has {numbers}."
    if not _is_clear(best, most):
        return f"Which seed {name} was born from cannot be told: {seed} has {numbers}."
    return f"{name} was born from seed {seed}: {numbers}."
