"""`birthmark ablate`: a study by the kind that its file says it is."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from pathlib import Path

from jsonargparse import Namespace

from ...errors import UsageError
from ...study.arms.run import arms
from ...study.lineage.run import lineage
from ...study.reading import read_fields
from ...study.runner import Failure

#: What is done with a study file by its ``kind``; a file without one has arms.
KINDS: dict[str, Callable[[Namespace], list[Failure]]] = {"arms": arms, "lineage": lineage}


def kind_of(file: Path) -> str:
    """The kind of a study file; UsageError if there is none of that name."""
    kind = read_fields(file).get("kind", "arms")
    if not isinstance(kind, str) or kind not in KINDS:
        close = difflib.get_close_matches(str(kind), KINDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(KINDS)}"
        raise UsageError(f"{file}: kind is {kind!r}: no such kind; {hint}")
    return kind


def ablate(parsed: Namespace) -> int:
    """Run the study in a file; the exit status."""
    if parsed.jobs < 1:
        raise UsageError(f"--jobs {parsed.jobs}: give at least 1")
    failures = KINDS[kind_of(Path(parsed.study))](parsed)
    for failure in failures:
        print(f"birthmark: error: {failure.trial.label}: {failure.reason} ({failure.trial.log})", file=sys.stderr)
    return 1 if failures else 0
