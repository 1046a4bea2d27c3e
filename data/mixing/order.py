"""Source of each sample, and the index of the sample within that source, in shares that may change at given samples. No
state is kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .proportions import Proportions


@dataclass(frozen=True)
class Stage:
    """Shares of the sources from a sample on."""

    first: int
    """Global index of its first sample."""

    shares: dict[str, float]
    """Shares of the samples, by source; they add up to 1."""

    proportions: Proportions
    before_S: np.ndarray
    """Samples that each source gives in the stages before."""


class SourceOrder:
    """Assignment of samples to sources in given shares, each source read in its own order.

    Args:
        names: names of the sources.
        weights: weights by source, relative to their sum; a source without a weight is not read.
        changes: weights from a sample on, in the order of these samples: (its global index, weights by source).
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Mapping[str, float],
        changes: Sequence[tuple[int, Mapping[str, float]]] = (),
    ) -> None:
        self.names = list(names)
        self.stages: list[Stage] = []
        """Stages in their order; the first begins with sample 0."""
        for first, of_stage in ((0, weights), *changes):
            given = {name: of_stage.get(name, 0) for name in names}
            total = sum(given.values())
            before_S = self._taken(first) if self.stages else np.zeros(len(given), dtype=np.int64)
            shares = {name: weight / total for name, weight in given.items()}
            self.stages.append(Stage(first, shares, Proportions(list(given.values())), before_S))

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the samples, by source, at the start."""
        return self.stages[0].shares

    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source, and the number within it, of each global sample index: two int64 ``[N]``.

        A stage continues every source where the stage before stopped.
        """
        source_N, number_N = np.empty_like(samples_N), np.empty_like(samples_N)
        stages_N = np.searchsorted([stage.first for stage in self.stages], samples_N, side="right") - 1
        for index in np.unique(stages_N).tolist():
            stage, here_N = self.stages[index], stages_N == index
            source_M, number_M = stage.proportions.places(samples_N[here_N] - stage.first)
            source_N[here_N], number_N[here_N] = source_M, stage.before_S[source_M] + number_M
        return source_N, number_N

    def _taken(self, n_samples: int) -> np.ndarray:
        stage = self.stages[bisect_right(self.stages, n_samples, key=lambda stage: stage.first) - 1]
        return stage.before_S + stage.proportions.taken(n_samples - stage.first)

    def taken(self, n_samples: int) -> dict[str, int]:
        """Count the samples of each source among the first ``n_samples``."""
        return dict(zip(self.names, self._taken(n_samples).tolist(), strict=True))
