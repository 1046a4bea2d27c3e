"""Prefix tuning: keys and values of every block that belong to no token and that every query sees (arXiv 2101.00190).

Legend: B sequences, H query heads, G key/value heads, T positions, P keys of the prefix, K head width.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from ..attention.attention import Attention
from ..attention.extra_keys import ExtraKey, learned_keys
from ..attention.scores import Scores
from ..config import InitConfig, ModelConfig
from ..decoder import Decoder
from ..init import Constant, Distribution, Normal
from ..parameter_roles import ParameterRole
from .adapter_config import AdapterConfig


class PrefixKeys(nn.Module):
    """Learned keys, which do not turn with the position, and their values, in an attention of any arm.

    Keys are drawn with unit length on average, and values start at 0: at the start the prefix writes nothing, but takes
    some weight from the tokens. No start of a key changes nothing: a softmax has to give it something.
    """

    def __init__(self, adapter: AdapterConfig, config: ModelConfig) -> None:
        super().__init__()
        shape = config.kv_heads, adapter.prefix_length, config.d_head
        # The width comes from the config: a sharded parameter has the shape of its shard.
        self.std = config.d_head**-0.5
        self.key, self.value = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))
        self.parameter_roles = {"key": ParameterRole.BIAS, "value": ParameterRole.BIAS}
        self.as_one = config.attention.is_softmax

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """See :class:`~birthmark.models.init.StatesBirth`."""
        return {"key": Normal(self.std), "value": Constant(0.0)}

    def forward(self, scores: Scores) -> list[ExtraKey]:
        """Return the prefix as keys beside those of the tokens, given the tokens' scores."""
        return learned_keys(scores, self.key, self.value, self.as_one, of_prefix=True)


def attach_prefix(model: Decoder, adapter: AdapterConfig) -> None:
    """Give every block's attention a :class:`PrefixKeys`."""
    for block in model.blocks:
        cast(Attention, block.attn).adapter_keys = PrefixKeys(adapter, model.config)
