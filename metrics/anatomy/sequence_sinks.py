"""Sinks of single sequences: number, positions and tokens (definitions §13).

A mean over sequences hides a sink whose position differs between them. This metric looks at each sequence alone.

Legend: B sequences, H heads, T positions, J keys that can be sinks, K entries of a list.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..additive import AdditiveMetric
from ..quantity import Sizes
from .judged_keys import n_judged_keys
from .shown_attention import ShownAttention

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
