"""Table of all methods, in the order of the results: ours last."""

from __future__ import annotations

from .awm import AWM
from .huref import ICS, PCS
from .method import Method
from .model_tracing import CSH, CSU, MATCH
from .reef import REEF
from .seedprint_nulls import ANALYTIC, ANALYTIC_WIDER, DIMENSIONS, EMPIRICAL, MATCHED
from .weight_cosine import WEIGHT_COSINE
from .weight_statistics import INTRINSIC

METHODS: tuple[Method, ...] = (
    ANALYTIC, ANALYTIC_WIDER, EMPIRICAL, CSU, CSH, MATCH, AWM, ICS, PCS, REEF, INTRINSIC, WEIGHT_COSINE, DIMENSIONS,
    MATCHED,
)  # fmt: skip
