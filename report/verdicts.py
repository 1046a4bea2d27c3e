"""Conclusions from the numbers of a run, in sentences that are never stronger than the numbers (docs/quantities.md).

Every sentence names its control, or says that there is none. The limits of "large" and "small" stand in
:mod:`birthmark.findings.thresholds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from ..findings.attention_sink import position_or_token, sink
from ..findings.chain_links import aggregation, dominance, gradient, lock, neurons, rank
from ..findings.learning import loss, what_is_missing
from ..findings.seed_mark import birth_bias, direction, lineage, preference, ranking
from ..findings.verdict import Tone, Verdict, in_ascii
from .run_history import RunHistory

__all__ = ["QUESTIONS", "Tone", "Verdict", "printed", "snapshot_verdicts", "verdicts"]

Question = Callable[[RunHistory], Verdict | None]

#: Questions about one snapshot, with the sink and its chain first.
_OF_SNAPSHOT: tuple[Question, ...] = (sink, position_or_token, neurons, dominance, aggregation, lock, gradient, rank)

QUESTIONS: tuple[Question, ...] = (
    what_is_missing,
    loss,
    birth_bias,
    direction,
    ranking,
    lineage,
    *_OF_SNAPSHOT,
    preference,
)
"""Questions in the order of the page."""

MARKS: Mapping[Tone, tuple[str, str]] = {
    "present": ("●", "*"),
    "weak": ("◐", "+"),
    "absent": ("○", "-"),
    "unclear": ("?", "?"),
}
"""Mark of each tone of a verdict, and its ASCII replacement."""


def verdicts(history: RunHistory) -> list[Verdict]:
    """Return the verdicts on a run, the most important first; a question without numbers has no verdict."""
    return _answers(history, QUESTIONS)


def snapshot_verdicts(history: RunHistory) -> list[Verdict]:
    """Return the verdicts on the newest snapshot of a run, the sink first; a question without numbers has no
    verdict.
    """
    return _answers(history, (*_OF_SNAPSHOT, preference, birth_bias, direction, ranking))


def _answers(history: RunHistory, questions: Sequence[Question]) -> list[Verdict]:
    found = [question(history) for question in questions]
    return [verdict for verdict in found if verdict is not None]


def printed(found: Sequence[Verdict], *, ascii_only: bool) -> Table:
    """Lay out verdicts for a terminal, each after the mark of its tone."""
    lines = Table.grid(padding=(0, 1))
    for verdict in found:
        sentence = in_ascii(verdict.sentence) if ascii_only else verdict.sentence
        lines.add_row(MARKS[verdict.tone][ascii_only], Text(sentence))
    return lines
