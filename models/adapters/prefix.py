"""Prefix tuning: keys and values of every block that are no token's and that every query sees (arXiv 2101.00190).

Legend: B sequences, H query heads, G key/value heads, T positions, P keys of the prefix, K head width.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from ..attention.attention import Attention
from ..attention.backends import over_heads
from ..attention.normalisers import ExtraKey
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
        # Of a sharded parameter the shape is not to be read.
        self.std = config.d_head**-0.5
        self.key, self.value = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))
        self.parameter_roles = {"key": ParameterRole.BIAS, "value": ParameterRole.BIAS}
        attention = config.attention
        # Under a softmax one key stands for all: its score is their log-sum-exp, its value what they give together.
        self.as_one = not attention.weighs_scores_alone and "normaliser" not in attention.own_parts

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """See :class:`~birthmark.models.init.StatesBirth`."""
        return {"key": Normal(self.std), "value": Constant(0.0)}

    def forward(self, scores: Scores) -> list[ExtraKey]:
        """The keys beside the tokens', given the scores of the tokens."""
        q_BHTK = scores.q_BHTK
        wide = torch.promote_types(q_BHTK.dtype, torch.float32)
        key_HPK, value_HPK = (over_heads(x[None], q_BHTK.shape[1])[0].to(wide) for x in (self.key, self.value))
        with torch.autocast(q_BHTK.device.type, enabled=False):
            score_BHTP = q_BHTK.to(wide) @ key_HPK.mT * scores.scale
            if not self.as_one:
                return [
                    ExtraKey(score_BHT, value_HK, of_prefix=True)
                    for score_BHT, value_HK in zip(score_BHTP.unbind(-1), value_HPK.unbind(1), strict=True)
                ]
            return [ExtraKey(score_BHTP.logsumexp(-1), score_BHTP.softmax(-1) @ value_HPK, of_prefix=True)]


def attach_prefix(model: Decoder, adapter: AdapterConfig) -> None:
    """Give every block's attention one."""
    for block in model.blocks:
        cast(Attention, block.attn).adapter_keys = PrefixKeys(adapter, model.config)
