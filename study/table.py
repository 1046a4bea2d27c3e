"""Kinds of study, by the ``kind`` in a study file."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..errors import UsageError
from .arms.run import plan_arms, run_arms
from .lineage.run import plan_lineage, run_lineage
from .robustness.run import plan_robustness, run_robustness
from .runner import Failure
from .seeds.run import plan_seeds, run_seeds
from .study_file import StudyRequest, read_fields
from .trials import Planned, check_buildable, check_stored


class Kind(NamedTuple):
    """Functions for a kind of study."""

    run: Callable[[StudyRequest], list[Failure]]
    """Run it; the runs that failed."""
    plan: Callable[[StudyRequest], Planned]
    """Function that lists its runs, before any has run."""


#: By the name in the file. A file without a kind has arms.
KINDS: dict[str, Kind] = {
    "arms": Kind(run_arms, plan_arms),
    "lineage": Kind(run_lineage, plan_lineage),
    "robustness": Kind(run_robustness, plan_robustness),
    "seeds": Kind(run_seeds, plan_seeds),
}


def kind_of(file: Path) -> str:
    """Return the kind of a study file; UsageError if there is none of that name."""
    kind = read_fields(file).get("kind", "arms")
    if not isinstance(kind, str) or kind not in KINDS:
        close = difflib.get_close_matches(str(kind), KINDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(KINDS)}"
        raise UsageError(f"{file}: kind is {kind!r}: no such kind; {hint}")
    return kind


def run_study(request: StudyRequest) -> list[Failure]:
    """Run the study in a file, of any kind; return the runs that failed."""
    return KINDS[kind_of(request.file)].run(request)


def plan_study(request: StudyRequest) -> Planned:
    """Plan the runs of the study in a file, checked as before a start, and write down their overrides.

    Raises:
        UsageError, RunError: a model that cannot be built, or a folder that holds something else.
    """
    planned = KINDS[kind_of(request.file)].plan(request)
    for trial in planned.trials:
        check_stored(trial)
    check_buildable(planned.trials)
    request.keep_overrides(planned.out)
    return planned
