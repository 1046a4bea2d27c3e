"""Permutation of units that leaves no trace in the function: hidden units of the MLPs, and channels of values, in the
same order in all heads.

The model computes the same function. Legend: F hidden units, H heads, K width of a head, D width of the residual
stream.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from birthmark.models.changes.change import ModelWeights


def reordered(model: ModelWeights, seed: int) -> ModelWeights:
    """Return the same model with hidden units and channels of values in random orders; attention must be plain."""
    config, rng = model.config, np.random.default_rng(seed)
    tensors = dict(model.tensors)
    for i in range(config.n_layers):
        order_F, order_K = (torch.from_numpy(rng.permutation(n)) for n in (config.ff, config.d_head))
        at = f"blocks.{i}."
        for name in ("mlp.gate.weight", "mlp.gate.bias", "mlp.up.weight", "mlp.up.bias"):
            _replace(tensors, at + name, order_F, 0)
        _replace(tensors, f"{at}mlp.down.weight", order_F, 1)
        for name in ("attn.v.weight", "attn.v.bias"):
            _replace(tensors, at + name, _of_heads(order_K, config.kv_heads), 0)
        _replace(tensors, f"{at}attn.o.weight", _of_heads(order_K, config.n_heads), 1)
    return model._replace(tensors=tensors)


def _of_heads(order_K: Tensor, n_heads: int) -> Tensor:
    return (torch.arange(n_heads)[:, None] * len(order_K) + order_K).flatten()


def _replace(tensors: dict[str, Tensor], name: str, order: Tensor, axis: int) -> None:
    if name in tensors:
        tensors[name] = tensors[name].index_select(axis, order)
