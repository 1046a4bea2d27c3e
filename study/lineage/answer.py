"""The answer to "do these models share a birth?", as a sentence, tables, JSON and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from math import isnan, log10
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
from rich.console import Console

from ...files import write_text
from ...findings.formatting import format_p, in_prose, number_of, p_in_prose, shorten, without_shared_folder
from ...findings.thresholds import threshold
from ...measure.hidden_states import FingerprintProbe
from ...metrics.config import LineageTestConfig
from ...metrics.seedprint import LEVEL, Fingerprint, bonferroni
from ...report.charts.chart_page import Block, Fold, Panels, Prose, render_page
from ...report.charts.specs import CurvePanel, MatrixPanel, Series
from ...report.csv_files import check_data_folder, data_folder, write_csv_files
from ...report.pictures.several_models import FULL_Z, PALE_Z, clustered
from ...report.table import Cell, Column, Table
from ...report.terminal import say
from ...trainer.by_name.model_names import AnySource
from .calibration import KinRate, NullRates
from .comparison import ComparedModels, ModelPair, describe_probe

# ---------------------------------------------------------------- one sentence, never stronger than the tests behind it

#: Caveats that a reader needs beside the answer.
CANNOT_TELL = (
    "The test cannot tell which model came first, nor why two share a birth. Drift from a known start can: "
    "birthmark fingerprint START CHECKPOINT …, START being a birth (CONFIG@SEED) or the pretrained model that training "
    "went on from; z falls as training goes on."
)
_TERMS = "z: standard deviations above what the null expects; kin: p < 0.01; {what}; stranger: a birth of another seed."
_OF_HIDDEN_STATES = "k: dimensions compared; N: inputs that every model read"
_OF_WEIGHTS = "k: units of blocks compared; N: tokens whose vectors aligned the channels"


def terms(null: str) -> str:
    """Explain the columns of a table of tests."""
    return _TERMS.format(what=_OF_WEIGHTS if null == "matched" else _OF_HIDDEN_STATES)


def answer_of_models(names: Sequence[str], pairs: Sequence[ModelPair], strangers: Sequence[Fingerprint]) -> str:
    """Say which of some models share a birth.

    Args:
        names: names of the models.
        pairs: tests of all pairs.
        strangers: tests of these models against births of other seeds, as the control; may be empty.
    """
    found = [(pair.a, pair.b, pair.fingerprint) for pair in pairs]
    most = max((test.z for test in strangers if not isnan(test.z)), default=float("nan"))
    if len(names) == 2:
        return _of_two(names[0], names[1], found[0][2], most)
    return _of_many(names, found, most)


def _control(most: float) -> str:
    return "without strangers as a control" if isnan(most) else f"against strangers at most {in_prose(most, 1)}"


def _is_clear(test: Fingerprint, most: float, n_tests: int = 1) -> bool:
    """Return True if z exceeds the largest control by the margin; without controls, if p is significant among so many
    tests (Bonferroni).
    """
    if isnan(most):
        return bonferroni(test.log10_p, n_tests) < log10(LEVEL)
    return test.z >= most + threshold("lineage_margin")


def _of_two(a: str, b: str, test: Fingerprint, most: float) -> str:
    if test.verdict == "undefined":
        return f"Whether {b} shares its birth with {a} cannot be told: {test.reason}."
    numbers = f"z {in_prose(test.z, 1)}, {p_in_prose(test.log10_p)}, {_control(most)}"
    if test.verdict == "stranger" and test.reversed:
        return (
            f"{a} and {b} are no plain strangers: {numbers}; z this far below 0 hints at kin with signs flipped, which "
            "--null matched undoes."
        )
    if test.verdict == "stranger":
        return f"{a} and {b} are strangers, as far as this test can see: {numbers}."
    if not _is_clear(test, most):
        return f"Whether {b} shares its birth with {a} cannot be told: strangers do nearly as well ({numbers})."
    return f"{b} shares its birth with {a}: {numbers}."


def _of_many(names: Sequence[str], found: Sequence[tuple[int, int, Fingerprint]], most: float) -> str:
    n = len(found)
    kin = [(a, b, test) for a, b, test in found if test.verdict == "kin" and _is_clear(test, most, n)]
    undefined = sum(test.verdict == "undefined" for *_, test in found)
    unclear = sum(test.verdict == "kin" and not _is_clear(test, most, n) for *_, test in found)
    groups = _groups(len(names), [(a, b) for a, b, _ in kin])
    apart = max((t.z for a, b, t in found if not isnan(t.z) and groups[a] is not groups[b]), default=float("nan"))
    families = [group for group in {id(group): group for group in groups}.values() if len(group) > 1]
    left = f"; {undefined + unclear} of {n} pairs cannot be told" if undefined + unclear else ""

    def control(tests: Sequence[Fingerprint], best: Callable[[Iterable[float]], float]) -> str:
        """Describe the control; without one, begin with the p of the best or worst of some tests, for all pairs."""
        if not isnan(most):
            return _control(most)
        log10_p = bonferroni(best(test.log10_p for test in tests if not isnan(test.z)), n)
        return f"{p_in_prose(log10_p)} for {n} pairs, {_control(most)}"

    if not families:
        tests = [test for *_, test in found]
        beside = "no test was possible" if isnan(apart) else f"z at most {in_prose(apart, 1)}, {control(tests, min)}"
        return f"None of the {len(names)} models is seen to share a birth with another: {beside}{left}."
    least = min(test.z for *_, test in kin)
    numbers = f"kin have z {in_prose(least, 1)} or more, {control([test for *_, test in kin], max)}"
    if len(families) == 1 and len(families[0]) == len(names):
        return f"All {len(names)} models share one birth: {numbers}{left}."
    together = "; ".join(" and ".join(filter(None, [", ".join(m[:-1]), m[-1]])) for m in _named(names, families))
    others = "" if isnan(apart) else f", other pairs at most {in_prose(apart, 1)}"
    return f"A birth is shared by {together}: {numbers}{others}{left}."


def _named(names: Sequence[str], families: Sequence[Sequence[int]]) -> list[list[str]]:
    return [[names[i] for i in sorted(family)] for family in families]


def _groups(n: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return, for each model, those that it is connected with, itself included; one list per group."""
    groups = [[i] for i in range(n)]
    for a, b in edges:
        if groups[a] is not groups[b]:
            merged = groups[a] + groups[b]
            for i in merged:
                groups[i] = merged
    return groups


