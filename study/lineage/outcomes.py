"""Outcomes of lineage tests, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from ...findings.wording import in_ascii
from ...measure.hidden_states import FingerprintProbe
from ...metrics.config import LineageTestConfig
from ...metrics.seedprint import Fingerprint
from ...report.terminal import Heading, print_table
from ...report.text import without_shared_folder
from ...trainer.by_name.model_names import AnySource
from .answers import CANNOT_TELL, terms
from .calibration import KinRate, NullRates
from .compare import ComparedModels
from .comparison import describe_probe

_COLUMNS = (("statistic", ".4f"), ("z", ".2f"), ("log10_p", ".2f"), ("k", "d"))
_COLOURS = {"kin": "green", "stranger": "", "undefined": "yellow"}


def fingerprint_json(fingerprint: Fingerprint) -> dict[str, Any]:
    """Return a test as JSON; numbers of an undefined test are null."""
    values = asdict(fingerprint) | {"p": fingerprint.p, "warnings": list(fingerprint.warnings)}
    return {name: None if isinstance(v, float) and not np.isfinite(v) else v for name, v in values.items()}


#: Columns of a test in a CSV file.
FINGERPRINT_COLUMNS = ("statistic", "z", "log10_p", "k", "n_inputs", "verdict", "reason")


def fingerprint_cells(found: Fingerprint) -> list[object]:
    """Return a test's cells under `FINGERPRINT_COLUMNS`, for programs; numbers of an undefined test are empty."""
    numbers = ("" if np.isnan(x) else repr(x) for x in (found.statistic, found.z, found.log10_p))
    return [*numbers, found.k, found.n_inputs, found.verdict, found.reason]


def describe_test(probe: FingerprintProbe, recipe: LineageTestConfig) -> str:
    """Describe the null and the probe of a test in one line."""
    if recipe.null == "matched":
        return "null matched, weights: channels aligned by the vectors of tokens, then units of the blocks in pairs"
    return f"null {recipe.null}, {describe_probe(probe)}"


def short_names(sources: Sequence[AnySource]) -> list[str]:
    """Return the models' names without their common folders."""
    return without_shared_folder([source.name for source in sources])


def _print_tests(console: Console, leading: Sequence[str], tests: Sequence[tuple[Sequence[str], Fingerprint]]) -> None:
    """Print a row per test."""
    rows: list[list[str | Text]] = []
    for names, found in tests:
        numbers = (getattr(found, name) for name, _ in _COLUMNS)
        cells = [
            "–" if value != value else format(value, spec) for value, (_, spec) in zip(numbers, _COLUMNS, strict=True)
        ]
        verdict = Text(found.verdict, style=_COLOURS[found.verdict])
        rows.append([*names, *cells, str(found.n_inputs), verdict])
    headings = [Heading(title, "name") for title in leading]
    headings += [*map(Heading, ("statistic", "z", "log10 p", "k", "N")), Heading("verdict", "text")]
    print_table(console, headings, rows)


def _say(console: Console, text: str) -> None:
    console.print(in_ascii(text) if console.options.ascii_only else text, highlight=False, markup=False)


def _print_notes(console: Console, found: Iterable[Fingerprint]) -> None:
    """Print reasons and warnings, each once."""
    for note in dict.fromkeys(f"undefined: {f.reason}" for f in found if f.reason):
        console.print(note, style="yellow", highlight=False, soft_wrap=True, markup=False)
    for note in dict.fromkeys(f"warning: {w}" for f in found for w in f.warnings):
        console.print(note, style="yellow", highlight=False, soft_wrap=True, markup=False)


def print_pairs(
    sources: Sequence[AnySource], compared: ComparedModels, answer: str, title: str, console: Console
) -> None:
    """Print the answer, a row per pair, reasons and warnings, and an explanation."""
    _say(console, f"{answer}\n")
    _say(console, title)
    names = short_names(sources)
    _print_tests(console, ("A", "B"), [((names[p.a], names[p.b]), p.fingerprint) for p in compared.pairs])
    _print_notes(console, [pair.fingerprint for pair in compared.pairs])
    _say(console, terms(compared.pairs[0].fingerprint.null))
    _say(console, CANNOT_TELL)


def print_ranking(
    found: Sequence[tuple[int, Fingerprint]], answer: str, title: str, console: Console, n: int = 10
) -> None:
    """Print the answer, and the best seeds."""
    _say(console, f"{answer}\n")
    _say(console, title)
    _print_tests(console, ("seed",), [((str(seed),), result) for seed, result in found[:n]])
    _print_notes(console, [result for _, result in found])
    _say(console, f"{terms(found[0][1].null)} p counts all {len(found)} candidates.")


def print_rates(found: Sequence[NullRates], title: str, console: Console) -> None:
    """Print a row per null."""
    rows = []
    for rates in found:
        sd = rates.strangers.sd_z
        of_z = "–" if sd != sd else f"{sd:.2f}"
        rows.append([rates.null, *_rate_cells(rates.strangers), of_z, *_rate_cells(rates.kin)])
    numbers = ("strangers, %", "no test", "sd of z", "kin, %", "no test")
    print_table(console, [Heading("null", "name"), *map(Heading, numbers)], rows, title=title)
    console.print("called kin, of those that had a test, with 95 % intervals", highlight=False)


def _rate_cells(rate: KinRate) -> tuple[str, str]:
    mean, low, high = (f"{100 * value:.1f}".removesuffix(".0") for value in (rate.rate, *rate.interval))
    return f"{mean} ({low}–{high})" if rate.n_defined else "–", f"{rate.n_undefined}/{rate.n}"
