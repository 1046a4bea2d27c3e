"""Prefix-Tuning+: the effect of a prefix on a query, outside of the softmax (arXiv 2506.13674, definitions §12).

Legend: B sequences, H query heads, T positions, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention.attention import Attention
from ..config import InitConfig, ModelConfig
from ..decoder import Decoder
from ..init import Constant, Distribution
from ..parameter_roles import ParameterRole
from .adapter_config import AdapterConfig

#: φ by name.
FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"elu": F.elu, "relu": F.relu, "identity": lambda x: x}


class PrefixMemory(nn.Module):
    """``φ(q_t)ᵀ M`` with a matrix ``M [K, K]`` for each query head, 0 at the start.

    Queries are those that enter the scores. The heads' matrices lie one under the other, as the rows of a query map do.
    """

    def __init__(self, adapter: AdapterConfig, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.phi = config.n_heads, FEATURE_MAPS[adapter.phi]
        self.matrix = nn.Parameter(torch.zeros(config.n_heads * config.d_head, config.d_head))
        self.parameter_roles = {"matrix": ParameterRole.MATRIX}

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """See :class:`~birthmark.models.init.StatesBirth`."""
        return {"matrix": Constant(0.0)}

    def forward(self, q_BHTK: Tensor) -> Tensor:
        """Map queries ``[B, H, T, K]`` to the addition to the heads' outputs, same shape."""
        matrix_HKK = self.matrix.unflatten(0, (self.n_heads, -1)).to(q_BHTK.dtype)
        return self.phi(q_BHTK) @ matrix_HKK


def attach_prefix_plus(model: Decoder, adapter: AdapterConfig) -> None:
    """Give every block's attention a :class:`PrefixMemory`."""
    for block in model.blocks:
        cast(Attention, block.attn).adapter_output = PrefixMemory(adapter, model.config)
