"""Sums of metrics over a real process group, of which ranks see unequal parts; the parts of others: test_streams.py."""

import numpy as np
import torch

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import numpy as np
from birthmark.metrics.summed_metrics import AdditiveMetric
from birthmark.metrics.directions import Contraction
from birthmark.metrics.dominance import EffectiveRank
from birthmark.metrics.variance import PositionalVariance

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
generator = torch.Generator().manual_seed(0)
h = torch.randn(3, 10, 6, 8, generator=generator) * torch.linspace(0.1, 3, 8)
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
dist.all_gather = None  # nothing may gather
results = {}
# Rank 0 sees nothing at first, then the last sequence; rank 1 the others, in two parts.
made = EffectiveRank(3, 8), Contraction(3, 8), PositionalVariance(3, 2, 6, 4)
for kind, mine in (("some", (h[:, :0], h[:, :6])[rank]), ("all", (h[:, 9:], h[:, 6:9])[rank])):
    for metric in made:
        for place, part in enumerate(mine):
            metric.update(place, part.unflatten(-1, (2, 4)).transpose(1, 2) if metric is made[2] else part)
        metric.flush()
        before = {name: getattr(metric, name).clone() for name in metric._sums}
        for name, value in metric.compute()._asdict().items():
            results[f"{kind}.{type(metric).__name__}.{name}"] = value
        assert all(torch.equal(state, getattr(metric, name)) for name, state in before.items())
np.savez(out, **results)
"""


def test_sums_are_added_up_without_gathering_them_and_go_on_growing_afterwards(two_ranks):
    """Ranks that have seen nothing, and more places than ranks to share them."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(3, 10, 6, 8, generator=generator) * torch.linspace(0.1, 3, 8)
    for result in map(np.load, two_ranks(SCRIPT, ".npz")):
        for kind, n in (("some", 6), ("all", 10)):
            x = h[:, :n].double()
            values = torch.linalg.svdvals(x.flatten(1, 2))
            share = values / values.sum(-1, keepdim=True)
            np.testing.assert_allclose(
                result[f"{kind}.EffectiveRank.effective_rank"], torch.special.entr(share).sum(-1).exp(), rtol=1e-5
            )
            unit = torch.nn.functional.normalize(x[:, :, -1], dim=-1)
            cosines = (unit @ unit.mT).sum((1, 2)) - n
            np.testing.assert_allclose(result[f"{kind}.Contraction.inter"], cosines / (n * (n - 1)), atol=1e-6)
            variance = x.var(1).unflatten(-1, (2, 4)).mean(-1).mT
            np.testing.assert_allclose(result[f"{kind}.PositionalVariance.variance"], variance, rtol=1e-9)
