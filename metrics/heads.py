"""Heads in detail: spread of attention, norms of keys and values, sinks of sequences, mass on a prefix."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from .activation_sums import channel_norms
from .declarations.sinks import n_judged_keys
from .quantity import Sizes
from .sinks import KeySums, entropy_queries
from .summed_metrics import AdditiveMetric, largest_over_ranks


class AttentionTensors(Protocol):
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

    def attention(self, layer: int, attended: AttentionTensors) -> None:
        """See models/observe.py."""
        self.update(layer - 1, attended.sums)

    def update(self, layer: int, sums: KeySums) -> None:
        """Add a batch of one layer (from 0)."""
        assert sums.entropy_BH is not None
        self.keep(layer, sums.entropy_BH, *([] if sums.largest_BH is None else [sums.largest_BH]))

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        entropy_PBH, *largest = tensors_P
        self.entropy_sum[places].add_(entropy_PBH.sum(1, dtype=torch.float64))
        self.n_sequences[places].add_(entropy_PBH.shape[1])
        for largest_PBH in largest if entropy_PBH.shape[1] else []:
            self.largest[places] = self.largest[places].maximum(largest_PBH.amax(1))

    @override
    def reduce_over(self, group: Any) -> None:
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

    def attention(self, layer: int, attended: AttentionTensors) -> None:
        """See models/observe.py."""
        self.update(layer - 1, attended.k_BHTK, attended.v_BHTK, attended.sums.importance_2BHT[1])

    def update(self, layer: int, k_BHTK: Tensor, v_BHTK: Tensor, importance_BHT: Tensor) -> None:
        """Add a batch of one layer (from 0).

        Args:
            layer: the layer.
            k_BHTK: keys as they enter the scores.
            v_BHTK: values.
            importance_BHT: importance of every key, from weights divided by their row's sum; the largest among keys
                that at least a quarter of the queries see is each head's sink.
        """
        self.keep(layer, channel_norms(k_BHTK), channel_norms(v_BHTK), importance_BHT[..., : self.n_judged])

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        *norms, importance_PBHJ = tensors_P
        norm_XPBHT, sink_PBH1 = torch.stack(norms), importance_PBHJ.argmax(-1, keepdim=True)
        n_others = norm_XPBHT.shape[-1] - 1
        at_sink_XPBH = norm_XPBHT.gather(-1, sink_PBH1.expand(2, *sink_PBH1.shape))[..., 0].double()
        first_XPBH, total_XPBH = norm_XPBHT[..., 0].double(), norm_XPBHT.sum(-1, dtype=torch.float64)
        self.position_sum[:, places].add_(norm_XPBHT.sum(2).mean(2))
        self.first_sum[:, places].add_(first_XPBH.sum(2))
        self.behind_first_sum[:, places].add_((total_XPBH - first_XPBH).sum(2) / n_others)
        self.sink_sum[:, places].add_(at_sink_XPBH.sum(2))
        self.elsewhere_sum[:, places].add_((total_XPBH - at_sink_XPBH).sum(2) / n_others)
        self.n_sequences[places].add_(importance_PBHJ.shape[1])

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


def _first(entries_PN4: Tensor, k: int) -> Tensor:
    """Return the first k entries of each layer by falling importance, ties by rising position, rising token and falling
    heads. Each position counts once.
    """
    for column, falling in ((_HEADS, True), (_TOKEN, False), (_POSITION, False), (_IMPORTANCE, True)):
        entries_PN4 = _in_order(entries_PN4, entries_PN4[..., column].argsort(descending=falling, stable=True))
    position_PN = entries_PN4[..., _POSITION]
    again_PN = (position_PN[..., None] == position_PN[:, None]).tril(-1).any(-1)
    # Those that are left out go behind the others, which keep their order.
    return _in_order(entries_PN4, again_PN.to(torch.uint8).argsort(stable=True)[:, :k])


def _in_order(entries_PN4: Tensor, order_PK: Tensor) -> Tensor:
    return entries_PN4.gather(1, order_PK[..., None].expand(-1, -1, 4))


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

    def attention(self, layer: int, attended: AttentionTensors) -> None:
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
        # Tokens are those of the batch for every layer, and are not overwritten.
        self.keep(layer, importance_BHJ, *([] if tokens_BT is None else [tokens_BT[:, : self.n_judged]]))

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        importance_PBHJ, *tokens = tensors_P
        heads_PBJ = (importance_PBHJ > self.epsilon).sum(2)
        self.sink_count[places, : self.n_judged].add_((heads_PBJ > 0).sum(1))
        self.n_sequences[places].add_(importance_PBHJ.shape[1])
        largest_PBJ = importance_PBHJ.amax(2).double()
        tokens_PBJ = tokens[0] if tokens else torch.full_like(heads_PBJ, -1)
        # For each position keep one sequence: the one of largest importance; ties by lowest token, then by most heads.
        largest_P1J = largest_PBJ.amax(1, keepdim=True)
        behind_PBJ = largest_PBJ < largest_P1J
        token_P1J = tokens_PBJ.masked_fill(behind_PBJ, torch.iinfo(tokens_PBJ.dtype).max).amin(1, keepdim=True)
        heads_PJ = heads_PBJ.masked_fill(behind_PBJ | (tokens_PBJ != token_P1J), -1).amax(1)
        position_PJ = torch.arange(self.n_judged, device=heads_PJ.device).expand_as(heads_PJ)
        found = largest_P1J[:, 0], position_PJ.double(), token_P1J[:, 0].double(), heads_PJ.double()
        found_PJ4 = torch.stack(found, dim=-1)[:, 1:]
        # Positions are different here, and rise: the sort keeps the order of equal ones.
        order_PJ = found_PJ4[..., _IMPORTANCE].argsort(descending=True, stable=True)
        found_PK4 = _in_order(found_PJ4, order_PJ[:, : self.k])
        self.listed[places] = _first(torch.cat([self.listed[places], found_PK4], dim=1), self.k)

    def reduce_over(self, group: Any) -> None:
        """See :class:`AdditiveMetric`; lists are gathered and merged."""
        super().reduce_over(group)
        if dist.is_available() and dist.is_initialized():
            lists = [torch.empty_like(self.listed) for _ in range(dist.get_world_size(group))]
            dist.all_gather(lists, self.listed, group=group)
            self.listed = reduce(lambda a, b: _first(torch.cat([a, b], dim=1), self.k), lists)

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


class WeightsOfPrefix(Protocol):
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

    def attention(self, layer: int, attended: WeightsOfPrefix) -> None:
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
