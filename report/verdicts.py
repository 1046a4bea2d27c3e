"""The head of a page: few figures below its title, and what they say, in sentences (docs/quantities.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..files import finite_or_nan
from ..findings.attention_sink import ON_PROBE, SinkReading, chain_group, position_or_token, sink
from ..findings.chain_links import aggregation, dominance, gradient, lock, neurons, peak_of, rank
from ..findings.formatting import format_p, format_value, in_ascii
from ..findings.learning import loss, missing_quantities, skipped_steps
from ..findings.massive_channel import dominance_by_block
from ..findings.run_history import BIRTH, RunHistory, Start
from ..findings.seed_mark import birth_bias, direction, lineage, preference, ranking
from ..findings.verdict import Tone, Verdict, scalar
from ..measure.records import Snapshot
from ..messages import printable
from ..metrics.quantities import LOGGED, MEASURED, SECTIONS, shown_name

# ---------------------------------------------------------------- figures below the title

KeyFigure = tuple[str, str, str]
_SINK = SECTIONS["sink"].headline


def run_figures(run: RunHistory) -> list[KeyFigure]:
    """Key figures of a run: its lineage test, its validation loss, and its newest snapshot beside birth."""
    newest = run.last or run.first
    bias: Mapping[str, Any] = newest.bias if newest else {}
    steps, losses = run.series("val/loss")
    return [
        *lineage_figure(run.rows, run.start),
        *([_loss(run, steps, losses)] if run.birth or losses else []),
        *_against_birth(run.start, bias),
        _favourite(run, bias),
        _sink_figure(newest),
    ]


def _favourite(run: RunHistory, bias: Mapping[str, Any]) -> KeyFigure:
    """Return the preference for the favourite token, at the start and now."""
    ratio, when = _value("preference_ratio", bias), ""
    if run.first is not None and run.last is not None:
        ratio, when = f"{_value('preference_ratio', run.first.bias)} → {ratio}", f", {run.start.noun} → now"
    return _title("preference_ratio"), ratio, f"V · max p̄{when}; 1 is none"


def snapshot_figures(snapshot: Snapshot) -> list[KeyFigure]:
    """Key figures of a snapshot; comparisons with birth only if birth is known."""
    bias, start = snapshot.bias, RunHistory.of_snapshot(snapshot).start
    figures = [
        _sink_figure(snapshot),
        _dominance(snapshot),
        (_title("preference_ratio"), _value("preference_ratio", bias), "V · max p̄; 1 is none"),
    ]
    if "alignment" in bias:
        return figures + _against_birth(start, bias)
    return [
        *figures,
        ("Contraction", _value("inter", bias), f"across sequences; within them {_value('intra', bias)}"),
        _effective_rank(snapshot),
    ]


def _against_birth(start: Start, bias: Mapping[str, Any]) -> list[KeyFigure]:
    """Compare with birth, beside strangers where they were measured."""
    compared = {"alignment": start.says("with the seed direction"), "rank_persistence": f"ρ to {start.noun}"}
    return [
        (_title(name), _value(name, bias), _judged(what, name, bias) if MEASURED[name].control in bias else what)
        for name, what in compared.items()
    ]


def _dominance(snapshot: Snapshot) -> KeyFigure:
    group = chain_group(snapshot)
    value, block = peak_of(snapshot, "dominance_first", group)
    found, quantity = dominance_by_block(snapshot, group), MEASURED["dominance_first"]
    median = scalar(snapshot, "dominance_median", group) if found is None else float(found.controls[found.peak])
    beside = f"median {format_value(median, quantity.format)}{'' if group == 'bias' else f', {ON_PROBE[group]}'}"
    return "Dominance", format_value(value, quantity.format), f"of position 0{f', {block}' if block else ''}; {beside}"


def _effective_rank(snapshot: Snapshot) -> KeyFigure:
    group = chain_group(snapshot)
    value, block = peak_of(snapshot, "effective_rank", group)
    last = _value("effective_rank", snapshot.summary[group])
    what = f"lowest, after {block}; last block {last}" if block else "of the last block's states"
    return _title("effective_rank"), format_value(value, MEASURED["effective_rank"].format), what


def lineage_figure(rows: Sequence[Mapping[str, Any]], start: Start = BIRTH) -> list[KeyFigure]:
    """Return the newest lineage test of a run's rows (`run_history.join_rows`), if there is one: z, p, and the
    strangers' z.
    """
    tested = [row for row in rows if "seedprint_z" in row]
    if not tested:
        return []
    row = tested[-1]
    judged = f"against its own {start.label}; p {format_p(row['seedprint_log10_p'])}"
    if "seedprint_z_stranger" in row:
        judged += f"; against other births at most {format_value(row['seedprint_z_stranger'], '.1f')}"
    return [("Lineage", f"z {format_value(row['seedprint_z'], '.1f')}", judged)]


def _loss(run: RunHistory, steps: list[int], losses: list[float]) -> KeyFigure:
    loss = LOGGED["val/loss"]
    unigram = format_value(run.unigram_entropy, loss.format)
    last = f"; step {steps[-1]:,}" if steps else ""
    value = format_value(losses[-1] if losses else None, loss.format)
    return "Validation loss", value, f"unigram entropy {unigram}, {loss.unit}{last}"


def _sink_figure(snapshot: Snapshot | None) -> KeyFigure:
    """Return the sink mass on text, if measured, with the figure of random tokens beside it."""
    summary: Mapping[str, Any] = snapshot.summary if snapshot else {}
    reading = SinkReading.leading(snapshot)
    bias, lead = summary.get("bias", {}), summary.get(reading.group, {})
    beside = "" if reading.group == "bias" else f"; random tokens {_value(shown_name(_SINK, bias), bias)}"
    place = "on the first token of a document" if reading.of_documents else "on position 0"
    may = "" if reading.group == "bias_text" else ", text may have more"
    what = f"mean over heads, {place}, {ON_PROBE[reading.group]}{may}"
    shown = shown_name(reading.mass, lead)
    title = _title(shown_name(_SINK, lead))
    return title, _value(shown, lead), _judged(what, shown, lead) + beside


def _judged(what: str, name: str, scalars: Mapping[str, float]) -> str:
    """Return ``what`` with the value of the quantity's control."""
    quantity = MEASURED[name]
    level = quantity.level({"bias": scalars})
    return f"{what}; {quantity.control_label} {format_value(finite_or_nan(level), quantity.format)}"


