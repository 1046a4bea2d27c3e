"""Metrics whose states are sums."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from torchmetrics import MetricCollection

from birthmark.metrics.directions import Contraction, SeedAlignment
from birthmark.metrics.dominance import MassiveActivations
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


class KeptSums(Sums):
    """The same, added up later."""

    def update(self, place, x):
        self.keep(place, x)

    def _add(self, places, x_P):
        self.total[places].add_(x_P)
        self.n.add_(len(x_P))


both_kinds = pytest.mark.parametrize("kind", [Sums, KeptSums])


def test_no_second_copy_of_a_state_is_kept():
    """What torchmetrics remembers as defaults is a number each."""
    assert [default.untyped_storage().nbytes() for default in Sums()._defaults.values()] == [8, 4]


@both_kinds
def test_reset_begins_anew(kind):
    metric = kind()
    for _ in range(2):
        metric.update(0, torch.ones(1000))
        metric.update(1, 2 * torch.ones(1000))
        assert torch.equal(metric.compute(), torch.tensor([[0.5], [1.0]], dtype=torch.float64).expand(2, 1000))
        metric.update(1, torch.ones(1000))
        metric.reset()
        metric.flush()
        assert metric.total.shape == (2, 1000)
        assert not metric.total.any()


@both_kinds
def test_copies_have_sums_of_their_own(kind):
    metric = kind()
    metric.update(0, torch.ones(1000))
    others = [metric.clone(), copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))]
    for other in (*others, metric):
        other.update(0, torch.full((1000,), 3.0))
        assert (other.compute()[0] == 2).all()


@pytest.mark.parametrize("build", [partial(Contraction, 1, 8), partial(MassiveActivations, 1, 5, 8)])
def test_one_batch_at_a_time_is_given_alone_and_adds_up(build):
    """``metric(batch)``, torchmetrics' own way to have both."""
    h = torch.randn(9, 5, 8, generator=torch.Generator().manual_seed(0))
    metric, whole = build(), build()
    metric.update(0, h[:2])
    for part in (h[2:5], h[5:]):
        alone = build()
        alone.update(0, part)
        np.testing.assert_allclose(metric(0, part), alone.compute(), rtol=1e-9)
    whole.update(0, h)
    np.testing.assert_allclose(metric.compute(), whole.compute(), rtol=1e-6)


@both_kinds
def test_moving_a_metric_keeps_what_it_has_summed(kind):
    metric = kind()
    metric.update(1, torch.ones(1000))
    metric = metric.to("cpu").float()
    assert metric.total[1, 3] == 1  # and nothing is kept on the device before
    metric.update(1, torch.full((1000,), 3.0))
    assert metric.compute()[1, 3] == 2
    assert metric.total.dtype == torch.float64
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
