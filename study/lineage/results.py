"""The results of a study of lineage: every pair of its models under every test, and their tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...files import csv_text, write_text
from ...measure.hidden_states import FingerprintProbe, cached_hidden_states
from ...metrics.seedprint import LEVEL, Fingerprint, Verdict
from ...report.text import format_value, markdown_table
from ...trainer.by_name.model_names import open_source
from ...trainer.devices import device
from .answer import FINGERPRINT_COLUMNS, fingerprint_cells
from .comparison import Evidence, check_comparable, compare_evidence, describe_probe, evidence_of
from .trials import QUESTIONS, LineageStudy, StudyModel, model_pairs


@dataclass(frozen=True)
class PairResult:
    """A pair of models and its outcome under every test."""

    table: int
    """Index in `QUESTIONS`."""
    a: StudyModel
    b: StudyModel
    fingerprints: dict[str, Fingerprint]
    """Outcomes by test."""

    @property
    def expected(self) -> Verdict:
        """The true verdict."""
        return "kin" if self.a.seed == self.b.seed else "stranger"


def tests_by_probe(study: LineageStudy) -> dict[FingerprintProbe, list[str]]:
    """Return the study's probes, each with the names of its tests."""
    found: dict[FingerprintProbe, list[str]] = {}
    for name, test in study.tests.items():
        found.setdefault(test.probe, []).append(name)
    return found


def compare_pairs(
    study: LineageStudy,
    models: Sequence[StudyModel],
    cache_dir: Path,
    advance: Callable[[int], object] = lambda n_models: None,
) -> list[PairResult]:
    """Test every pair of every table. A model whose hidden states are cached is not run again.

    Args:
        study: the study, whose tests have probes of chosen lengths.
        models: the models; an embedding probe has the mean and sd of the first one's embeddings.
        cache_dir: folder of hidden states.
        advance: called after every model and probe.
    """
    sources = [open_source(model.name) for model in models]
    results = [PairResult(table, a, b, {}) for table, a, b in model_pairs(models)]
    for probe, tests in tests_by_probe(study).items():
        check_comparable(sources, probe)
        shown, kept = probe, dict[StudyModel, Evidence]()
        nulls = [study.tests[test].recipe.null for test in tests]
        for model, source in zip(models, sources, strict=True):
            decoder = source.load().to(device())
            if not kept:
                shown = probe.like(decoder)
            kept[model] = evidence_of(decoder, nulls, partial(cached_hidden_states, probe=shown, cache_dir=cache_dir))
            del decoder
            advance(1)
        for result in results:
            for test in tests:
                result.fingerprints[test] = compare_evidence(
                    kept[result.a],
                    kept[result.b],
                    study.tests[test].recipe,
                    probe,
                    sources[0].config.vocab_size,
                )
    return results


@dataclass(frozen=True)
class VerdictCounts:
    """Verdicts of one test on the pairs of one table that are all kin, or all strangers."""

    table: int
    expected: Verdict
    n: int
    """Pairs."""
    verdicts: Counter[Verdict]
    """Number of pairs with each verdict."""
    low: float
    """Smallest z; NaN where no test was possible."""
    high: float
    """Largest."""


def count_verdicts(results: Sequence[PairResult], test: str) -> list[VerdictCounts]:
    """Count the verdicts of ``test``, table by table, kin before strangers."""
    counts = []
    for table in sorted({result.table for result in results}):
        for expected in ("kin", "stranger"):
            tests = [r.fingerprints[test] for r in results if (r.table, r.expected) == (table, expected)]
            z = [test.z for test in tests if test.verdict != "undefined"] or [float("nan")]
            if tests:
                verdicts = Counter(test.verdict for test in tests)
                counts.append(VerdictCounts(table, expected, len(tests), verdicts, min(z), max(z)))
    return counts


# ---------------------------------------------------------------- tables for people, for papers and for programs

_FORMATS = {"statistic": ".4f", "z": ".2f", "log10_p": ".1f"}
"""Number of a test → its format."""


def _titles(study: LineageStudy, test: str) -> list[str]:
    null = study.tests[test].recipe.null
    statistic = "mean cosine" if null == "matched" else "mean ρ" if null.startswith("dimensions") else "mean τ"
    return [f"{test}: {statistic}", "z", "log₁₀ p", "k", "verdict"]


def _cells(fingerprint: Fingerprint, expected: str) -> list[str]:
    numbers = [format_value(getattr(fingerprint, name), spec) for name, spec in _FORMATS.items()]
    wrong = fingerprint.verdict not in (expected, "undefined")
    return [*numbers, str(fingerprint.k), f"**{fingerprint.verdict}**" if wrong else fingerprint.verdict]


