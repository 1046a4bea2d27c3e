"""Every metric over a real process group: each rank sees a part of the probe, and both know the whole."""

from __future__ import annotations

import numpy as np
import torch

SCRIPT = """
import sys
import numpy as np
import torch
import torch.distributed as dist
from birthmark.metrics.directions import SeedAlignment
from birthmark.metrics.heads import HeadEntropy
from birthmark.metrics.heads import KeyValueNorms
from birthmark.metrics.heads import SequenceSinks
from birthmark.metrics.directions import Contraction
from birthmark.metrics.activation_outliers import ActivationOutliers
from birthmark.metrics.quantity import Sizes
from birthmark.metrics.neurons import SuperNeurons
from birthmark.metrics.preference import TokenPreference
from birthmark.metrics.qk_lock import QKLock
from birthmark.metrics.sinks import AttentionSinks, key_sums
from birthmark.metrics.dominance import DominanceRatio, EffectiveRank, MassiveActivations
from birthmark.metrics.variance import EffectiveTokens, PositionalVariance


class Matrix:
    def __init__(self, a):
        self.a = a

    def rows(self, start, stop):
        return self.a[:, :, start:stop].clone()

    def row_sum(self):
        return self.a.sum(-1)

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
generator = torch.Generator().manual_seed(0)
h, logits = torch.randn(10, 6, 8, generator=generator) + 0.5, torch.randn(10, 30, generator=generator)
q, k = torch.randn(2, 10, 1, 6, 4, generator=generator)
a = (q @ k.mT).masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf).softmax(-1)
references = torch.nn.functional.normalize(torch.randn(2, 1, 8, generator=generator), dim=-1)
results = {}
sizes, places = Sizes(1, 1, 8, 4, 8, 30, 6), torch.randint(0, 30, (10, 6), generator=generator)
# The whole probe while there is no group, then this rank's part, reduced over the group.
for kind, mine in (("whole", slice(0, 10)), ("reduced", (slice(0, 7), slice(7, 10))[rank])):
    if kind == "reduced":
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    contraction, alignment = Contraction(1, 8), SeedAlignment(references)
    preference, sinks = TokenPreference(30), AttentionSinks(1, 1, 6, 0.3, (0.1, 0.2))
    dominance, massive, spectrum = DominanceRatio(1, 6), MassiveActivations(1, 6, 8, 4), EffectiveRank(1, 8)
    units, lock, tokens = SuperNeurons(1, 8), QKLock(1, 1, 4), EffectiveTokens(1, 1, 6)
    variance = PositionalVariance(1, 1, 6, 4)
    contraction.update(0, h[mine])
    alignment.update(0, h[mine])
    preference.update(logits[mine])
    sums = key_sums(Matrix(a[mine]), 6)
    sinks.update(0, sums)
    tokens.update(0, *sums.squares_2BHT)
    for metric in (dominance, spectrum, units):
        metric.update(0, h[mine])
    massive.update(0, h[mine].round())  # many are equal: which are listed must not depend on the rank that saw them
    lock.update(0, q[mine], k[mine])
    variance.update(0, q[mine])
    made = contraction, alignment, preference, sinks, tokens, dominance, massive, spectrum, units, lock, variance
    for metric in made:
        for name, value in metric.compute()._asdict().items():
            results[f"{kind}.{type(metric).__name__}.{name}"] = value
    kinds = KeyValueNorms, HeadEntropy, SequenceSinks, ActivationOutliers
    norms, entropy, found, outliers = (made_of(sizes) for made_of in kinds)
    norms.update(0, k[mine], q[mine], sums.importance_2BHT[1])
    entropy.update(0, sums._replace(largest_BH=q[mine].amax((2, 3))))
    found.update(0, sums.importance_2BHT[1], places[mine])
    outliers.residual("embedding", 0, h[mine])
    for metric in (norms, entropy, found, outliers):
        for name, value in metric.compute().items():
            results[f"{kind}.{type(metric).__name__}.{name}"] = value
np.savez(out, **results)
"""


def test_two_processes_with_a_part_each_compute_the_whole(two_ranks):
    results = two_ranks(SCRIPT, ".npz")
    for result in map(np.load, results):
        names = [name.removeprefix("whole.") for name in result.files if name.startswith("whole.")]
        assert len(names) == 2 + 4 + 2 + 11 + 2 + 3 + 3 + 2 + 2 + 3 + 2 + 6 + 3 + 7 + 14
        for name in names:
            reduced, whole = result[f"reduced.{name}"], result[f"whole.{name}"]
            assert reduced.shape == whole.shape, name
            np.testing.assert_allclose(reduced, whole, rtol=1e-6, atol=1e-7, err_msg=name)
        assert result["reduced.AttentionSinks.mass"].shape == (1, 1)


MORE = """
import sys
import torch
import torch.distributed as dist
import numpy as np
from birthmark.metrics.sums import AdditiveMetric
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
    for result in map(np.load, two_ranks(MORE, ".npz")):
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