def answer_of_seeds(name: str, ranked: Sequence[tuple[int, Fingerprint]]) -> str:
    """Name the seed that a model was born from, among candidates sorted best first."""
    (seed, best), n = ranked[0], len(ranked)
    rest = [test.z for _, test in ranked[1:] if not isnan(test.z)]
    most = max(rest, default=float("nan"))
    if best.verdict == "undefined":
        return f"Which seed {name} was born from cannot be told: {best.reason}."
    others = f", the other {n - 1} at most {in_prose(most, 1)}" if rest else ", without another to compare with"
    numbers = f"z {in_prose(best.z, 1)}, {p_in_prose(best.log10_p)} for {number_of(n, 'candidate')}{others}"
    if best.verdict == "stranger":
        if n == 1:
            return f"Seed {seed} is not seen in {name}: it has {numbers}."
        return f"None of {n} seeds is seen in {name}: the best, {seed}, has {numbers}."
    if not _is_clear(best, most):
        return f"Which seed {name} was born from cannot be told: {seed} has {numbers}."
    return f"{name} was born from seed {seed}: {numbers}."


# ---------------------------------------------------------------- tables and JSON

_COLOURS = {"kin": "green", "stranger": "", "undefined": "yellow"}


def fingerprint_json(fingerprint: Fingerprint) -> dict[str, Any]:
    """Return a test as JSON; numbers of an undefined test are null."""
    values = asdict(fingerprint) | {"p": fingerprint.p, "warnings": list(fingerprint.warnings)}
    return {name: None if isinstance(v, float) and not np.isfinite(v) else v for name, v in values.items()}


#: Columns of a test. Pages have p, other outputs its logarithm; only the CSV files of studies have the reason.
FINGERPRINT_COLUMNS = (
    Column("statistic", format=".4f"),
    Column("z", format=".2f"),
    Column("log10 p", format=".2f", key="log10_p"),
    Column("p"),
    Column("k"),
    Column("N", key="n_inputs"),
    Column("verdict", "text"),
    Column("reason", "text"),
)


def fingerprint_cells(found: Fingerprint) -> list[object]:
    """Return a test's cells under `FINGERPRINT_COLUMNS`."""
    verdict = Cell(found.verdict, look=_COLOURS[found.verdict])
    numbers = [found.statistic, found.z, found.log10_p, format_p(found.log10_p), found.k, found.n_inputs]
    return [*numbers, verdict, found.reason]


