"""What the numbers of a run say, in sentences that are never stronger than the numbers (docs/verdicts.md).

Every sentence names its control, or says that there is none. What it calls large or small stands in
:mod:`birthmark.findings.thresholds`.
"""

from __future__ import annotations

from collections.abc import Callable

from ..findings.learning import loss, what_is_missing
from ..findings.seed_mark import birth_bias, direction, lineage, ranking
from ..findings.sink_chain import aggregation, dominance, lock, neurons, sink
from ..findings.verdict import Tone, Verdict
from .run_history import RunHistory

__all__ = ["QUESTIONS", "Tone", "Verdict", "verdicts"]

QUESTIONS: tuple[Callable[[RunHistory], Verdict | None], ...] = (
    what_is_missing,
    loss,
    birth_bias,
    direction,
    ranking,
    lineage,
    sink,
    aggregation,
    neurons,
    dominance,
    lock,
)
"""In the order of the page."""


def verdicts(history: RunHistory) -> list[Verdict]:
    """What a run's numbers say, what matters most first; a question without numbers has no verdict."""
    found = [question(history) for question in QUESTIONS]
    return [verdict for verdict in found if verdict is not None]
