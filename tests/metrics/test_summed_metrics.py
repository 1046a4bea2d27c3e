"""Metrics whose states are sums."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torchmetrics import MetricCollection

from birthmark.metrics.directions import Contraction, SeedAlignment
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


def states(batches):
    """A metric that has seen some batches, the last of which it keeps."""
    metric = Contraction(1, 8)
    for h in batches:
        metric.update(0, h)
    return metric


@pytest.mark.parametrize("way", ["state_dict", "metric_state"])
def test_states_that_are_stored_have_every_batch(way):
    first, second = torch.randn(2, 9, 5, 8, generator=torch.Generator().manual_seed(0))
    metric, other = states([first]), states([second])
    if way == "state_dict":
        for one in (metric, other):
            one.persistent(True)
        other.load_state_dict(metric.state_dict())  # in place of what it had
        other.update(0, second)
    else:
        other.merge_state(metric.metric_state)
    whole = states([torch.cat([first, second])])
    np.testing.assert_allclose(other.compute(), whole.compute(), rtol=1e-6)


def test_a_collection_gives_what_its_metrics_give():
    """torchmetrics updates one of several metrics whose states are equal after the first batch, and no other one."""
    batches = torch.randn(3, 9, 5, 8, generator=torch.Generator().manual_seed(0))
    directions = torch.eye(8)[:2, None, None]
    make = {"a": lambda: SeedAlignment(directions[0]), "b": lambda: SeedAlignment(directions[1])}
    make |= {"c": lambda: Contraction(1, 8), "d": lambda: Contraction(1, 8)}
    together = MetricCollection({name: one() for name, one in make.items()})
    for h in batches:
        together.update(0, h)
    found = together.compute()
    for name, one in make.items():
        alone = one()
        for h in batches:
            alone.update(0, h)
        for got, wanted in zip(found[name], alone.compute(), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-9, err_msg=name)
    assert sorted(map(sorted, together.compute_groups.values())) == [["a"], ["b"], ["c", "d"]]
