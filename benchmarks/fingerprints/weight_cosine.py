"""The audit's test of weights (docs/audit.md): the mean cosine of tensors of one name, and its p.

The audit samples a thousandth of each tensor; here it reads all of them.
"""

from __future__ import annotations

import numpy as np

from birthmark.metrics.weight_kinship import FEWEST_TENSORS, kinship

from .evidence import Evidence, shared_names
from .method import Finding, Method, NoTest


def weight_cosine(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Take the cosine as the score; its verdict asks for a cosine of 0.1 and p below 10⁻⁴."""
    names = shared_names(a.parameters, b.parameters)
    found = kinship(*({name: model.parameters[name].reshape(1, -1) for name in names} for model in (a, b)))
    if found.verdict is None:
        return NoTest(f"fewer than {FEWEST_TENSORS} tensors of one name and shape")
    with np.errstate(divide="ignore"):
        return Finding(found.cosine, max(float(np.log10(found.p)), -300.0), found.verdict)


WEIGHT_COSINE = Method("audit's cosine", "docs/audit.md", ("weights",), weight_cosine)
