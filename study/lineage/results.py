"""The results of a study of lineage: every pair of its models under every test, and their tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from ...files import write_text
from ...findings.formatting import format_value
from ...measure.hidden_states import FingerprintProbe, cached_hidden_states
from ...metrics.seedprint import LEVEL, Fingerprint, Verdict
from ...report.table import Cell, Column, Table
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


def _columns(study: LineageStudy, test: str) -> list[Column]:
    null = study.tests[test].recipe.null
    statistic = "mean cosine" if null == "matched" else "mean ρ" if null.startswith("dimensions") else "mean τ"
    first = Column(f"{test}: {statistic}", format=".4f")
    return [first, Column("z", format=".2f"), Column("log₁₀ p", format=".1f"), Column("k"), Column("verdict")]


def _cells(found: Fingerprint, expected: str) -> list[object]:
    verdict = Cell(found.verdict, strong=found.verdict not in (expected, "undefined"))
    return [found.statistic, found.z, found.log10_p, found.k, verdict]


def _format_counts(counts: VerdictCounts) -> str:
    """Write the number of tested pairs that are called kin, and the range of z."""
    undefined = counts.verdicts["undefined"]
    text = f"{counts.verdicts['kin']} of {counts.n - undefined} kin"
    if undefined < counts.n:
        ends = [format_value(end, ".1f") for end in (counts.low, counts.high)]
        text += f", z {ends[0] if ends[0] == ends[1] else ' to '.join(ends)}"
    return text + (f"; {undefined} undefined" if undefined else "")


def summary(results: Sequence[PairResult], tests: Sequence[str]) -> Table:
    """Build the table of the verdicts of every one of ``tests``, table by table."""
    counts = [count_verdicts(results, test) for test in tests]
    rows = [
        [
            f"{of_tests[0].table + 1}. {QUESTIONS[of_tests[0].table].title}",
            of_tests[0].expected,
            of_tests[0].n,
            *map(_format_counts, of_tests),
        ]
        for of_tests in zip(*counts, strict=True)
    ]
    return Table([Column("table", "name"), Column("in truth", "text"), Column("pairs"), *map(Column, tests)], rows)


def pair_tables(study: LineageStudy, results: Sequence[PairResult], tests: Sequence[str]) -> list[tuple[str, Table]]:
    """Return, for each table with pairs, its title, and the table with a row per pair, kin first."""
    columns = [Column("A", "name"), Column("B", "name"), Column("in truth", "text")]
    columns += [column for test in tests for column in _columns(study, test)]
    found = []
    for i, question in enumerate(QUESTIONS):
        rows = [
            [result.a.label, result.b.label, result.expected]
            + [cell for test in tests for cell in _cells(result.fingerprints[test], result.expected)]
            for result in sorted(results, key=lambda result: result.expected)
            if result.table == i
        ]
        if rows:
            found.append((f"{i + 1}. {question.title}", Table(columns, rows)))
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
        lines += [summary(results, tests).markdown(), ""]
        for title, table in pair_tables(study, results, tests):
            lines += [f"### {title}", "", table.markdown(), ""]
        lines += [*(f"- {note}" for note in notes), *([""] if notes else [])]
    return "\n".join(lines)


def write_csv(study: LineageStudy, results: Sequence[PairResult], path: Path) -> None:
    """Write everything for programs: a row per table, pair and test; numbers of an undefined test are empty."""
    titles = ("table", "a", "b", "a_seed", "a_step", "a_continuation", "b_seed", "b_step", "b_continuation", "in_truth")
    columns = [*map(Column, (*titles, "test", "probe", "null")), *FINGERPRINT_COLUMNS]
    rows = []
    for result in results:
        pair = [result.table + 1, result.a.label, result.b.label]
        pair += [value for model in (result.a, result.b) for value in (model.seed, model.step, model.continuation)]
        for test, found in result.fingerprints.items():
            of_test = [test, study.tests[test].probe.kind, found.null, *fingerprint_cells(found)]
            rows.append([*pair, result.expected, *of_test])
    write_text(path, Table(columns, rows).without("p").csv())


def print_summary(study: LineageStudy, results: Sequence[PairResult], console: Console) -> None:
    """Print, per probe, the verdicts of every test on each table."""
    for probe, tests in tests_by_probe(study).items():
        summary(results, tests).print(console, title=describe_probe(probe))