def _table(leading: Sequence[str], tests: Sequence[tuple[Sequence[str], Fingerprint]]) -> Table:
    """Build the table of tests, each with the names of its models."""
    columns = [*(Column(title, "name") for title in leading), *FINGERPRINT_COLUMNS]
    return Table(columns, [[*names, *fingerprint_cells(found)] for names, found in tests]).without("reason")


def describe_test(probe: FingerprintProbe, recipe: LineageTestConfig) -> str:
    """Describe the null and the probe of a test in one line."""
    if recipe.null == "matched":
        return "null matched, weights: channels aligned by the vectors of tokens, then units of the blocks in pairs"
    return f"null {recipe.null}, {describe_probe(probe)}"


def short_names(sources: Sequence[AnySource]) -> list[str]:
    """Return the models' names without their common folders."""
    return without_shared_folder([source.name for source in sources])


def _print_notes(console: Console, found: Iterable[Fingerprint]) -> None:
    """Print reasons and warnings, each once."""
    for note in dict.fromkeys(f"undefined: {f.reason}" for f in found if f.reason):
        say(console, note, style="yellow")
    for note in dict.fromkeys(f"warning: {w}" for f in found for w in f.warnings):
        say(console, note, style="yellow")


def print_pairs(
    sources: Sequence[AnySource], compared: ComparedModels, answer: str, title: str, console: Console
) -> None:
    """Print the answer, a row per pair, reasons and warnings, and an explanation."""
    say(console, f"{answer}\n", wrapped=True)
    say(console, title, wrapped=True)
    names = short_names(sources)
    _table(("A", "B"), [((names[p.a], names[p.b]), p.fingerprint) for p in compared.pairs]).without("p").print(console)
    _print_notes(console, [pair.fingerprint for pair in compared.pairs])
    say(console, terms(compared.pairs[0].fingerprint.null), wrapped=True)
    say(console, CANNOT_TELL, wrapped=True)


def print_ranking(
    found: Sequence[tuple[int, Fingerprint]], answer: str, title: str, console: Console, n: int = 10
) -> None:
    """Print the answer, and the best seeds."""
    say(console, f"{answer}\n", wrapped=True)
    say(console, title, wrapped=True)
    _table(("seed",), [((str(seed),), result) for seed, result in found[:n]]).without("p").print(console)
    _print_notes(console, [result for _, result in found])
    say(console, f"{terms(found[0][1].null)} p counts all {len(found)} candidates.", wrapped=True)


def print_rates(found: Sequence[NullRates], title: str, console: Console) -> None:
    """Print a row per null."""
    rows = []
    for rates in found:
        rows.append([rates.null, *_rate_cells(rates.strangers), rates.strangers.sd_z, *_rate_cells(rates.kin)])
    columns = [Column("null", "name"), Column("strangers, %"), Column("no test"), Column("sd of z", format=".2f")]
    Table([*columns, Column("kin, %"), Column("no test")], rows).print(console, title=title)
    say(console, "called kin, of those that had a test, with 95 % intervals")


def _rate_cells(rate: KinRate) -> tuple[str, str]:
    mean, low, high = (f"{100 * value:.1f}".removesuffix(".0") for value in (rate.rate, *rate.interval))
    return f"{mean} ({low}–{high})" if rate.n_defined else "–", f"{rate.n_undefined}/{rate.n}"


# ---------------------------------------------------------------- the page
# The answer, the matrix of models, and every test.

_SCALE = (
    "Cells are pale below z 3, which one pair of strangers in a thousand passes by chance; from there colour grows "
    "with the logarithm up to 60. The diagonal is empty, and so is a test that could not be made."
)
#: Tests in the table of candidates: the rest stand in the CSV file.
_MOST_ROWS = 50