def _format_counts(counts: VerdictCounts) -> str:
    """Write the number of tested pairs that are called kin, and the range of z."""
    undefined = counts.verdicts["undefined"]
    text = f"{counts.verdicts['kin']} of {counts.n - undefined} kin"
    if undefined < counts.n:
        ends = [format_value(end, ".1f") for end in (counts.low, counts.high)]
        text += f", z {ends[0] if ends[0] == ends[1] else ' to '.join(ends)}"
    return text + (f"; {undefined} undefined" if undefined else "")


def summary(
    study: LineageStudy, results: Sequence[PairResult], tests: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Build titles and rows: the verdicts of every one of ``tests``, table by table."""
    counts = [count_verdicts(results, test) for test in tests]
    rows = [
        [
            f"{of_tests[0].table + 1}. {QUESTIONS[of_tests[0].table].title}",
            of_tests[0].expected,
            str(of_tests[0].n),
            *map(_format_counts, of_tests),
        ]
        for of_tests in zip(*counts, strict=True)
    ]
    return ["table", "in truth", "pairs", *tests], rows


def pair_rows(
    study: LineageStudy, results: Sequence[PairResult], tests: Sequence[str]
) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return, for each table with pairs, its title, its headings, and a row per pair, kin first."""
    found = []
    for i, question in enumerate(QUESTIONS):
        rows = [
            [result.a.label, result.b.label, result.expected]
            + [cell for test in tests for cell in _cells(result.fingerprints[test], result.expected)]
            for result in sorted(results, key=lambda result: result.expected)
            if result.table == i
        ]
        if rows:
            titles = ["A", "B", "in truth", *(title for test in tests for title in _titles(study, test))]
            found.append((f"{i + 1}. {question.title}", titles, rows))
    return found


def _notes(results: Sequence[PairResult], tests: Sequence[str]) -> list[str]:
    """List the reasons why pairs could not be tested, and warnings that hold for all pairs of a test."""
    notes: dict[str, None] = {}
    for test in tests:
        found = [result.fingerprints[test] for result in results]
        notes |= dict.fromkeys(f"{test}, undefined: {f.reason}" for f in found if f.reason)
        notes |= dict.fromkeys(w for f in found[:1] for w in f.warnings if all(w in other.warnings for other in found))
    return list(notes)


def markdown(study: LineageStudy, results: Sequence[PairResult]) -> str:
    """Write all of ``table.md``: per probe a summary, then the tables, pair by pair."""
    lines = [
        f"# {study.name}",
        "",
        f"Births from init_seeds {', '.join(map(str, study.init_seeds))}, trained on the same data in the same order. "
        f"`kin`: p < {LEVEL:g} and z > 0; `undefined`: no test was possible. **Bold**: not what the pair is in truth.",
        "",
    ]
    for probe, tests in tests_by_probe(study).items():
        notes = _notes(results, tests)
        lines += [f"## {describe_probe(probe)}", ""]
        lines += [markdown_table(*summary(study, results, tests), n_text=2), ""]
        for title, titles, rows in pair_rows(study, results, tests):
            lines += [f"### {title}", "", markdown_table(titles, rows, n_text=3), ""]
        lines += [*(f"- {note}" for note in notes), *([""] if notes else [])]
    return "\n".join(lines)


def write_csv(study: LineageStudy, results: Sequence[PairResult], path: Path) -> None:
    """Write everything for programs: a row per table, pair and test; numbers of an undefined test are empty."""
    titles = ["table", "a", "b", "a_seed", "a_step", "a_continuation", "b_seed", "b_step", "b_continuation", "in_truth"]
    titles += ["test", "probe", "null", *FINGERPRINT_COLUMNS]
    rows: list[Sequence[object]] = [titles]
    for result in results:
        pair = [result.table + 1, result.a.label, result.b.label]
        pair += [value for model in (result.a, result.b) for value in (model.seed, model.step, model.continuation)]
        for test, found in result.fingerprints.items():
            of_test = [test, study.tests[test].probe.kind, found.null, *fingerprint_cells(found)]
            rows.append([*pair, result.expected, *of_test])
    write_text(path, csv_text(rows))


def print_summary(study: LineageStudy, results: Sequence[PairResult], console: Console) -> None:
    """Print, per probe, the verdicts of every test on each table."""
    for probe, tests in tests_by_probe(study).items():
        titles, rows = summary(study, results, tests)
        shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=describe_probe(probe))
        for title in titles:
            shown.add_column(title, overflow="fold", justify="right" if title == "pairs" else "left")
        for row in rows:
            shown.add_row(*map(Text, row))
        console.print(shown)
