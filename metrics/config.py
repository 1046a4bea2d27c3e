"""Config of the comparison of two models (definitions §10)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..schema import SEEDS, mistyped, outside

#: ``matched`` tests weights, the other nulls hidden states.
Null = Literal["dimensions", "dimensions_sampled", "matched", "analytic", "empirical", "empirical_full", "inputs"]


@dataclass(frozen=True)
class LineageTestConfig:
    """Settings of the comparison of two models."""

    null: Null = "dimensions"
    """Null that the statistic is compared with. ``dimensions``: random pairings of the columns, exact moments (and so
    calibrated); ``dimensions_sampled``: the same by ``draws`` random pairings; ``matched``: compares weights, not
    hidden states, for models whose channels were permuted, flipped, scaled or rotated. As published [SP], on identity
    dimensions: ``analytic``; ``empirical``, independent Gaussian matrices of the selected size; ``empirical_full``,
    independent Gaussian matrices through the whole procedure; ``inputs``, shuffled inputs.
    """

    correlation: Literal["spearman", "kendall"] = "spearman"
    """Correlation of the null ``dimensions``; ``kendall`` takes D² calls of scipy's τ-b. The published statistic is
    always τ-b.
    """

    choice: Literal["coset", "base"] = "coset"
    """Identity dimensions: those that both models have, or the first model's [SP]."""

    k: float = 0.1
    """Identity dimensions of each model: a share of the width below 1, else a number."""

    temperature: float = 10.0
    """Temperature of the softmax over identity dimensions."""

    aggregate: bool = False
    """For the null ``analytic``: also correlate each input's mean over the identity dimensions, one τ-b. The larger z
    counts, and p twice (Bonferroni) [SP].
    """

    draws: int | None = None
    """Random draws of a null that has any; by default 100, and 9999 for ``dimensions_sampled``."""

    null_seed: int = 0
    """Seed of the draws, and of nothing else."""

    @property
    def n_draws(self) -> int:
        """Number of random draws, by default the null's own."""
        return self.draws or (9999 if self.null == "dimensions_sampled" else 100)

    def n_dimensions(self, width: int) -> int:
        """Return the number of identity dimensions to look for in each model."""
        return min(width, int(self.k * width + 1e-9) if self.k < 1 else int(self.k))

    def problems(self) -> list[str]:
        """List everything that makes this config impossible, one line each, with the remedy."""
        if found := mistyped(self):
            return found
        if not (0 < self.k < 1 or (self.k >= 1 and float(self.k).is_integer())):
            found.append(f"k is {self.k}: give a share between 0 and 1, or a whole number")
        if not 0 < self.temperature < math.inf:
            found.append(f"temperature is {self.temperature}: give a positive number")
        if self.aggregate and self.null != "analytic":
            found.append(f"aggregate is true: the null {self.null} has no such signal; give --null analytic")
        # A share of fewer pairings would be too coarse to distinguish p = 0.01 from its neighbours.
        fewest = 1000 if self.null == "dimensions_sampled" else 20
        if self.draws is not None and self.draws < fewest:
            found.append(f"draws is {self.draws}: give at least {fewest} for the null {self.null}")
        return found + outside("", self, {"null_seed": (0, SEEDS[1])})
