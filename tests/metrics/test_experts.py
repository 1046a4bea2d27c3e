"""Shares of experts by position, against counting by hand."""

import numpy as np
import torch

from birthmark.metrics.experts import ExpertShares
from birthmark.metrics.quantity import Sizes


def test_shares_and_distances_are_those_of_counting():
    chosen_LBTK = torch.randint(0, 5, (2, 7, 6, 2), generator=torch.Generator().manual_seed(0))
    chosen_LBTK[:, :, 0] = 4  # the first position has an expert of its own
    chosen_LBTK[:, :, 1:] %= 4
    metric = ExpertShares(Sizes(2, 1, 8, 8, 0, 9, 6, None, 5))
    for layer in (1, 2):
        metric.routing(layer, chosen_LBTK[layer - 1, :3])
        metric.routing(layer, chosen_LBTK[layer - 1, 3:])
    found = {name: value.numpy() for name, value in metric.compute().items()}
    for layer in range(2):
        shares = np.array(
            [[np.mean(chosen_LBTK[layer, :, t].numpy() == e) for e in range(5)] for t in range(6)], dtype=np.float64
        )
        others = shares[1:].mean(0)
        distance = np.abs(shares - others).sum(-1) / 2
        np.testing.assert_allclose(found["expert_share_first"][layer], shares[0])
        np.testing.assert_allclose(found["expert_share_others"][layer], others)
        np.testing.assert_allclose(found["routing_distance"][layer], distance)
        np.testing.assert_allclose(found["routing_median"][layer], np.median(distance[1:]))
    np.testing.assert_allclose(found["routing_first"], 1)
