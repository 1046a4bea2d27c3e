"""An audit for people and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from ..files import strict
from ..metrics.between.weight_kinship import FEWEST_TENSORS
from ..report.terminal import Heading, print_table
from ..report.text import format_value
from .audit_suite import Audit
from .judged import listed


def sentence(found: Audit) -> str:
    """The answer in a sentence."""
    n, wrong = len(found.judged), sum(bool(one.findings) for one in found.judged)
    if n > 1 and all(one.content is None for one in found.judged):
        return f"none of {n} checkpoints can be read"
    if n == 1:
        return "one checkpoint, beside no other: " + ("it is not what it says" if wrong else "nothing is wrong with it")
    if not wrong and (unknown := len(found.of_unknown_birth)):
        those = "they share a birth" if unknown == n else f"{unknown} of them share{'s' * (unknown == 1)} their birth"
        why = f"fewer than {FEWEST_TENSORS} tensors can be compared"
        return f"{n} checkpoints: nothing is wrong with them, but whether {those} cannot be told: {why}"
    if not wrong:
        known = found.direction is None or found.direction.towards != "unknown"
        but = "" if known else ", but whether they stand in the order of training or in the reverse cannot be told"
        return f"{n} checkpoints of one birth: nothing is wrong with them{but}"
    says = "is not what it says" if wrong == 1 else "are not what they say"
    return f"{wrong} of {n} checkpoints {says}" + (f"; {found.overwritten}" if found.overwritten else "")


def notes_of_suite(found: Audit) -> list[str]:
    """List what is worth knowing of the suite and not wrong, or cannot be told and why, in a line each."""
    lines = list(found.notes)
    if unknown := found.of_unknown_birth:
        lines.append(f"birth unknown: fewer than {FEWEST_TENSORS} tensors can be compared of {listed(unknown)}")
    if found.direction is not None and found.direction.towards == "unknown":
        lines.append(f"direction unknown: {found.direction.why}")
    return lines


def as_json(found: Audit) -> dict[str, Any]:
    """All of it; what is no number is null."""
    members = [
        {
            "name": one.member.name,
            "stage": None if one.member.place is None else one.member.place.stage_words or None,
            "ingredient": None if one.member.place is None else one.member.place.ingredient or None,
            "step": one.member.step,
            "verdict": "wrong" if one.findings else one.verdict,
            "findings": [{"kind": finding.kind, "what": finding.what} for finding in one.findings],
            "notes": one.notes,
            "digest": None if one.content is None else one.content.sampled.digest,
            "bytes_sampled": None if one.content is None else one.content.sampled.bytes_read,
            "bytes": None if one.content is None else one.content.sampled.n_bytes,
            "cosine_with_first": one.cosine_with_first,
            "distance_from_previous": one.distance_from_previous,
        }
        for one in found.judged
    ]
    answer: dict[str, Any] = strict(
        {
            "sentence": sentence(found),
            "checkpoints": members,
            "births": [[one.member.name for one in group] for group in found.births],
            "birth_unknown": [one.member.name for one in found.of_unknown_birth],
            "order": [one.member.name for one in found.order],
            "notes": found.notes,
            "direction": None if found.direction is None else found.direction._asdict(),
        }
    )
    return answer


def print_audit(found: Audit, console: Console) -> None:
    """The sentence, a row for each checkpoint, and below them what is wrong with which."""
    console.print(sentence(found), highlight=False, soft_wrap=True, markup=False)
    numbers = ("step", "cosine with first", "from previous")
    rows: list[list[str | Text]] = [
        [
            one.name,
            "–" if one.member.step is None else str(one.member.step),
            format_value(one.cosine_with_first, ".3f"),
            format_value(one.distance_from_previous, ".3f"),
            Text(one.verdict, style="red" if one.findings else "yellow" if one.is_open else "green"),
        ]
        for one in found.judged
    ]
    headings = [Heading("checkpoint", "name"), *map(Heading, numbers), Heading("verdict", "text")]
    print_table(console, headings, rows)
    for line in notes_of_suite(found):
        console.print(f"note: {line}", highlight=False, soft_wrap=True, markup=False)
    for one in found.judged:
        for text in (*(finding.what for finding in one.findings), *(f"note: {note}" for note in one.notes)):
            console.print(f"{one.name}: {text}", highlight=False, soft_wrap=True, markup=False)
