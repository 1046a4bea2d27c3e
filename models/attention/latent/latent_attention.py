"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1): all keys and values from one narrow vector.

The cache keeps for each token that vector, after its norm, and one key whose channels rotate with position and which
all heads share. Each head maps the vector to keys without positions, and to values. Queries may come from another
narrow vector.

Legend: B sequences, T queries, S keys, D width, H heads, K width of queries and keys, V of values, R rank, P of the
channels that turn, N of the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...config import ModelConfig
from ...init import Linear
from ...norms import RMSNorm, cast_once
from ..attention import Attention
from ..kv_cache import LayerCache
from ..positions import Placement
from ..rotation import rotate


class LatentAttention(Attention):
    """The one attention, its queries, keys and values mapped in two steps; the cache holds the vectors between the two
    steps.

    Rows of a head in ``q`` and ``q_up``: the channels that turn, then the others. Rows of ``kv_down``: the vector, then
    the key that turns. Rows of a head in ``kv_up``: keys, then values.
    """

    def add_maps(self, config: ModelConfig) -> None:
        """See :class:`Attention`."""
        latent, d, bias = config.attention.latent, config.d_model, config.qkv_bias
        assert latent.kv_rank is not None
        self.has_query_rank = latent.q_rank is not None
        self.widths = (latent.kv_rank, config.d_rope)
        self.of_head = (config.d_key - config.d_rope, config.d_value)
        if latent.q_rank is None:
            self.q = Linear(d, config.n_heads * config.d_key, bias)
        else:
            self.q_down = Linear(d, latent.q_rank, bias)
            self.q_norm = RMSNorm(latent.q_rank, config.norm_eps)
            self.q_up = Linear(latent.q_rank, config.n_heads * config.d_key, bias)
        self.kv_down = Linear(d, sum(self.widths), bias)
        self.kv_norm = RMSNorm(latent.kv_rank, config.norm_eps)
        self.kv_up = Linear(latent.kv_rank, config.n_heads * sum(self.of_head), bias)

    def mapped(
        self, x_BTD: Tensor, place: Placement, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :class:`Attention`. Keys and values of earlier positions are recomputed from the cache."""
        q_BTC = self.q_up(cast_once(self.q_norm(self.q_down(x_BTD)))) if self.has_query_rank else self.q(x_BTD)
        q_BHTK = q_BTC.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        q_BHTK = rotate(self.gated("query", q_BHTK, x_BTD), place.rotation)
        latent_BTR, turning_BTP = self.kv_down(x_BTD).split(self.widths, dim=-1)
        # One head of each: so a cache holds them.
        latent_B1TR = cast_once(self.kv_norm(latent_BTR)).unsqueeze(1)
        turning_B1TP = rotate(turning_BTP.unsqueeze(1), place.rotation)
        if cache is not None:
            latent_B1TR, turning_B1TP = cache.extend(latent_B1TR, turning_B1TP)
        both_BHSC = self.kv_up(latent_B1TR.squeeze(1)).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        still_BHSN, v_BHSV = both_BHSC.split(self.of_head, dim=-1)
        k_BHSK = torch.cat([turning_B1TP.expand(-1, self.n_heads, -1, -1), still_BHSN], dim=-1)
        return q_BHTK, k_BHSK, v_BHSV, x_BTD


def attention_of(config: ModelConfig) -> type[Attention]:
    """Return the attention class of every block."""
    return LatentAttention if config.attention.latent.is_on else Attention
