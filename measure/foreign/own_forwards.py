"""Attentions of ``transformers`` that do not run through its attention interface, as functions that do.

Each replaces a method of one attention module during an observed pass, and passes queries, keys and values to
``attend`` like the interface.

Legend: B sequences, H query heads, T positions, K head width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Function from (queries, keys, values, mask, scale, further arguments of the interface) to the value aggregation ``[B,
#: H, T, K]``.
Attend = Callable[..., Tensor]


def _merged(o_BHTK: Tensor) -> Tensor:
    return o_BHTK.transpose(1, 2).flatten(2)


def _gptj(module: Any, attend: Attend) -> Callable[..., Any]:
    def _attn(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        return attend(query, key, value, attention_mask, scaling=1 / float(module.scale_attn)), None

    return _attn


def _gpt_neo(module: Any, attend: Attend) -> Callable[..., Any]:
    """Replace GPT-Neo's attention, which does not divide scores by the root of the head width, and whose mask ignores
    its window.
    """

    def _attn(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        window = module.config.window_size if module.attention_type == "local" else None
        n_positions = query.shape[2]
        if window is not None and window < n_positions and attention_mask is not None:
            own = module.bias[:, :, :n_positions, :n_positions]
            attention_mask = attention_mask.masked_fill(~own, torch.finfo(attention_mask.dtype).min)
        return attend(query, key, value, attention_mask, scaling=1.0, sliding_window=window), None

    return _attn


def _bloom(module: Any, attend: Attend) -> Callable[..., Any]:
    def forward(hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, **more: Any) -> Any:
        query, key, value = module._reshape(module.query_key_value(hidden_states))
        bias = alibi.view(len(query), module.num_heads, 1, -1)
        o = attend(query, key, value, attention_mask, scaling=module.inv_norm_factor, position_bias=bias)
        return residual + module.dense(_merged(o)), None

    return forward


def _mpt(module: Any, attend: Attend) -> Callable[..., Any]:
    """Replace MPT's attention, whose mask is True where a key is *not* seen."""

    def forward(hidden_states: Tensor, position_bias: Tensor, attention_mask: Any = None, **more: Any) -> Any:
        n_sequences, n_positions = hidden_states.shape[:2]
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        query, key, value = (
            x.reshape(n_sequences, n_positions, module.n_heads, module.head_dim).transpose(1, 2)
            for x in mixed.chunk(3, dim=2)
        )
        bias = position_bias[None, :, -1:, -n_positions:]
        seen = None if attention_mask is None else ~attention_mask
        o = attend(query, key, value, seen, scaling=module.softmax_scale, position_bias=bias)
        return module.out_proj(_merged(o)), None

    return forward


def _falcon(module: Any, attend: Attend) -> Callable[..., Any]:
    """Replace Falcon's attention. With ALiBi its mask holds the bias already; the eager implementation would add it
    again.
    """

    def forward(
        hidden_states: Tensor, alibi: Any, attention_mask: Any, position_embeddings: Any = None, **more: Any
    ) -> Any:
        query, key, value = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(hidden_states)))
        bias = None
        if alibi is None:
            rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
            query, key = rotate(query, key, *position_embeddings)
        elif module.config._attn_implementation != "sdpa":
            bias = alibi.view(len(query), module.num_heads, 1, -1) * module.inv_norm_factor
        o = attend(query, key, value, attention_mask, scaling=module.inv_norm_factor, position_bias=bias)
        return module.dense(_merged(o)), None

    return forward


class OwnForward(NamedTuple):
    """A replacement of a method."""

    method: str
    make: Callable[[Any, Attend], Callable[..., Any]]
    """Function from (attention module, function that attends) to the replacement of the method."""


#: Model types whose attentions do not run through the interface.
OWN_FORWARDS: Mapping[str, OwnForward] = {
    "gptj": OwnForward("_attn", _gptj),
    "gpt_neo": OwnForward("_attn", _gpt_neo),
    "bloom": OwnForward("forward", _bloom),
    "mpt": OwnForward("forward", _mpt),
    "falcon": OwnForward("forward", _falcon),
}
