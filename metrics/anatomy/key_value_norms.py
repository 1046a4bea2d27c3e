"""Norms of keys and values by position: sinks have small values, and often small keys (definitions §13) [AS].

Legend: B sequences, H heads, T positions, K head width; X is keys (0) or values (1).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..additive import AdditiveMetric
from ..quantity import Sizes
from ..reductions.sizes import channel_norms
from .judged_keys import n_judged_keys
from .shown_attention import ShownAttention


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
