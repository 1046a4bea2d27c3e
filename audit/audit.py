"""Audit of a suite: every checkpoint is read once, and all are judged together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import RunError, UsageError
from ..findings.formatting import in_few_words, without_shared_folder
from ..metrics.weight_kinship import Kinship, births, kinships
from .checkpoint import Judged, Member, Same, listed, read_content
from .mixed_weights import say_mixed
from .training_order import Direction, missing_places
from .wrong_content import alike, compare_configs, of_one_shape, part_runs, say_duplicates, say_means, settle_duplicates
from .wrong_order import Curve


@dataclass(frozen=True)
class Audit:
    """Result of an audit."""

    judged: list[Judged]
    births: list[list[Judged]]
    """Groups of checkpoints that share a birth, as tests have shown, the largest first."""
    order: list[Judged]
    """Checkpoints of the largest birth, and those whose birth no test can tell, in the order of training; one for each
    set of equal weights.
    """
    direction: Direction | None
    """Direction of training through ``order``: as given, or reversed; None for one checkpoint."""
    compared: list[Judged]
    """Checkpoints whose weights could be compared, those with the same weights side by side."""
    cosine_MM: np.ndarray
    """Cosine of the weights of every two of them, mean over tensors."""
    overwritten: str = ""
    """Sentence saying that most of the suite has the same weights, and those of which checkpoint."""
    notes: list[str] = field(default_factory=list)
    """Notes about the suite that are worth knowing but not faults."""

    @property
    def of_unknown_birth(self) -> list[Judged]:
        """Checkpoints for which no test can tell if they share a birth with the others."""
        return [one for one in self.judged if one.birth_unknown]

    @property
    def is_right(self) -> bool:
        """True if nothing was found."""
        return not any(one.findings for one in self.judged)


def audit(
    members: Sequence[Member],
    *,
    scan: bool = True,
    advance: Callable[[int], object] = lambda n_members: None,
    absent: Sequence[str] = (),
) -> Audit:
    """Read every checkpoint once, one at a time, and judge them together.

    Args:
        members: checkpoints of the suite.
        scan: read all values of each, to find broken ones and to compare those whose samples are alike; otherwise about
            a thousandth of the bytes is read.
        advance: called with 1 after each.
        absent: names of further checkpoints in a listing of the suite.

    Raises:
        RunError: all of them were deleted meanwhile.
    """
    names = without_shared_folder([member.name for member in members])
    judged: list[Judged] = []
    deleted: list[str] = []
    for member, name in zip(members, names, strict=True):
        one = Judged(member, name)
        try:
            one.content = read_content(member, scan=scan)
        except (RunError, UsageError, OSError) as error:
            if member.is_deleted:
                deleted.append(one.label)
                advance(1)
                continue
            one.found("damaged", str(error).removeprefix(f"{member.name}: ").removeprefix(f"{member.name}/"))
        else:
            for what in one.content.sampled.broken:
                one.found("values", what)
        judged.append(one)
        advance(1)
    if not judged:
        raise RunError(f"{members[0].name}: deleted while the suite was read, as all of it; name checkpoints that stay")
    compare_configs(judged)
    distinct = alike(of_one_shape(judged))
    notes = part_runs(distinct)
    tensors, of_tensors = say_mixed(distinct)
    notes += [*of_tensors, *_absent(members, absent)]
    if deleted:
        notes.append(f"deleted while the suite was read, and not judged: {in_few_words(deleted)}")
    say_means(distinct)
    own = [i for i, same in enumerate(distinct) if not same.is_copy]
    distinct, distance_MM = [distinct[i] for i in own], tensors.without_mixed()[np.ix_(own, own)]
    tests_MM = kinships([same.unshared_values for same in distinct])
    groups, of_curve = _births(distinct, tests_MM)
    for group in groups[1:]:
        for same in group:
            if len(same.members) > 1:
                same.right = same.claims
                say_duplicates(same, scan=scan)
    order: list[Same] = []
    direction = None
    of_curve = [i for i in of_curve if not distinct[i].is_mean]
    if of_curve:
        on_curve = [distinct[i] for i in of_curve]
        distance_MM = distance_MM[np.ix_(of_curve, of_curve)]
        settle_duplicates(on_curve, distance_MM, scan=scan)
        curve = Curve(on_curve, distance_MM)
        order, direction = curve.judge(), curve.direction
    of_same = [i for i, same in enumerate(distinct) for _ in same.members]
    cosine_MM = np.array([[tests_MM[a][b].cosine for b in of_same] for a in of_same]).reshape(2 * [len(of_same)])
    by_birth = [[one for one in _all(group) if not one.birth_unknown] for group in groups]
    return Audit(
        judged,
        births=[group for group in by_birth if group],
        order=[same.members[0] for same in order],
        direction=direction,
        compared=_all(distinct),
        cosine_MM=cosine_MM,
        overwritten=_overwritten(distinct, len(judged)),
        notes=notes,
    )


def _absent(members: Sequence[Member], listed_only: Sequence[str]) -> list[str]:
    """Name checkpoints that are listed, or belong to a regular row, and are missing: one line each."""
    lines = [f"listed, and not in the suite: {in_few_words(listed_only)}"] if listed_only else []
    if missing := missing_places(member.place for member in members if member.place is not None):
        words = in_few_words([place.words for place in missing])
        lines.append(f"not in the suite, whose steps are otherwise regular: {words}")
    return lines


def _overwritten(distinct: Sequence[Same], n_judged: int) -> str:
    for same in distinct:
        n = sum(one.member.place is not None for one in same.members)
        if len(same.claims) > 1 and 2 * n > n_judged:
            if len(same.right) == 1:
                return f"{n - 1} are copies of {same.right[0].words}"
            return f"{n} have the same weights, and nothing tells whose they are"
    return ""


def _all(group: Sequence[Same]) -> list[Judged]:
    return [one for same in group for one in same.members]


def _births(found: Sequence[Same], tests_MM: Sequence[Sequence[Kinship]]) -> tuple[list[list[Same]], list[int]]:
    """Group the checkpoints by birth, the largest first; return also those whose order is judged: that group and those
    that no test can tell from it. Reports the others as strangers to it.
    """
    kin_MM = np.array([[test.verdict is True for test in row] for row in tests_MM]).reshape(2 * [len(found)])
    places = births(kin_MM)

    # Copies of one checkpoint do not make its birth the usual one.
    def size(group: Sequence[int]) -> tuple[int, int, float]:
        steps = [claim.step for i in group for claim in found[i].claims]
        return -len(group), -len(_all([found[i] for i in group])), min(steps, default=np.inf)

    places.sort(key=size)
    largest = places[0] if places else []
    untested = [group for group in places[1:] if any(tests_MM[a][b].verdict is None for a in group for b in largest)]
    strangers = [group for group in places[1:] if group not in untested]
    unknown = [i for group in untested for i in group]
    # A lone checkpoint that can be tested against none of them shares a birth with nothing known.
    is_alone = bool(unknown) and len(_all([found[i] for i in largest])) == 1
    for one in _all([found[i] for i in [*unknown, *(largest if is_alone else [])]]):
        one.birth_unknown = True
    everyone = _all(found)
    # Where two suites have the same steps, steps alone name nobody.
    is_named = len({one.label for one in everyone}) < len(everyone)
    for group in strangers:
        best = max((tests_MM[a][b] for a in group for b in places[0]), key=lambda test: test.cosine)
        own = _all([found[i] for i in group])
        for one in own:
            one.found(
                "stranger",
                f"no sign of a shared birth with {listed(_all([found[i] for i in places[0]]), by_name=is_named)}: "
                f"the cosine of weights is at most {best.cosine:.3f} (p {best.p:.2g}), in the median tensor "
                f"{best.median:.3f}"
                + (f"; {listed(own, by_name=is_named)} share a birth of their own" if len(own) > 1 else ""),
            )
    groups = [[found[i] for i in group] for group in (largest, *strangers)] if places else []
    return groups, sorted([*largest, *unknown])
