"""Divergence and loss of predictions, and the barrier, against scipy and torch."""

import pytest
import scipy.special
import scipy.stats
import torch
from torch.nn import functional as F

from birthmark.metrics.two_models import loss_barrier, token_kl, token_loss


def test_kl_is_scipys_of_every_ordered_pair():
    logits = [5 * torch.randn(4, 9, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    found = token_kl(logits)
    for a in range(3):
        for b in range(3):
            p, q = (scipy.special.softmax(logits[i].double().numpy(), axis=1) for i in (a, b))
            expected = torch.from_numpy(scipy.stats.entropy(p, q, axis=1))
            torch.testing.assert_close(found[:, a, b], expected, atol=1e-12, rtol=1e-9)


def test_loss_is_torchs():
    logits, targets = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 6, 3, 3, 1])
    expected = F.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(token_loss(logits, targets), expected)


def test_a_barrier_rises_above_the_line_between_the_ends():
    assert loss_barrier([0, 0.25, 0.5, 1], [1.0, 2.0, 2.5, 3.0]) == pytest.approx((0.5, 0.25))
    assert loss_barrier([0, 0.5, 1], [3.0, 1.0, 2.0]) == (0, 0)
