"""SeedPrint [SP] (arXiv 2509.26404): rank correlation of final hidden states, its nulls and ours; ``matched``.

The statistic and the nulls are the package's own (birthmark.metrics.seedprint; docs/lineage.md).
"""

from __future__ import annotations

from functools import partial

from birthmark.metrics.config import LineageTestConfig
from birthmark.metrics.matched_weights import compare_weights
from birthmark.metrics.seedprint import Fingerprint
from birthmark.metrics.seedprint import compare as fingerprint

from .evidence import Evidence
from .method import Finding, Method, Need, NoTest

_NEEDS: tuple[Need, ...] = ("states", "width", "vocabulary")


def by_null(recipe: LineageTestConfig, a: Evidence, b: Evidence) -> Finding | NoTest:
    """Test the final hidden states under one null."""
    return _finding(fingerprint(a.final, b.final, recipe, vocab_size=len(a.embed_VD)))


def matched(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Test the weights by our own method: channels are aligned by the embeddings, then units of the same index are
    compared.
    """
    return _finding(compare_weights(a.stream, b.stream))


def _finding(found: Fingerprint) -> Finding | NoTest:
    """Return z as the score, with the null's p."""
    return NoTest(found.reason) if found.verdict == "undefined" else Finding(found.z, found.log10_p)


def _method(name: str, source: str, recipe: LineageTestConfig) -> Method:
    return Method(name, source, _NEEDS, partial(by_null, recipe))


ANALYTIC = _method("SeedPrint, analytic", "arXiv 2509.26404", LineageTestConfig(null="analytic"))
#: In a narrow model two sets of 10 % of the dimensions have hardly any in common.
ANALYTIC_WIDER = _method("SeedPrint, analytic, 25 %", "arXiv 2509.26404", LineageTestConfig(null="analytic", k=0.25))
EMPIRICAL = _method("SeedPrint, empirical, 25 %", "arXiv 2509.26404", LineageTestConfig(null="empirical", k=0.25))
MATCHED = Method("`matched`", "docs/lineage.md", ("weights", "width", "vocabulary"), matched)
DIMENSIONS = _method("`dimensions`", "docs/lineage.md", LineageTestConfig(null="dimensions"))
