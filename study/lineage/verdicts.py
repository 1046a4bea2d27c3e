"""What lineage tests found, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...measure.hidden_states import FingerprintProbe
from ...metrics.config import LineageTestConfig
from ...metrics.seedprint import Fingerprint
from ...trainer.by_name.model_names import Source
from .compare import _COLOURS, _COLUMNS, Pair, short_names


def told(found: Fingerprint) -> dict[str, Any]:
    """A test as JSON says it; numbers of an undefined one are null."""
    values = asdict(found) | {"p": found.p, "warnings": list(found.warnings)}
    return {name: None if isinstance(v, float) and not np.isfinite(v) else v for name, v in values.items()}


def describe_probe(probe: FingerprintProbe, recipe: LineageTestConfig) -> str:
    """One line about what the numbers below it rest on."""
    what = "random tokens" if probe.kind == "token" else "Gaussian embeddings"
    return f"null {recipe.null}, {probe.n_inputs} sequences of {probe.seq_len} {what}"


def _table(console: Console, leading: Sequence[str], rows: Iterable[tuple[Sequence[str], Fingerprint]]) -> None:
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


def _notes(console: Console, found: Iterable[Fingerprint]) -> None:
    """Reasons and warnings, each once."""
    for note in dict.fromkeys(f"undefined: {f.reason}" for f in found if f.reason):
        console.print(note, style="yellow", highlight=False, soft_wrap=True, markup=False)
    for note in dict.fromkeys(f"warning: {w}" for f in found for w in f.warnings):
        console.print(note, style="yellow", highlight=False, soft_wrap=True, markup=False)


def print_pairs(sources: Sequence[Source], pairs: Sequence[Pair], title: str, console: Console) -> None:
    """A row per pair, then what there is to say against it."""
    console.print(title, highlight=False, soft_wrap=True, markup=False)
    names = short_names(sources)
    _table(console, ("A", "B"), (((names[p.a], names[p.b]), p.found) for p in pairs))
    _notes(console, [pair.found for pair in pairs])


def print_ranking(found: Sequence[tuple[int, Fingerprint]], title: str, console: Console, n: int = 10) -> None:
    """The best seeds, and whether the first stands out among as many candidates."""
    console.print(title, highlight=False, soft_wrap=True, markup=False)
    _table(console, ("seed",), (((str(seed),), result) for seed, result in found[:n]))
    _notes(console, [result for _, result in found])
    seed, best = found[0]
    verdict = {
        "kin": f"seed {seed}: stands out among {len(found)} candidates (p is times their number)",
        "stranger": f"none of {len(found)} seeds stands out: it was born from none of them, or that cannot be told",
        "undefined": "no test was possible",
    }
    console.print(verdict[best.verdict], highlight=False, soft_wrap=True)