def _title(name: str) -> str:
    return MEASURED[name].label.capitalize()


def _value(name: str, scalars: Mapping[str, float]) -> str:
    return format_value(scalars.get(name), MEASURED[name].format)


# ---------------------------------------------------------------- verdicts
# Conclusions from the numbers of a run, in sentences that are never stronger than the numbers (docs/quantities.md).
#
# Every sentence names its control, or says that there is none. The limits of "large" and "small" stand in
# :mod:`birthmark.findings.thresholds`.

__all__ = ["QUESTIONS", "Tone", "Verdict", "printed", "snapshot_verdicts", "verdicts"]

Question = Callable[[RunHistory], Verdict | None]

#: Questions about one snapshot, with the sink and its chain first.
_OF_SNAPSHOT: tuple[Question, ...] = (sink, position_or_token, neurons, dominance, aggregation, lock, gradient, rank)

QUESTIONS: tuple[Question, ...] = (
    missing_quantities,
    skipped_steps,
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

_MEANINGS: Mapping[Tone, str] = {
    "present": "beyond its control",
    "weak": "beyond it, but small",
    "absent": "nothing that stands out from its control",
    "unclear": "the numbers cannot tell",
}


def legend_of_marks(found: Iterable[Verdict], *, ascii_only: bool = False) -> str:
    """Explain the marks that stand before these verdicts, in a line."""
    tones = {verdict.tone for verdict in found}
    separator = "   " if ascii_only else " · "
    return separator.join(f"{MARKS[tone][ascii_only]} {_MEANINGS[tone]}" for tone in MARKS if tone in tones)


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
        sentence = printable(verdict.sentence)
        sentence = in_ascii(sentence) if ascii_only else sentence
        lines.add_row(MARKS[verdict.tone][ascii_only], Text(sentence))
    if found:
        lines.add_row("", Text(legend_of_marks(found, ascii_only=ascii_only), style="dim"))
    return lines
