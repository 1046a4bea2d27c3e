"""Results of a study of lineage: every pair of its models under every test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...measure.hidden_states import FingerprintProbe, cached_hidden_states
from ...metrics.seedprint import Fingerprint, Verdict
from ...trainer.by_name.model_names import open_source
from ...trainer.devices import device
from .compare import check_comparable
from .evidence import Evidence, compare_evidence, evidence_of
from .file import LineageStudy
from .pairs import StudyModel, model_pairs


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
