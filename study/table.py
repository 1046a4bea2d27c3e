"""Kinds of study, by the ``kind`` in a study file."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..errors import UsageError
from ..models.user_classes import import_user_class, is_user_class, name_user_code
from ..schema import quoted
from .arms.run import plan_arms, run_arms
from .lineage.run import plan_lineage, run_lineage
from .runner import Failure
from .study_file import StudyRequest, read_fields
from .trials import Planned, check_buildable, check_stored


class Kind(NamedTuple):
    """Functions for a kind of study; a study file names one of the package, or any other as ``module:KIND``."""

    run: Callable[[StudyRequest], list[Failure]]
    """Run it; the runs that failed."""
    plan: Callable[[StudyRequest], Planned]
    """Function that lists its runs, before any has run."""


#: By the name in the file. A file without a kind has arms.
KINDS: dict[str, Kind] = {
    "arms": Kind(run_arms, plan_arms),
    "lineage": Kind(run_lineage, plan_lineage),
}


def kind_of(file: Path) -> Kind:
    """Return the kind of a study file.

    Raises:
        UsageError: no kind has that name, or what the name imports is no kind.
    """
    name = read_fields(file).get("kind", "arms")
    if isinstance(name, str) and is_user_class(name):
        name_user_code(name)  # a person named the file
        kind = import_user_class(name, f"{file}: kind")
        if not isinstance(kind, Kind):
            raise UsageError(f"{file}: kind {name} is {quoted(kind)}: give a birthmark.study.table.Kind")
        return kind
    if not isinstance(name, str) or name not in KINDS:
        close = difflib.get_close_matches(str(name), KINDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"give {', '.join(KINDS)} or module:KIND"
        raise UsageError(f"{file}: kind is {name!r}: no such kind; {hint}")
    return KINDS[name]


def run_study(request: StudyRequest) -> list[Failure]:
    """Run the study in a file, of any kind; return the runs that failed."""
    return kind_of(request.file).run(request)


def plan_study(request: StudyRequest) -> Planned:
    """Plan the runs of the study in a file, checked as before a start, and write down their overrides.

    Raises:
        UsageError, RunError: a model that cannot be built, or a folder that holds something else.
    """
    planned = kind_of(request.file).plan(request)
    for trial in planned.trials:
        check_stored(trial)
    check_buildable(planned.trials)
    request.keep_overrides(planned.out)
    return planned
