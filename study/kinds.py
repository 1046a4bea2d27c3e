"""The kinds of study, by the ``kind`` that a study file names."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from ..errors import UsageError
from .arms.run import run_arms
from .lineage.run import run_lineage
from .reading import read_fields
from .request import StudyRequest
from .robustness.run import run_robustness
from .runner import Failure

#: From a request to the runs that failed, by kind. A file without a kind has arms.
KINDS: dict[str, Callable[[StudyRequest], list[Failure]]] = {
    "arms": run_arms,
    "lineage": run_lineage,
    "robustness": run_robustness,
}


def kind_of(file: Path) -> str:
    """The kind of a study file; UsageError if there is none of that name."""
    kind = read_fields(file).get("kind", "arms")
    if not isinstance(kind, str) or kind not in KINDS:
        close = difflib.get_close_matches(str(kind), KINDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(KINDS)}"
        raise UsageError(f"{file}: kind is {kind!r}: no such kind; {hint}")
    return kind


def run_study(request: StudyRequest) -> list[Failure]:
    """Run the study in a file, of whichever kind it is; the runs that failed."""
    return KINDS[kind_of(request.file)](request)
