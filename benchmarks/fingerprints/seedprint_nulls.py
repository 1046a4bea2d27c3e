"""SeedPrint [SP] (arXiv 2509.26404): rank correlation of final hidden states, under its nulls and ours.

The statistic and the nulls are the package's own (birthmark.metrics.seedprint; docs/seedprint.md).
"""

from __future__ import annotations

from functools import partial

from birthmark.metrics.config import LineageTestConfig, Null
from birthmark.metrics.seedprint import compare as fingerprint

from .evidence import Evidence
from .method import Finding, Method, NoTest


def by_null(null: Null, a: Evidence, b: Evidence) -> Finding | NoTest:
    """z as the score, with the null's p."""
    found = fingerprint(a.final, b.final, LineageTestConfig(null=null), vocab_size=len(a.embed_VD))
    return NoTest(found.reason) if found.verdict == "undefined" else Finding(found.z, found.log10_p)


ANALYTIC = Method(
    "SeedPrint, analytic", "arXiv 2509.26404", ("states", "width", "vocabulary"), partial(by_null, "analytic")
)
EMPIRICAL = Method(
    "SeedPrint, empirical", "arXiv 2509.26404", ("states", "width", "vocabulary"), partial(by_null, "empirical")
)
DIMENSIONS = Method(
    "`dimensions`", "docs/seedprint.md", ("states", "width", "vocabulary"), partial(by_null, "dimensions")
)
