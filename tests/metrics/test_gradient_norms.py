"""Norms of gradients: means over sequences, however they are split; what is unseen, broken or zero."""

import numpy as np
import pytest
import torch

from birthmark.metrics.gradient_norms import GradientNorms, first_over_others

N, L, H, T, D, K = 5, 2, 3, 6, 8, 4


def test_a_layer_without_attention_is_nan_and_a_broken_gradient_inf():
    metric = GradientNorms(L, H, T)
    metric.update(torch.tensor(2.0), 1)
    for layer in range(L + 1):
        metric.after_mlp(layer, torch.full((1, T - 1, D), float("nan") if layer == 1 else 1.0))
    found = metric.compute()
    assert np.isinf(found.mlp[1, :-1]).all()
    assert np.isfinite(found.mlp[[0, 2], :-1]).all()
    assert np.isnan(found.heads["key"]).all()
    assert np.isnan(found.attention).all()


@pytest.mark.parametrize(("norms", "ratio"), [([4, 1, 3], 2), ([0, 0, 0], 1), ([0, 1, 1], 0), ([3, 0, 0], np.inf)])
def test_the_first_over_the_mean_of_the_others(norms, ratio):
    assert first_over_others(np.array([*norms, np.nan], dtype=float)) == ratio
