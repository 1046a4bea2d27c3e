"""Largest and total |x| along an axis, and norms of few channels. On a GPU these are norms, which read x once and keep
no copy; on the CPU norms are several times slower than the explicit forms here.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: On the CPU: elements whose absolute values are kept together, which stay in cache.
_CACHED = 1 << 20


def largest_size(x: Tensor, dim: int) -> Tensor:
    """Compute ``max |x|`` along an axis, in the type of x."""
    if x.device.type != "cpu":
        return torch.linalg.vector_norm(x, torch.inf, dim=dim)
    return torch.maximum(x.amax(dim), x.amin(dim).neg_())


def channel_norms(x_BHTK: Tensor) -> Tensor:
    """Compute Euclidean norms over the last axis, ``[B, H, T]``, float32 or wider."""
    wide = torch.promote_types(x_BHTK.dtype, torch.float32)
    if x_BHTK.device.type != "cpu":
        return torch.linalg.vector_norm(x_BHTK, dim=-1, dtype=wide)
    # As heads lie in memory, and of the type that is wanted: the other ways are several times slower.
    return torch.linalg.vector_norm(x_BHTK.transpose(1, 2).to(wide), dim=-1).transpose(1, 2)


def total_size(x_BTF: Tensor) -> Tensor:
    """Compute ``Σ_t |x|``, ``[B, F]``, float32 or wider."""
    wide = torch.promote_types(x_BTF.dtype, torch.float32)
    if x_BTF.device.type != "cpu":
        return torch.linalg.vector_norm(x_BTF, 1, dim=1, dtype=wide)
    at_once = max(_CACHED // max(x_BTF[:, :1].numel(), 1), 1)
    parts = [part_BTF.abs().sum(1, dtype=wide) for part_BTF in x_BTF.split(at_once, dim=1)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