def write_kinship_page(out: Path, names: Sequence[str], compared: ComparedModels, answer: str, test: str) -> None:
    """Write the page of models that were compared, and the CSV of its tests beside it.

    Args:
        out: the HTML file.
        names: names of the models.
        compared: the tests.
        answer: the answer in a sentence.
        test: the basis of the answer in a line.

    Raises:
        UsageError: something else is in the place of the CSV file.
    """
    rows = [([names[pair.a], names[pair.b]], pair.fingerprint) for pair in compared.pairs]
    n = len(compared.strangers) // len(names)
    control = [([name, f"stranger {i + 1}"], compared.strangers[i * len(names) + m])
               for i in range(n) for m, name in enumerate(names)]  # fmt: skip
    blocks: list[Block] = [
        Prose(answer),
        Prose(CANNOT_TELL, note=True),
        Panels([kinship_matrix(names, [(p.a, p.b, p.fingerprint) for p in compared.pairs])], wide=True),
        _table(("A", "B"), rows).without("log10_p"),
        *_notes([found for _, found in rows]),
        Prose(terms(compared.pairs[0].fingerprint.null), note=True),
    ]
    if control:
        table = _table(("model", ""), control).without("log10_p")
        blocks.append(Fold("The control: every model against births of other seeds", [table], note=f"{n} strangers"))
    title = " · ".join(names) if len(names) < 4 else f"{len(names)} models"
    _write(out, title, blocks, test, {"pairs.csv": _table(("a", "b"), [*rows, *control]).without("p").csv()})


def write_seeds_page(out: Path, name: str, ranked: Sequence[tuple[int, Fingerprint]], answer: str, test: str) -> None:
    """Write the page of candidate seeds, and the CSV of their tests beside it; arguments as in
    :func:`write_kinship_page`.
    """
    zs = np.array([found.z for _, found in ranked])
    curve = Series(zs, {"place": range(1, len(zs) + 1)}, run=0, name="candidates")
    panel = CurvePanel(
        "seeds", "z of every candidate, best first", [curve], x="place", csv="seeds.csv",
        caption="Strangers lie around 0 with a standard deviation of 1.",
    )  # fmt: skip
    rows = [([str(seed)], found) for seed, found in ranked]
    more = [Prose(f"{len(rows) - _MOST_ROWS} more in seeds.csv.", note=True)] if len(rows) > _MOST_ROWS else []
    blocks: list[Block] = [
        Prose(answer),
        Panels([panel], wide=True),
        _table(("seed",), rows[:_MOST_ROWS]).without("log10_p"),
        *more,
        *_notes([found for _, found in rows]),
        Prose(f"{terms(ranked[0][1].null)} p counts all {len(rows)} candidates.", note=True),
    ]
    _write(out, name, blocks, test, {"seeds.csv": _table(("seed",), rows).without("p").csv()})


def kinship_matrix(
    names: Sequence[str], tests: Sequence[tuple[int, int, Fingerprint]], csv: str = "pairs.csv"
) -> MatrixPanel:
    """Draw z of every pair of models, kin side by side; colours begin above the strangers' range.

    Args:
        names: names of the models.
        tests: indices of two models, and their test.
        csv: the file that holds the numbers.
    """
    n = len(names)
    z_MM, tips = np.full((n, n), np.nan), [["the model itself"] * n for _ in range(n)]
    for a, b, found in tests:
        z_MM[a, b] = z_MM[b, a] = found.z
        p = f", p {format_p(found.log10_p)}" if found.verdict != "undefined" else f": {found.reason}"
        tips[a][b] = tips[b][a] = f"{names[a]}\n{names[b]}\n{found.verdict}{p}"
    order = clustered(z_MM).tolist() if n > 2 else list(range(n))
    letters = [ascii_uppercase[place] if n <= 26 else str(place + 1) for place in range(n)]
    rows = [f"{letter}  {shorten(names[i], 40)}" for letter, i in zip(letters, order, strict=True)]
    return MatrixPanel(
        "kinship", "z of every pair", rows, letters, z_MM[np.ix_(order, order)],
        pale=PALE_Z, full=FULL_Z, format=".1f", legend=_SCALE, csv=csv,
        tips=[[tips[i][j] for j in order] for i in order],
    )  # fmt: skip


def _notes(found: Sequence[Fingerprint]) -> list[Prose]:
    notes = [f"Undefined: {test.reason}." for test in found if test.reason]
    notes += [f"Warning: {warning}." for test in found for warning in test.warnings]
    return [Prose(note, note=True) for note in dict.fromkeys(notes)]


def _write(out: Path, title: str, blocks: Sequence[Block], test: str, texts: dict[str, str]) -> None:
    folder = data_folder(out)
    check_data_folder(folder)
    page = render_page(title, [*blocks, Prose(f"Rests on: {test}.", note=True)], about="Birthmark lineage",
                       data=folder.name)  # fmt: skip
    write_csv_files(folder, texts)
    write_text(out, page)
