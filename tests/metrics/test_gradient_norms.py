"""Norms of gradients: means over sequences, however they are split; what is unseen, broken or zero."""

import numpy as np
import pytest
import torch

from birthmark.metrics.gradient_norms import GradientNorms, first_over_others

N, L, H, T, D, K = 5, 2, 3, 6, 8, 4


def test_means_of_norms_do_not_depend_on_the_batches():
    generator = torch.Generator().manual_seed(0)
    mlp, attention = torch.randn(L + 1, N, T - 1, D, generator=generator), torch.randn(L, N, T - 1, D)
    heads = torch.randn(3, L, N, H, T - 1, K, generator=generator)
    metric = GradientNorms(L, H, T)
    for part in (slice(0, 2), slice(2, 5)):
        metric.update(torch.tensor(1.5) * len(range(N)[part]), len(range(N)[part]))
        for layer in range(L + 1):
            metric.after_mlp(layer, mlp[layer, part])
        for layer in range(1, L + 1):
            metric.after_attention(layer, attention[layer - 1, part])
            metric.in_heads(
                layer, dict(zip(("query", "key", "value"), heads[:, layer - 1, part].unbind(0), strict=True))
            )
    found = metric.compute()
    assert found.loss == 1.5
    expected = [mlp, attention, *heads]
    for array, given in zip([found.mlp, found.attention, *found.heads.values()], expected, strict=True):
        mean = np.sqrt((given.double().numpy() ** 2).sum(-1)).mean(1)
        np.testing.assert_allclose(array[..., :-1], mean, rtol=1e-6)
        assert np.isnan(array[..., -1]).all()


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
