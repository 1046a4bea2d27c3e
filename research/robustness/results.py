"""The results of a study of robustness: every changed model against every base, and the rates of every change."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

from ...data.cache import fingerprint
from ...errors import RunError
from ...files import read_json, strict, write_text
from ...measure.hidden_states import FingerprintProbe, hidden_states, weights_digest
from ...metrics.config import Null
from ...metrics.seedprint import Fingerprint
from ...models.decoder import Decoder
from ...study.lineage.calibration import KinRate
from ...study.lineage.comparison import Evidence, compare_evidence, evidence_of
from .treatments import Base, SecondRole, Text, Treatment, Workplace
from .trials import UNCHANGED, RobustnessStudy

Reference = Literal["trained", "birth"]
REFERENCES: tuple[Reference, ...] = ("trained", "birth")
"""References of a changed model: the end of a base, and its birth."""
_FORMAT = 1


@dataclass(frozen=True)
class ChangedTest:
    """A test of one changed model against one model of a base."""

    change: str
    """Name of the row."""
    own: int
    """Seed of the birth that the changed model has."""
    second: int | None
    """Seed of the other model that went into it, if one did."""
    role: SecondRole
    """Role of that seed's model for the changed one."""
    reference: Reference
    """Reference: the end of a base, or its birth."""
    seed: int
    """Seed of that base."""
    test: str
    """Name of the test."""
    found: Fingerprint

    @property
    def group(self) -> Literal["own", "second", "stranger"]:
        """Relation of the base to the changed model."""
        return "own" if self.seed == self.own else "second" if self.seed == self.second else "stranger"


def compare_changed(
    study: RobustnessStudy,
    bases: Sequence[Base],
    text: Text,
    out: Path,
    advance: Callable[[int], object] = lambda n_models: None,
    *,
    only_read: bool = False,
) -> list[ChangedTest]:
    """Make every changed model, test it against every base, and free it. Existing outcomes are read.

    Args:
        study: the study, with probes of chosen lengths.
        bases: finished runs, at least three.
        text: text for changes that train.
        out: the study's folder, which keeps the outcomes, change by change.
        advance: called after every changed model.
        only_read: make nothing; missing outcomes are left out.

    Raises:
        RunError: a training of a change diverges, or an outcome on disk is damaged.
    """
    shown = _shown(study, bases[0])
    references = (
        {}
        if only_read
        else {(kind, base.seed): _evidence(_model(base, kind), shown) for base in bases for kind in REFERENCES}
    )
    digests = [weights_digest(base.trained()) for base in bases]
    contents = {path: text.content(path) for change in study.changes.values() for path in change.texts}
    trainings = Counter(change.training for change in study.changes.values() if change.training is not None)
    places = [
        Workplace(base, bases[(number + 1) % len(bases)], text, trainings.copy()) for number, base in enumerate(bases)
    ]
    found = []
    # Change by change: whoever stops it early has whole rows.
    for name, change in ({UNCHANGED: None} | study.changes).items():
        for place in places:
            base, file = place.base, outcome_file(out, name, place.base.seed)
            key = _key(study, change, base, digests, contents)
            tests = read_outcome(file, key)
            if tests is None and only_read:
                continue
            if tests is None:
                model = base.trained() if change is None else change.make(place)
                tests = list(_tests(study, name, change, place, _evidence(model, shown), references))
                kept = {"key": key, "tests": [dataclasses.asdict(test) for test in tests]}
                write_text(file, json.dumps(strict(kept)))
                del model
            found += tests
            advance(1)
    return found


def _model(base: Base, kind: Reference) -> Decoder:
    return base.birth() if kind == "birth" else base.trained()


@dataclass(frozen=True)
class _Shown:
    """Inputs and nulls of one probe of the study."""

    like: FingerprintProbe
    """The probe for models like the first base's birth."""
    nulls: list[Null]
    """Nulls of its tests."""


def _shown(study: RobustnessStudy, base: Base) -> dict[FingerprintProbe, _Shown]:
    """Collect inputs and nulls by probe."""
    birth, found = base.birth(), dict[FingerprintProbe, _Shown]()
    for test in study.tests.values():
        found.setdefault(test.probe, _Shown(test.probe.like(birth), [])).nulls.append(test.recipe.null)
    return found


def _evidence(model: Decoder, shown: Mapping[FingerprintProbe, _Shown]) -> dict[FingerprintProbe, Evidence]:
    """Collect a model's evidence for the tests of every probe."""
    return {probe: evidence_of(model, by.nulls, partial(hidden_states, probe=by.like)) for probe, by in shown.items()}


def _tests(
    study: RobustnessStudy,
    name: str,
    change: Treatment | None,
    place: Workplace,
    evidence: Mapping[FingerprintProbe, Evidence],
    references: Mapping[tuple[Reference, int], Mapping[FingerprintProbe, Evidence]],
) -> Iterator[ChangedTest]:
    own, second = place.base.seed, place.other.seed
    if change is not None and change.of_other:
        own, second = second, own
    role: SecondRole = "" if change is None else change.role
    vocab_size = place.base.trial.config.model.vocab_size
    for (reference, seed), theirs in references.items():
        for test, comparison in study.tests.items():
            probe = comparison.probe
            result = compare_evidence(theirs[probe], evidence[probe], comparison.recipe, probe, vocab_size)
            yield ChangedTest(name, own, second if role else None, role, reference, seed, test, result)


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────────


