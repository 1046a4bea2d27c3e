"""What a study of lineage finds: every pair of its models under every test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...measure.hidden_states import FingerprintProbe, cached_hidden_states
from ...metrics.seedprint import Fingerprint, HiddenStates, Verdict, compare
from ...trainer.by_name.model_names import open_source
from ...trainer.devices import device
from .compare import check_comparable
from .file import Lineage
from .trials import Member, pairs


@dataclass(frozen=True)
class Row:
    """A pair of models and what all tests say of it."""

    table: int
    """Index in `TABLES`."""
    a: Member
    b: Member
    found: dict[str, Fingerprint]
    """By test."""

    @property
    def expected(self) -> Verdict:
        """What it is in truth."""
        return "kin" if self.a.seed == self.b.seed else "stranger"


def probes(study: Lineage) -> dict[FingerprintProbe, list[str]]:
    """The study's probes, each with the tests that are taken on it."""
    found: dict[FingerprintProbe, list[str]] = {}
    for name, test in study.tests.items():
        found.setdefault(test.probe, []).append(name)
    return found


def describe(probe: FingerprintProbe) -> str:
    """A probe in words."""
    what = "random tokens" if probe.kind == "token" else "Gaussian vectors in place of embeddings"
    return f"{probe.n_inputs} sequences of {probe.seq_len} {what}"


def read_rows(
    study: Lineage,
    models: Sequence[Member],
    cache_dir: Path,
    advance: Callable[[int], object] = lambda n_models: None,
) -> list[Row]:
    """Every pair that a table has, under every test; a model that has been shown a probe before is not run again.

    Args:
        study: its tests, with their probes' lengths.
        models: what there is, the first birth first: an embedding probe is as its embeddings are.
        cache_dir: where hidden states are kept.
        advance: is told of every model that has been shown a probe.
    """
    sources = [open_source(model.name) for model in models]
    rows = [Row(table, a, b, {}) for table, a, b in pairs(models)]
    for probe, tests in probes(study).items():
        check_comparable(sources, probe)
        shown, hidden = probe, dict[Member, HiddenStates]()
        for model, source in zip(models, sources, strict=True):
            decoder = source.load().to(device())
            if not hidden:
                shown = probe.like(decoder)
            hidden[model] = HiddenStates(cached_hidden_states(decoder, shown, cache_dir))
            del decoder
            advance(1)
        for row in rows:
            for test in tests:
                row.found[test] = compare(
                    hidden[row.a],
                    hidden[row.b],
                    study.tests[test].recipe,
                    probe=probe.kind,
                    vocab_size=sources[0].config.vocab_size,
                )
    return rows


@dataclass(frozen=True)
class Tally:
    """What one test says of the pairs of one table that are in truth the same."""

    table: int
    expected: Verdict
    n: int
    """Pairs."""
    verdicts: Counter[Verdict]
    """How many are called what."""
    low: float
    """Smallest z; NaN where no test was possible."""
    high: float
    """Largest."""


def tally(rows: Sequence[Row], test: str) -> list[Tally]:
    """What ``test`` says, table by table, kin before strangers."""
    found = []
    for table in sorted({row.table for row in rows}):
        for expected in ("kin", "stranger"):
            tests = [row.found[test] for row in rows if (row.table, row.expected) == (table, expected)]
            z = [test.z for test in tests if test.verdict != "undefined"] or [float("nan")]
            if tests:
                verdicts = Counter(test.verdict for test in tests)
                found.append(Tally(table, expected, len(tests), verdicts, min(z), max(z)))
    return found
