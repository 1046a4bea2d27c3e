"""Metrics whose states are sums."""

import copy
import pickle

import numpy as np
import torch

from birthmark.metrics.directions import Contraction
from birthmark.metrics.summed_metrics import AdditiveMetric


class Sums(AdditiveMetric):
    """The sum of what it is given, per place, and how much that was."""

    def __init__(self):
        super().__init__()
        self.add_sums(total=(2, 1000))
        self.add_sums(torch.int32, n=())

    def update(self, place, x):
        self.total[place].add_(x)
        self.n.add_(1)

    def compute(self):
        return self.total / self.n


def test_no_second_copy_of_a_state_is_kept():
    """What torchmetrics remembers as defaults is a number each."""
    assert [default.untyped_storage().nbytes() for default in Sums()._defaults.values()] == [8, 4]


def test_reset_begins_anew():
    metric = Sums()
    for _ in range(2):
        metric.update(0, torch.ones(1000))
        metric.update(1, 2 * torch.ones(1000))
        assert torch.equal(metric.compute(), torch.tensor([[0.5], [1.0]], dtype=torch.float64).expand(2, 1000))
        metric.reset()
        assert metric.total.shape == (2, 1000)
        assert not metric.total.any()


def test_copies_have_sums_of_their_own():
    metric = Sums()
    metric.update(0, torch.ones(1000))
    for other in (metric.clone(), copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        other.update(0, torch.ones(1000))
        assert metric.total[0, 0] == 1
        assert other.total[0, 0] == 2


def test_one_batch_at_a_time_is_given_alone_and_adds_up():
    """``metric(batch)``, torchmetrics' own way to have both."""
    h = torch.randn(9, 5, 8, generator=torch.Generator().manual_seed(0))
    metric, whole = Contraction(1, 8), Contraction(1, 8)
    for part in (h[:4], h[4:]):
        alone = Contraction(1, 8)
        alone.update(0, part)
        np.testing.assert_allclose(metric(0, part), alone.compute(), rtol=1e-9)
    whole.update(0, h)
    np.testing.assert_allclose(metric.compute(), whole.compute(), rtol=1e-6)


def test_moving_a_metric_keeps_what_it_has_summed():
    metric = Sums()
    metric.update(1, torch.ones(1000))
    metric = metric.to("cpu").float()
    metric.update(1, torch.ones(1000))
    assert metric.total.dtype == torch.float64
    assert metric.total[1, 3] == 2
    metric.to("cpu").reset()
    assert metric.total.shape == (2, 1000)
