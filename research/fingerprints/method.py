"""Interface of all methods: from two models to a score, and a p if one is published; or to no test, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite, log10
from typing import Literal

from birthmark.metrics.seedprint import LEVEL

from .evidence import Evidence

Need = Literal["weights", "states", "width", "vocabulary", "hidden units", "depth", "gated MLP", "three blocks"]


@dataclass(frozen=True)
class Finding:
    """Result of a test of two models."""

    score: float
    """The larger, the more alike."""
    log10_p: float | None = None
    """Base-10 logarithm of p; None where no p is published."""
    called: bool | None = None
    """The method's own verdict, where it is another than p below `LEVEL`."""

    @property
    def kin(self) -> bool | None:
        """True if the method by its own rule calls the two kin; None if it has no such rule."""
        if self.called is not None or self.log10_p is None:
            return self.called
        return self.log10_p < log10(LEVEL)


@dataclass(frozen=True)
class NoTest:
    """The reason why a method cannot compare two models: never a score."""

    reason: str


@dataclass(frozen=True)
class Method:
    """A published way to tell whether two models share a birth."""

    name: str
    """Name in tables."""
    source: str
    """The paper, and the place of its code."""
    needs: tuple[Need, ...]
    """Requirements: it reads the ``weights`` or ``states`` of a model; the others must be the same in both models."""
    test: Callable[[Evidence, Evidence], Finding | NoTest]


def _differ(what: str, a: object, b: object) -> str:
    return "" if a == b else f"{what}: {a} and {b}"


_UNMET: Mapping[Need, Callable[[Evidence, Evidence], str]] = {
    "weights": lambda a, b: "",
    "states": lambda a, b: "",
    "width": lambda a, b: _differ("widths", a.embed_VD.shape[1], b.embed_VD.shape[1]),
    "vocabulary": lambda a, b: _differ("vocabularies", len(a.embed_VD), len(b.embed_VD)),
    "hidden units": lambda a, b: _differ("hidden units", a.up_LRF.shape[-1], b.up_LRF.shape[-1]),
    "depth": lambda a, b: _differ("blocks", len(a.blocks), len(b.blocks)),
    "gated MLP": lambda a, b: "an MLP without gate" if a.gate_LRF is None or b.gate_LRF is None else "",
    "three blocks": lambda a, b: f"{len(a.blocks)} blocks: at least 3 are needed" if len(a.blocks) < 3 else "",
}


def compare(method: Method, a: Evidence, b: Evidence) -> Finding | NoTest:
    """Test two models by a method; there is no test if they lack what it needs, or if the score is not a number."""
    for need in method.needs:
        if unmet := _UNMET[need](a, b):
            return NoTest(unmet)
    found = method.test(a, b)
    if isinstance(found, Finding) and not isfinite(found.score):
        return NoTest("the score is not a number")
    return found
