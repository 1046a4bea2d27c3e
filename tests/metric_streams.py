"""Every metric that adds up over a probe: how it is made, and how it is shown ten sequences of two blocks."""

from typing import NamedTuple

import numpy as np
import torch
from oracles import Rows

from birthmark.metrics.activation_outliers import ActivationOutliers
from birthmark.metrics.directions import Contraction, SeedAlignment
from birthmark.metrics.dominance import DominanceRatio, EffectiveRank, MassiveActivations
from birthmark.metrics.head_sums import query_sums
from birthmark.metrics.heads import HeadEntropy, KeyValueNorms, SequenceSinks
from birthmark.metrics.neurons import SuperNeurons
from birthmark.metrics.preference import TokenPreference
from birthmark.metrics.qk_lock import QKLock
from birthmark.metrics.quantity import Sizes
from birthmark.metrics.sinks import AttentionSinks, key_sums
from birthmark.metrics.variance import EffectiveTokens, PositionalVariance

N, L, H, T, D, K, V = 10, 2, 2, 6, 8, 4, 30


class Probe(NamedTuple):
    """Content of a pass over ten sequences; ``[places, N, …]``, but for logits and tokens."""

    states: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor


def probe(seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, L, N, H, T, K, generator=generator, dtype=torch.float64)
    weights = (q @ k.mT).masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf).softmax(-1)
    states = torch.randn(L, N, T, D, generator=generator, dtype=torch.float64) + 0.5
    logits = torch.randn(N, V, generator=generator, dtype=torch.float64)
    return Probe(states, q, k, weights, logits, torch.randint(0, V, (N, T), generator=generator))


def _sums(of, place, part):
    return key_sums(Rows(of.weights[place, part], sums=True), T)


def _each_place(show):
    """``show(metric, place, probe, part)`` for one place after the other."""

    def shown(metric, of, part):
        for place in range(L):
            show(metric, place, of, part)

    return shown


def _of_states(metric, place, of, part):
    metric.update(place, of.states[place, part])


def _of_sums(metric, place, of, part):
    metric.update(place, _sums(of, place, part))


def _entropy(metric, place, of, part):
    metric.update(place, _sums(of, place, part)._replace(largest_BH=of.queries[place, part].amax((2, 3))))


_SIZES = Sizes(L, H, D, K, D, V, T)
_REFERENCES = torch.nn.functional.normalize(torch.randn(3, L, D, generator=torch.Generator().manual_seed(9)), dim=-1)
#: Name → (how it is made, how it is shown a part of a probe).
STREAMS = {
    "alignment": (lambda: SeedAlignment(_REFERENCES), _each_place(_of_states)),
    "contraction": (lambda: Contraction(L, D), _each_place(_of_states)),
    "dominance": (lambda: DominanceRatio(L, T), _each_place(_of_states)),
    "effective rank": (lambda: EffectiveRank(L, D), _each_place(_of_states)),
    "super neurons": (lambda: SuperNeurons(L, D), _each_place(_of_states)),
    # Many are equal: which are listed must not depend on the part that they came in.
    "massive activations": (
        lambda: MassiveActivations(L, T, D, 4),
        _each_place(lambda m, i, of, part: m.update(i, of.states[i, part].round())),
    ),
    "outliers": (
        lambda: ActivationOutliers(_SIZES),
        _each_place(lambda m, i, of, part: m.residual("mlp" if i else "embedding", i, of.states[i, part])),
    ),
    "preference": (lambda: TokenPreference(V), lambda m, of, part: m.update(of.logits[part])),
    "sinks": (lambda: AttentionSinks(L, H, T, 0.3, (0.1, 0.2)), _each_place(_of_sums)),
    "effective tokens": (
        lambda: EffectiveTokens(L, H, T),
        _each_place(lambda m, i, of, part: m.update(i, *_sums(of, i, part).squares_2BHT)),
    ),
    "lock": (
        lambda: QKLock(L, H, K),
        _each_place(lambda m, i, of, part: m.update(i, query_sums(of.queries[i, part], of.keys[i, part]))),
    ),
    "variance": (
        lambda: PositionalVariance(L, H, T, K), _each_place(lambda m, i, of, part: m.update(i, of.queries[i, part]))
    ),
    "norms of keys and values": (
        lambda: KeyValueNorms(_SIZES),
        _each_place(
            lambda m, i, of, part: m.update(
                i, of.keys[i, part], of.queries[i, part], _sums(of, i, part).importance_2BHT[1]
            )
        ),
    ),
    "entropy": (lambda: HeadEntropy(_SIZES), _each_place(_entropy)),
    "sinks of sequences": (
        lambda: SequenceSinks(_SIZES),
        _each_place(lambda m, i, of, part: m.update(i, _sums(of, i, part).importance_2BHT[1], of.tokens[part])),
    ),
}  # fmt: skip


def results(metric):
    """Its arrays by name."""
    found = metric.compute()
    found = found if isinstance(found, dict) else found._asdict()
    return {name: np.asarray(value) for name, value in found.items()}
