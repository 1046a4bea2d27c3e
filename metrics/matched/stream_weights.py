"""The weights of one model that face the residual stream, as the null ``matched`` reads them (definitions §10).

Legend: R rows of a table, one per token; D width of the residual stream; N units of a block; M maps of a unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StreamWeights:
    """Tables that align the channels of two models, and the units that are compared once aligned.

    The gain of a norm belongs to the map that reads behind it, so that models that hold it in either place are alike.
    """

    tables: Mapping[str, np.ndarray]
    """Token vectors float32 ``[R, D]`` by name: embeddings, and the output head where it is not the same."""
    units: Mapping[str, np.ndarray]
    """Every unit's vectors in the residual stream, one per map that reads or writes it: float32 ``[N, M, D]`` by place
    in the model. A unit is identified only by its number in a block: a hidden unit of the MLP, a channel of the values.
    """


def spread_rows(n: int, most: int) -> np.ndarray:
    """Return indices of at most ``most`` of ``n`` rows, evenly spaced, rising, int64."""
    return np.arange(n) if n <= most else np.linspace(0, n - 1, most).round().astype(np.int64)
