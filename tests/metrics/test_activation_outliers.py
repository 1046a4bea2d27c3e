"""Outliers against the evaluation that was published with arXiv 2306.12929, and scipy."""

import numpy as np
import pytest
import scipy.stats
import torch

from birthmark.metrics.activation_outliers import ActivationOutliers
from birthmark.metrics.quantity import Sizes

SIZES = Sizes(1, 2, 48, 24, 96, 30, 20)


def published(x_BTD):
    """Kurtosis and ∞-norm of each sequence as the released code has them, in float64."""
    x = x_BTD.double().reshape(len(x_BTD), -1)
    kurtosis = ((x - x.mean(1, keepdims=True)) ** 4.0).mean(1) / (x.std(1) ** 4.0 + 1e-6)
    return kurtosis.mean().item(), x.norm(dim=1, p=np.inf).mean().item()


def activations(kind):
    x = torch.randn(6, 20, 48, generator=torch.Generator().manual_seed(0))
    if kind == "massive":
        x[:, 0, 7] = torch.linspace(300, -900, 6)
    if kind == "shifted":
        x = x + 40
    if kind == "small":
        x = 0.02 * x
    return x


@pytest.mark.parametrize("kind", ["normal", "massive", "shifted", "small"])
@pytest.mark.parametrize("parts", [(6,), (1, 5)])
def test_they_equal_the_published_formula(kind, parts):
    x = activations(kind)
    metric = ActivationOutliers(SIZES)
    for part in x.split(parts):
        metric.residual("mlp", 1, part)
        metric.sublayer("mlp", 1, 2 * part)
    found = metric.compute()
    kurtosis, norm = published(x)
    assert found["residual_kurtosis_published"][1] == pytest.approx(kurtosis, rel=1e-6)
    assert found["residual_inf_norm"][1] == pytest.approx(norm, rel=1e-6)
    assert found["mlp_kurtosis_published"][0] == pytest.approx(published(2 * x)[0], rel=1e-6)
    n = 20 * 48
    flat = x.double().reshape(6, -1).numpy()
    plain = scipy.stats.kurtosis(flat, axis=1, fisher=False) * ((n - 1) / n) ** 2
    assert found["residual_kurtosis"][1] == pytest.approx(plain.mean(), rel=1e-6)
    assert found["residual_kurtosis_by_position"][1].mean() == pytest.approx(plain.mean(), rel=1e-6)
    by_position = x.abs().amax(-1).double().mean(0)
    np.testing.assert_allclose(found["residual_inf_norm_by_position"][1], by_position, rtol=1e-6)
    z = np.abs(flat - flat.mean(1, keepdims=True)) / flat.std(1, ddof=1, keepdims=True)
    share = (z.reshape(6, 20, 48).max(1) > 6).mean()
    assert found["residual_outlier_channels"][1] == pytest.approx(share)
    assert (share == pytest.approx(1 / 48)) == (kind == "massive")
    # What was not shown is not there.
    assert np.isnan(found["residual_kurtosis"][0])
    assert np.isnan(found["attention_kurtosis"][0])


def test_without_variance_there_is_no_kurtosis():
    metric = ActivationOutliers(SIZES)
    metric.residual("embedding", 0, torch.full((2, 20, 48), 3.0))
    found = metric.compute()
    assert found["residual_kurtosis"][0] == 0
    assert found["residual_inf_norm"][0] == 3
