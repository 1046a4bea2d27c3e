"""Outcomes of lineage tests, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from os.path import commonprefix
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...measure.hidden_states import FingerprintProbe
from ...metrics.config import LineageTestConfig
from ...metrics.seedprint import Fingerprint
from ...trainer.by_name.model_names import ModelSource
from .calibration import KinRate, NullRates
from .compare import ModelPair
from .comparison import describe_probe

_COLUMNS = (("statistic", ".4f"), ("z", ".2f"), ("log10_p", ".2f"), ("k", "d"))
_COLOURS = {"kin": "green", "stranger": "", "undefined": "yellow"}


def fingerprint_json(fingerprint: Fingerprint) -> dict[str, Any]:
    """A test as JSON; numbers of an undefined test are null."""
    values = asdict(fingerprint) | {"p": fingerprint.p, "warnings": list(fingerprint.warnings)}
    return {name: None if isinstance(v, float) and not np.isfinite(v) else v for name, v in values.items()}


def describe_test(probe: FingerprintProbe, recipe: LineageTestConfig) -> str:
    """One line about the null and the probe of a test."""
    return f"null {recipe.null}, {describe_probe(probe)}"


def short_names(sources: Sequence[ModelSource]) -> list[str]:
    """Their names without the folders that they have in common."""
    names = [source.name for source in sources]
    shared = commonprefix(names).rpartition("/")[0]  # noqa: RUF071, ends at a whole folder
    return [name.removeprefix(f"{shared}/") if shared else name for name in names]


def _print_table(console: Console, leading: Sequence[str], rows: Iterable[tuple[Sequence[str], Fingerprint]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in leading:
        table.add_column(title, overflow="fold")
    for title in ("statistic", "z", "log10 p", "k", "N"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for names, found in rows:
        numbers = (getattr(found, name) for name, _ in _COLUMNS)
        cells = [
            "–" if value != value else format(value, spec) for value, (_, spec) in zip(numbers, _COLUMNS, strict=True)
        ]
        verdict = Text(found.verdict, style=_COLOURS[found.verdict])
        table.add_row(*(Text(name) for name in names), *cells, str(found.n_inputs), verdict)
    console.print(table)


def _print_notes(console: Console, found: Iterable[Fingerprint]) -> None:
    """Reasons and warnings, each once."""
    for note in dict.fromkeys(f"undefined: {f.reason}" for f in found if f.reason):
        console.print(note, style="yellow", highlight=False, soft_wrap=True, markup=False)
    for note in dict.fromkeys(f"warning: {w}" for f in found for w in f.warnings):
        console.print(note, style="yellow", highlight=False, soft_wrap=True, markup=False)


def print_pairs(sources: Sequence[ModelSource], pairs: Sequence[ModelPair], title: str, console: Console) -> None:
    """Print a row per pair, then reasons and warnings."""
    console.print(title, highlight=False, soft_wrap=True, markup=False)
    names = short_names(sources)
    _print_table(console, ("A", "B"), (((names[p.a], names[p.b]), p.fingerprint) for p in pairs))
    _print_notes(console, [pair.fingerprint for pair in pairs])


def print_ranking(found: Sequence[tuple[int, Fingerprint]], title: str, console: Console, n: int = 10) -> None:
    """Print the best seeds, and whether the first stands out among the candidates."""
    console.print(title, highlight=False, soft_wrap=True, markup=False)
    _print_table(console, ("seed",), (((str(seed),), result) for seed, result in found[:n]))
    _print_notes(console, [result for _, result in found])
    seed, best = found[0]
    verdict = {
        "kin": f"seed {seed}: stands out among {len(found)} candidates (p is times their number)",
        "stranger": f"none of {len(found)} seeds stands out: it was born from none, or this test cannot show it",
        "undefined": "no test was possible",
    }
    console.print(verdict[best.verdict], highlight=False, soft_wrap=True)


def print_rates(found: Sequence[NullRates], title: str, console: Console) -> None:
    """Print a row per null."""
    console.print(title, highlight=False, soft_wrap=True, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("null", no_wrap=True)
    for heading in ("strangers, %", "no test", "sd of z", "kin, %", "no test"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rates in found:
        sd = rates.strangers.sd_z
        table.add_row(
            rates.null, *_rate_cells(rates.strangers), "–" if sd != sd else f"{sd:.2f}", *_rate_cells(rates.kin)
        )
    console.print(table)
    console.print("called kin, of those that had a test, with 95 % intervals", highlight=False)


def _rate_cells(rate: KinRate) -> tuple[str, str]:
    mean, low, high = (f"{100 * value:.1f}".removesuffix(".0") for value in (rate.rate, *rate.interval))
    return f"{mean} ({low}–{high})" if rate.n_defined else "–", f"{rate.n_undefined}/{rate.n}"
