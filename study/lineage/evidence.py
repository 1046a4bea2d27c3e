"""Evidence about a model for tests of its lineage, kept after the model is freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ...measure.foreign import ForeignModel
from ...measure.hidden_states import FingerprintProbe
from ...measure.matched.stream_reading import stream_weights
from ...metrics.config import LineageTestConfig, Null
from ...metrics.matched.stream_weights import StreamWeights
from ...metrics.matched.unit_pairings import compare_weights
from ...metrics.seedprint import Fingerprint, HiddenStates, compare
from ...models.decoder import Decoder

#: The one null that reads weights; all others read hidden states.
_OF_WEIGHTS = "matched"


@dataclass(frozen=True)
class Evidence:
    """Evidence about a model for the nulls in question."""

    hidden: HiddenStates | None
    """Hidden states over the probe; None if no null reads them."""
    weights: StreamWeights | None
    """Weights of the residual stream; None if no null reads them."""


def evidence_of(
    model: Decoder | ForeignModel,
    nulls: Iterable[Null],
    hidden: Callable[[Decoder | ForeignModel], np.ndarray],
) -> Evidence:
    """Collect the evidence about a model for these nulls; ``hidden``, called if one needs it, returns hidden states
    ``[N, D]``.
    """
    asked = set(nulls)
    return Evidence(
        HiddenStates(hidden(model)) if asked - {_OF_WEIGHTS} else None,
        stream_weights(model) if _OF_WEIGHTS in asked else None,
    )


def compare_evidence(
    a: Evidence, b: Evidence, recipe: LineageTestConfig, probe: FingerprintProbe, vocab_size: int | None = None
) -> Fingerprint:
    """Test two models by their evidence, which must include that of the recipe's null."""
    if recipe.null == _OF_WEIGHTS:
        assert a.weights is not None
        assert b.weights is not None
        return compare_weights(a.weights, b.weights)
    assert a.hidden is not None
    assert b.hidden is not None
    return compare(a.hidden, b.hidden, recipe, probe=probe.kind, vocab_size=vocab_size)
