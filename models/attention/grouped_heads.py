"""Keys and values that several query heads share (grouped-query attention, arXiv 2305.13245).

Legend: B sequences, H query heads, G key/value heads, S keys, K head width.
"""

from __future__ import annotations

from torch import Tensor


def over_heads(x_BGSK: Tensor, n_heads: int) -> Tensor:
    """Repeat keys or values for the query heads that share them, ``[B, H, S, K]``."""
    n_kv_heads = x_BGSK.shape[1]
    return x_BGSK if n_kv_heads == n_heads else x_BGSK.repeat_interleave(n_heads // n_kv_heads, dim=1)
