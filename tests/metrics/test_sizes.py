"""Reductions of |x| in both ways that they are written, against numpy (metrics/sums.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from birthmark.metrics import sums


class Elsewhere(torch.Tensor):
    """A tensor of the CPU that says it is on another device: what a GPU computes is computed here."""

    device = torch.device("meta")


@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_reduction_is_that_of_numpy_on_every_device(kind, dtype, monkeypatch):
    monkeypatch.setattr(sums, "_CACHED", 20)
    x = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected, shown = x.double().numpy(), x.as_subclass(kind)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for found, wanted in (
        (sums.largest_size(shown, 1), abs(expected).max(1)),
        (sums.largest_size(shown, -1), abs(expected).max(-1)),
        (sums.total_size(shown), abs(expected).sum(1)),
        (sums.channel_norms(shown[:, None]), np.linalg.norm(expected, axis=-1)[:, None]),
    ):
        np.testing.assert_allclose(found.as_subclass(torch.Tensor).double().numpy(), wanted, rtol=tolerance)
    assert (
        sums.total_size(shown[:, 1:]).dtype
        == sums.channel_norms(shown[:, None]).dtype
        == torch.promote_types(dtype, torch.float32)
    )
