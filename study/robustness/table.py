"""Tables of a study of robustness: for people, for papers and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...files import csv_text, write_text
from ...metrics.seedprint import LEVEL
from ...report.text import format_value, markdown_table
from ..lineage.calibration import KinRate
from ..lineage.outcomes import FINGERPRINT_COLUMNS, describe_test, fingerprint_cells
from .file import UNCHANGED, RobustnessStudy
from .rates import ChangeRates, ZRange, change_rates, strangers_of_all
from .results import ChangedTest

TITLES = ("change", "its own trained model", "its own birth", "strangers", "the other model")
EXPLAINED = (
    f"Cells: how many tests call the pair kin (p < {LEVEL:g}, z > 0), with the 95 % interval of Clopper and Pearson in "
    "per cent, then z, its median and its range. A changed model is held against the end of the run that it was made "
    "from, against the birth of that run, and against ends and births of all other seeds, its strangers. The other "
    "model is the one that was merged in, of which the changed model is partly, or the one that a birth of another "
    "seed was taught by, of which it is none."
)
INDEPENDENCE = (
    "Intervals take pairs for independent. Pairs of strangers that share a model are not quite, so theirs are a little "
    "too narrow."
)


def outcome(results: Sequence[ChangedTest], test: str) -> str:
    """Summarise a test over all changes in a sentence."""
    rates = [r for r in change_rates(results, test) if r.change != UNCHANGED]
    kept = [r.change for r in rates if r.trained.rate.n_defined and r.trained.rate.n_kin == r.trained.rate.n_defined]
    lost = [r.change for r in rates if r.trained.rate.n_defined and r.change not in kept]
    strangers = strangers_of_all(results, test).rate
    missed = f"; not after {', '.join(lost)}" if lost else ""
    return (
        f"Under the test {test} every changed model is kin of what it was made from after {len(kept)} of "
        f"{len(kept) + len(lost)} changes{missed}. It calls {rate_in_words(strangers)} pairs of strangers kin."
    )


def rate_in_words(rate: KinRate) -> str:
    """Write a rate: ``8 of 8 (63–100 %)``; below 10 % with a decimal."""
    if not rate.n_defined:
        return "–"
    low, high = (f"{100 * end:.{0 if end >= 0.1 else 1}f}".removesuffix(".0") for end in rate.interval)
    undefined = f"; {rate.n_undefined} undefined" if rate.n_undefined else ""
    return f"{rate.n_kin} of {rate.n_defined} ({low}–{high} %){undefined}"


def _cell(found: ZRange) -> str:
    if not found.rate.n:
        return "–"
    if not found.values:
        return f"{found.rate.n_undefined} undefined"
    middle, low, high = (format_value(z, ".1f") for z in (found.median, found.least, found.most))
    return f"{rate_in_words(found.rate)}, z {middle} ({low} to {high})"


def _short(found: ZRange) -> str:
    """Write counts and the median of z for a narrow terminal."""
    if not found.values:
        return "–" if not found.rate.n else "undefined"
    return f"{found.rate.n_kin}/{found.rate.n_defined}  {format_value(found.median, '.1f')}"


def _second(rates: ChangeRates) -> str:
    if not rates.role:
        return "–"
    partly = f"partly: {rate_in_words(rates.partly)}" if rates.role == "merged" else rate_in_words(rates.second.rate)
    middle, low, high = (format_value(z, ".1f") for z in (rates.second.median, rates.second.least, rates.second.most))
    return f"{partly}, z {middle} ({low} to {high})"


def rows_of(results: Sequence[ChangedTest], test: str) -> list[list[str]]:
    """Build a row for each change, under `TITLES`."""
    return [
        [r.change, _cell(r.trained), _cell(r.birth), _cell(r.strangers), _second(r)]
        for r in change_rates(results, test)
    ]


def notes_of(results: Sequence[ChangedTest], test: str) -> list[str]:
    """List the reasons why pairs could not be tested, and the tests' warnings, each with its changes."""
    notes: dict[str, dict[str, None]] = {}
    for r in results:
        if r.test == test:
            for note in (f"undefined: {r.found.reason}",) if r.found.reason else ():
                notes.setdefault(note, {})[r.change] = None
    return [f"{', '.join(changes)}: {note}" for note, changes in notes.items()]


def markdown(study: RobustnessStudy, results: Sequence[ChangedTest]) -> str:
    """Write all of ``table.md``: a table per test."""
    seeds = sorted({r.seed for r in results})
    lines = [f"# {study.name}", "", f"Births from init_seeds {', '.join(map(str, seeds))}. {EXPLAINED} {INDEPENDENCE}"]
    for test, comparison in study.tests.items():
        title = f"{test}: {describe_test(comparison.probe, comparison.recipe)}"
        lines += ["", f"## {title}", "", outcome(results, test), ""]
        lines += [markdown_table(TITLES, rows_of(results, test), n_text=len(TITLES))]
        lines += ["", *(f"- {note}" for note in notes_of(results, test))]
    return "\n".join(lines).rstrip() + "\n"


def write_csv(results: Sequence[ChangedTest], path: Path) -> None:
    """Write everything for programs: a row per changed model, base and test; numbers of an undefined test are empty."""
    titles = [
        "change",
        "birth_seed",
        "other_seed",
        "other_is",
        "reference",
        "reference_seed",
        "in_truth",
        "test",
        "null",
    ]
    titles += FINGERPRINT_COLUMNS
    rows: list[Sequence[object]] = [titles]
    for r in results:
        pair = [r.change, r.own, r.second, r.role, r.reference, r.seed, in_truth(r)]
        rows.append([*pair, r.test, r.found.null, *fingerprint_cells(r.found)])
    write_text(path, csv_text(rows))


def in_truth(result: ChangedTest) -> str:
    """Return the true relation of a pair: ``kin``, ``partly`` or ``stranger``."""
    if result.group == "second":
        return "partly" if result.role == "merged" else "stranger"
    return "kin" if result.group == "own" else "stranger"


def print_tables(study: RobustnessStudy, results: Sequence[ChangedTest], console: Console) -> None:
    """Print a table per test, in short."""
    for test in study.tests:
        shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=f"{test}: called kin, median z")
        for i, title in enumerate(TITLES):
            shown.add_column(title, overflow="fold", justify="right" if i else "left")
        for r in change_rates(results, test):
            cells = [_short(found) for found in (r.trained, r.birth, r.strangers, r.second)]
            shown.add_row(*map(Text, [r.change, *cells]))
        console.print(shown)
        console.print(outcome(results, test), highlight=False, markup=False)