def outcome_file(out: Path, change: str, seed: int) -> Path:
    """Return the file of the tests of one changed model."""
    return out / "changed" / change / f"seed-{seed}.json"


def _key(
    study: RobustnessStudy,
    change: Treatment | None,
    base: Base,
    digests: Sequence[str],
    contents: Mapping[str | None, str | None],
) -> str:
    """Return the key of one changed model's outcome, over everything that it depends on; ``contents`` has the hash of
    each text (`Text.content`).
    """
    tests = {name: dataclasses.asdict(test) for name, test in study.tests.items()}
    read = [contents[path] for path in (change.texts if change is not None else []) if contents[path] is not None]
    # Outcomes from before the hash was stored stay valid for changes that read no text.
    texts = {"texts": read} if read else {}
    return fingerprint(format=_FORMAT, change=repr(change), seed=base.seed, bases=list(digests), tests=tests, **texts)


def read_outcome(file: Path, key: str) -> list[ChangedTest] | None:
    """Read the tests stored under this key; None if there are none, or under another key.

    Raises:
        RunError: the file is damaged.
    """
    if not file.is_file():
        return None
    content = read_json(file, dict[str, Any])
    if content.get("key") != key:
        return None
    try:
        return [_from_json(test) for test in content["tests"]]
    except (KeyError, TypeError, AttributeError):
        raise RunError(f"{file}: damaged; delete it, and it is made again") from None


def _from_json(values: dict[str, Any]) -> ChangedTest:
    found: dict[str, Any] = {n: math.nan if value is None else value for n, value in values["found"].items()}
    found["warnings"] = tuple(found["warnings"])
    return ChangedTest(**{**values, "found": Fingerprint(**found)})


# ---------------------------------------------------------------- rates
# Rates at which each change keeps kin kin and strangers strangers, and makes a model partly another's.


@dataclass(frozen=True)
class ZRange:
    """z of some pairs that could be tested."""

    rate: KinRate
    """Rate of pairs called kin."""
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of z; NaN without any."""
        return median(self.values) if self.values else float("nan")

    @property
    def least(self) -> float:
        """The smallest z; NaN without any."""
        return min(self.values, default=float("nan"))

    @property
    def most(self) -> float:
        """The largest z; NaN without any."""
        return max(self.values, default=float("nan"))


@dataclass(frozen=True)
class ChangeRates:
    """Rates of one change under one test."""

    change: str
    role: SecondRole
    """Role of the other model for the changed one, if one was used."""
    trained: ZRange
    """Range of z against the end of the run of its own birth."""
    birth: ZRange
    """Range of z against its own birth."""
    strangers: ZRange
    """Range of z against ends and births of all models that did not go into it."""
    second: ZRange
    """Range of z against the end of the run of the other model, if one went into it."""
    partly: KinRate
    """Rate of changed models that are partly of each of two strangers: kin of the ends of both. Empty for changes
    without another model.
    """


def change_rates(results: Sequence[ChangedTest], test: str) -> list[ChangeRates]:
    """Compute the rates of every change under one test, in the order of the file."""
    found = [result for result in results if result.test == test]
    return [
        _rates(change, [r for r in found if r.change == change]) for change in dict.fromkeys(r.change for r in found)
    ]


def _rates(change: str, found: Sequence[ChangedTest]) -> ChangeRates:
    def of(group: str, reference: Reference | None) -> ZRange:
        return _range([r for r in found if r.group == group and reference in (None, r.reference)])

    return ChangeRates(
        change,
        found[0].role,
        of("own", "trained"),
        of("own", "birth"),
        of("stranger", None),
        of("second", "trained"),
        _partly(found),
    )


def _range(found: Sequence[ChangedTest]) -> ZRange:
    z = tuple(r.found.z for r in found if r.found.verdict != "undefined")
    n_kin = sum(r.found.verdict == "kin" for r in found)
    return ZRange(KinRate(len(found), len(found) - len(z), n_kin, float("nan")), z)


def _partly(found: Sequence[ChangedTest]) -> KinRate:
    verdicts: dict[int, list[str]] = {}
    for r in found:
        if r.second is not None and r.reference == "trained" and r.group != "stranger":
            verdicts.setdefault(r.own, []).append(r.found.verdict)
    undefined = sum("undefined" in pair for pair in verdicts.values())
    return KinRate(len(verdicts), undefined, sum(pair == ["kin", "kin"] for pair in verdicts.values()), float("nan"))


def strangers_of_all(results: Sequence[ChangedTest], test: str) -> ZRange:
    """Return z of all pairs of strangers under one test, over all changes."""
    return _range([r for r in results if r.test == test and r.group == "stranger"])
