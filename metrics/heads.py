"""Heads in detail: spread of attention, norms of keys and values, sinks of sequences, mass on a prefix."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .declarations.sinks import n_judged_keys
from .quantity import Sizes
from .sinks import KeySums, entropy_queries
from .sums import AdditiveMetric, channel_norms, largest_over_ranks


class ShownAttention(Protocol):
    """An attention of a batch: B sequences, H query heads, T positions, K head width."""

    @property
    def k_BHTK(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Keys as they enter the scores."""

    @property
    def v_BHTK(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Values."""

    @property
    def sums(self) -> KeySums:
        """Sums of the weights that queries give to keys."""

    @property
    def tokens_BT(self) -> Tensor | None:  # noqa: N802 - a shape suffix
        """Token ids of the batch; None if unknown."""


# ---------------------------------------------------------------- entropy of attention (definitions §13)


class HeadEntropy(AdditiveMetric):
    """Mean entropy of attention per head, and its largest logit. The states, a sum and a maximum, do not depend on how
    the probe is split.

    Args:
        sizes: sizes of the model and the probe.
    """

    entropy_sum: Tensor
    n_sequences: Tensor
    largest: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.queries = entropy_queries(sizes.seq_len)
        self.add_sums(entropy_sum=(sizes.n_layers, sizes.n_heads), n_sequences=(sizes.n_layers,))
        least = torch.full((sizes.n_layers, sizes.n_heads), -torch.inf, dtype=torch.float64)
        self.add_state("largest", least, dist_reduce_fx="max")

    def attention(self, layer: int, attended: ShownAttention) -> None:
        """See models/observe.py."""
        self.update(layer - 1, attended.sums)

    def update(self, layer: int, sums: KeySums) -> None:
        """Add a batch of one layer (from 0)."""
        assert sums.entropy_BH is not None
        self.entropy_sum[layer].add_(sums.entropy_BH.sum(0, dtype=torch.float64))
        self.n_sequences[layer].add_(len(sums.entropy_BH))
        if sums.largest_BH is not None and len(sums.largest_BH):
            self.largest[layer] = self.largest[layer].maximum(sums.largest_BH.amax(0))

    def reduce_over(self, group: Any) -> None:
        """See :class:`AdditiveMetric`."""
        super().reduce_over(group)
        self.largest = largest_over_ranks(self.largest, group)

    def compute(self) -> dict[str, np.ndarray | float]:
        """Return entropies ``[L, H]``, the entropy of uniform attention, and the largest logits (NaN for layers without
        data).
        """
        largest = self.largest.masked_fill(self.largest == -torch.inf, torch.nan)
        return {
            "attention_entropy_uniform": sum(math.log(t + 1) for t in self.queries) / len(self.queries),
            "attention_entropy": (self.entropy_sum / self.n_sequences[:, None]).cpu().numpy(),
            "largest_logit": largest.cpu().numpy(),
        }


# ---------------------------------------------------------------- norms of keys and values (definitions §13)


class KeyValueNorms(AdditiveMetric):
    """Euclidean norms of keys and values as they enter the attention. States are sums: additive over batches and ranks.

    Args:
        sizes: sizes of the model and the probe.
    """

    position_sum: Tensor
    first_sum: Tensor
    behind_first_sum: Tensor
    sink_sum: Tensor
    elsewhere_sum: Tensor
    n_sequences: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        n_layers, n_heads, self.n_judged = sizes.n_layers, sizes.n_heads, n_judged_keys(sizes.seq_len)
        per_head = (2, n_layers, n_heads)
        self.add_sums(
            position_sum=(2, n_layers, sizes.seq_len),
            first_sum=per_head,
            behind_first_sum=per_head,
            sink_sum=per_head,
            elsewhere_sum=per_head,
            n_sequences=(n_layers,),
        )

    def attention(self, layer: int, attended: ShownAttention) -> None:
        """See models/observe.py."""
        self.update(layer - 1, attended.k_BHTK, attended.v_BHTK, attended.sums.importance_2BHT[1])

    def update(self, layer: int, k_BHTK: Tensor, v_BHTK: Tensor, importance_BHT: Tensor) -> None:
        """Add a batch of one layer (from 0).

        Args:
            layer: the layer.
            k_BHTK: keys as they enter the scores.
            v_BHTK: values.
            importance_BHT: importance of every key, from weights divided by their row's sum; the largest is each head's
                sink.
        """
        norm_XBHT = torch.stack([channel_norms(k_BHTK), channel_norms(v_BHTK)])
        n_others = norm_XBHT.shape[-1] - 1
        sink_BH1 = importance_BHT[..., : self.n_judged].argmax(-1, keepdim=True)
        at_sink_XBH = norm_XBHT.gather(-1, sink_BH1.expand(2, *sink_BH1.shape))[..., 0].double()
        first_XBH, total_XBH = norm_XBHT[..., 0].double(), norm_XBHT.sum(-1, dtype=torch.float64)
        self.position_sum[:, layer].add_(norm_XBHT.sum(1).mean(1))
        self.first_sum[:, layer].add_(first_XBH.sum(1))
        self.behind_first_sum[:, layer].add_((total_XBH - first_XBH).sum(1) / n_others)
        self.sink_sum[:, layer].add_(at_sink_XBH.sum(1))
        self.elsewhere_sum[:, layer].add_((total_XBH - at_sink_XBH).sum(1) / n_others)
        self.n_sequences[layer].add_(len(k_BHTK))

    def compute(self) -> dict[str, np.ndarray]:
        """Return mean norms by position, and the ratios of the norm at position 0 and at the sink to that of the other
        positions.
        """
        by_position = self.position_sum / self.n_sequences[:, None]
        first, sink = self.first_sum / self.behind_first_sum, self.sink_sum / self.elsewhere_sum
        found = {}
        for kind, name in enumerate(("key", "value")):
            found[f"{name}_norms"] = by_position[kind].cpu().numpy()
            found[f"{name}_norm_first"] = first[kind].cpu().numpy()
            found[f"{name}_norm_sink"] = sink[kind].cpu().numpy()
        return found


# ---------------------------------------------------------------- sinks of single sequences (definitions §13)

#: Number of secondary sinks listed per layer.
N_LISTED = 10
#: Columns of a list's entries. A position takes one place in the list however many sequences have a sink there.
_IMPORTANCE, _POSITION, _TOKEN, _HEADS = range(4)


def _first(entries_N4: Tensor, k: int) -> Tensor:
    """Return the first k entries by falling importance, ties by rising position, rising token and falling heads. Each
    position counts once.
    """
    for column, falling in ((_HEADS, True), (_TOKEN, False), (_POSITION, False), (_IMPORTANCE, True)):
        entries_N4 = entries_N4[entries_N4[:, column].argsort(descending=falling, stable=True)]
    position_N = entries_N4[:, _POSITION]
    again_N = (position_N[:, None] == position_N).tril(-1).any(1)
    # Those that are left out go behind the others, which keep their order.
    return entries_N4[again_N.to(torch.uint8).argsort(stable=True)][:k]


class SequenceSinks(AdditiveMetric):
    """Keys that are a sink of a sequence: importance above ε in at least one head of a layer.

    Only keys that at least a quarter of the queries see can count. The list holds, for each layer, the positions behind
    the first of largest importance in any sequence and head, with the token there and the number of the layer's heads
    that have a sink on it. Counts are sums, and merging two lists is exact: the result does not depend on how the probe
    was split.

    Args:
        sizes: sizes of the model and the probe.
        sink_epsilon: importance above which a key is a sink.
    """

    from_setting = ("sink_epsilon",)
    sink_count: Tensor
    n_sequences: Tensor
    listed: Tensor

    def __init__(self, sizes: Sizes, sink_epsilon: float = 0.3) -> None:
        super().__init__()
        self.epsilon, self.n_judged = sink_epsilon, n_judged_keys(sizes.seq_len)
        self.add_sums(sink_count=(sizes.n_layers, sizes.seq_len), n_sequences=(sizes.n_layers,))
        self.k = min(N_LISTED, self.n_judged - 1)
        # Places without an entry have positions of their own, none of which is one.
        nothing_K4 = torch.full((self.k, 4), -1.0, dtype=torch.float64)
        nothing_K4[:, _IMPORTANCE], nothing_K4[:, _POSITION] = -torch.inf, -1.0 - torch.arange(self.k)
        self.add_state("listed", nothing_K4.expand(sizes.n_layers, -1, -1).clone(), dist_reduce_fx=None)

    def attention(self, layer: int, attended: ShownAttention) -> None:
        """See models/observe.py."""
        self.update(layer - 1, attended.sums.importance_2BHT[1], attended.tokens_BT)

    def update(self, layer: int, importance_BHT: Tensor, tokens_BT: Tensor | None) -> None:
        """Add a batch of one layer (from 0).

        Args:
            layer: the layer.
            importance_BHT: importance of every key, from weights divided by their row's sum.
            tokens_BT: token ids; None if unknown: they are then listed as −1.
        """
        if len(importance_BHT) == 0:
            return
        importance_BHJ = importance_BHT[..., : self.n_judged]
        heads_BJ = (importance_BHJ > self.epsilon).sum(1)
        self.sink_count[layer, : self.n_judged].add_((heads_BJ > 0).sum(0))
        self.n_sequences[layer].add_(len(importance_BHT))
        largest_BJ = importance_BHJ.amax(1).double()
        tokens_BJ = torch.full_like(heads_BJ, -1) if tokens_BT is None else tokens_BT[:, : self.n_judged]
        # For each position keep one sequence: the one of largest importance; ties by lowest token, then by most heads.
        largest_J = largest_BJ.amax(0)
        behind_BJ = largest_BJ < largest_J
        token_J = tokens_BJ.masked_fill(behind_BJ, torch.iinfo(tokens_BJ.dtype).max).amin(0)
        heads_J = heads_BJ.masked_fill(behind_BJ | (tokens_BJ != token_J), -1).amax(0)
        position_J = torch.arange(self.n_judged, device=largest_J.device)
        found_J4 = torch.stack([largest_J, position_J.double(), token_J.double(), heads_J.double()], dim=-1)[1:]
        # Positions are different here, and rise: the sort keeps the order of equal ones.
        found_K4 = found_J4[found_J4[:, _IMPORTANCE].argsort(descending=True, stable=True)[: self.k]]
        self.listed[layer] = _first(torch.cat([self.listed[layer], found_K4]), self.k)

    def reduce_over(self, group: Any) -> None:
        """See :class:`AdditiveMetric`; lists are gathered and merged."""
        super().reduce_over(group)
        if dist.is_available() and dist.is_initialized():
            lists = [torch.empty_like(self.listed) for _ in range(dist.get_world_size(group))]
            dist.all_gather(lists, self.listed, group=group)
            merged = (reduce(self._merge, entries) for entries in zip(*lists, strict=True))
            self.listed = torch.stack(list(merged))

    def _merge(self, a_K4: Tensor, b_K4: Tensor) -> Tensor:
        return _first(torch.cat([a_K4, b_K4]), self.k)

    def compute(self) -> dict[str, np.ndarray]:
        """Return the shares of sequences with a sink, by position and in total, and the lists of secondary sinks."""
        share_LT = (self.sink_count / self.n_sequences[:, None]).cpu().numpy()
        listed = self.listed.cpu().numpy()
        whole = {"position": _POSITION, "token": _TOKEN, "heads": _HEADS}
        return {
            "sinks_per_sequence": share_LT.sum(-1),
            "secondary_sinks": share_LT[:, 1:].sum(-1),
            "sink_share": share_LT,
            "secondary_sink_importance": listed[..., _IMPORTANCE],
            **{f"secondary_sink_{name}": listed[..., column].astype(np.int64) for name, column in whole.items()},
        }


# ---------------------------------------------------------------- mass on the prefix of an adapter (§12)


class _Weights(Protocol):
    def prefix_share(self) -> Tensor | None:
        """Return each query's weight on the keys of a prefix ``[B, H, T]``; None without a prefix."""


class ShownWeights(Protocol):
    """The part of an attention that :class:`PrefixMass` reads."""

    @property
    def weights(self) -> _Weights:
        """Attention weights of the layer."""


class PrefixMass(AdditiveMetric):
    """Mean weight of the queries after the first on all keys of a prefix. States are sums: additive.

    Args:
        sizes: sizes of the model and the probe.
    """

    mass_sum: Tensor
    n_queries: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.add_sums(mass_sum=(sizes.n_layers, sizes.n_heads), n_queries=(sizes.n_layers,))

    def attention(self, layer: int, attended: ShownWeights) -> None:
        """See models/observe.py."""
        self.update(layer - 1, attended.weights.prefix_share())

    def update(self, layer: int, share_BHT: Tensor | None) -> None:
        """Add a batch of one layer (from 0): every query's weight on the prefix, None without a prefix. Position 0 does
        not count, as in the sink mass, so that the two can be compared.
        """
        if share_BHT is None:
            return
        self.mass_sum[layer].add_(share_BHT[..., 1:].double().sum((0, 2)))
        self.n_queries[layer].add_(share_BHT[:, 0, 1:].numel())

    def compute(self) -> dict[str, np.ndarray]:
        """Return the mean weight per layer and head ``[L, H]``; empty if no layer has a prefix."""
        if not self.n_queries.any():
            return {}
        return {"prefix_mass": (self.mass_sum / self.n_queries[:, None]).cpu().numpy()}
