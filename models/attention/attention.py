"""Attention, built from parts that the config chooses: projections, scores, normaliser, aggregation, gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from ...errors import UsageError
from ..config import InitConfig, ModelConfig
from ..init import INITIALISERS, Distribution, Fans, Linear, ParameterRole, for_tables
from ..norms import RMSNorm, cast_once
from ..observe import Attended, Observer
from ..user_classes import name_in_config, require_shape
from .aggregation import build_aggregation, build_part
from .differential import DifferentialSoftmax
from .fused.backends import over_heads
from .fused.rows import scaled
from .kv_cache import LayerCache
from .normalisers import (
    ClippedSoftmax,
    EluSimilarity,
    IdentitySimilarity,
    Joined,
    LearnedSink,
    OffByOne,
    ReluSimilarity,
    SigmoidSimilarity,
    Softmax,
    Softpick,
    WeightedSum,
)
from .positions import Placement
from .rotation import rotate
from .scores import ExtraKey, Scores, learned_keys

#: Normalisers by name.
NORMALISERS: dict[str, type[Softmax]] = {
    "softmax": Softmax,
    "softmax_off_by_one": OffByOne,
    "softmax_sink": LearnedSink,
    "softmax_clipped": ClippedSoftmax,
    "softpick": Softpick,
    "differential": DifferentialSoftmax,
    "sigmoid": SigmoidSimilarity,
    "relu": ReluSimilarity,
    "elu": EluSimilarity,
    "identity": IdentitySimilarity,
}


class PlainOutput(nn.Module):
    """Head outputs without a gate; also the base of the gates."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def forward(self, o_BHTK: Tensor, x_BTD: Tensor) -> Tensor:
        """Map head outputs ``[B, H, T, d_head]`` to the same shape, given the input of the attention."""
        return o_BHTK


#: Activations of a gate by name.
OPENINGS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "silu": F.silu}


class LinearGate(PlainOutput):
    """Head outputs, or the tensor that ``gate_at`` names, times an activation of a linear map of the input, or of the
    values: one number per head, or one per channel (arXiv 2505.06708, arXiv 2510.09017).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        attention = config.attention
        n_heads, width = config.gate_sizes
        self.n_heads = None if attention.gate_at == "projection" else n_heads
        n_in = config.kv_heads * config.d_value if attention.gate_input == "value" else config.d_model
        self.map = Linear(n_in, n_heads * width, bias=config.bias)
        self.opening = OPENINGS[attention.gate_activation]

    def forward(self, y: Tensor, x_BTD: Tensor) -> Tensor:
        """Multiply ``y · σ(W x)``, y ``[B, heads, T, d_head]``, or ``[B, T, D]`` behind the output projection."""
        opening_BTC = self.opening(self.map(x_BTD))
        if self.n_heads is None:
            return y * opening_BTC
        if opening_BTC.shape[-1] == self.n_heads:
            return scaled(y, opening_BTC.transpose(1, 2))
        return y * opening_BTC.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


#: Output gates by name.
GATES: dict[str, type[PlainOutput]] = {"none": PlainOutput, "head": LinearGate, "channel": LinearGate}


class KeysAndValue(NamedTuple):
    """Queries, rotated, and the contributions of learned biases to their attention."""

    q_BHTK: Tensor
    extra: list[ExtraKey]
    """Keys beside the tokens' that every query sees."""
    added_HK: Tensor | None = None
    """A value that belongs to no key: every output of a head gets it added."""

    def of_queries(self, queries: slice) -> KeysAndValue:
        """Return some of the queries with their contributions."""
        return self._replace(q_BHTK=self.q_BHTK[:, :, queries], extra=[key.of_queries(queries) for key in self.extra])


class NoKeyValueBias(nn.Module):
    """Attention without learned biases; also the base of the biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def forward(self, q_BHTK: Tensor, rotation: Tensor | None, scale: float) -> KeysAndValue:
        """Rotate the queries; return them with the contributions of the biases, whose scores have this scale."""
        return KeysAndValue(rotate(q_BHTK, rotation), [])


class KeyValueBias(NoKeyValueBias):
    """Learned biases [AS]: a key that every query sees, without position; its value; or a vector added to outputs.

    One per key/value head, or one for all heads of the block; or several keys, ``kv_bias_tokens``, one after the other.
    Drawn like rows of the key and value maps.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        kind, self.d_model = config.attention.kv_bias, config.d_model
        rows = 1 if config.attention.kv_bias_shared else config.kv_heads
        self.n_heads, self.n_tokens = config.n_heads, config.attention.kv_bias_tokens or 1
        self.as_one = config.attention.rows.is_softmax
        n_rows = self.n_tokens * rows
        self.key = nn.Parameter(torch.zeros(n_rows, config.d_key)) if kind in ("key", "key_value") else None
        self.value = nn.Parameter(torch.zeros(n_rows, config.d_value)) if kind in ("value", "key_value") else None
        self.parameter_roles = {"key": ParameterRole.BIAS, "value": ParameterRole.BIAS}

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Draw both like a map from the residual stream."""
        init = for_tables(init)
        drawn = INITIALISERS[init.kind](init, Fans(self.d_model, self.d_model))
        return {"key": drawn, "value": drawn}

    def forward(self, q_BHTK: Tensor, rotation: Tensor | None, scale: float) -> KeysAndValue:
        """Return the learned keys, with their values if they have any; or the value alone."""
        value = None if self.value is None else self._of_heads(self.value)
        if self.key is None:
            added_HK = None if value is None else over_heads(value[None], self.n_heads)[0, :, 0]
            return KeysAndValue(rotate(q_BHTK, rotation), [], added_HK)
        return KeysAndValue(*learned_keys(q_BHTK, rotation, scale, self._of_heads(self.key), value, self.as_one))

    def _of_heads(self, rows: Tensor) -> Tensor:
        """Split rows by key/value head, or take the one for all heads: ``[G, N, K]``."""
        return rows.unflatten(0, (self.n_tokens, -1)).transpose(0, 1)


#: Learned biases by name.
KV_BIASES: dict[str, type[NoKeyValueBias]] = {
    "none": NoKeyValueBias,
    "key": KeyValueBias,
    "value": KeyValueBias,
    "key_value": KeyValueBias,
}


class Projection(Linear):
    """Queries, keys or values: a linear map, split into heads, normalised if config says so.

    Args:
        config: the model.
        n_heads: heads of this projection.
        norm: ``none``; ``head``, RMSNorm over each head's channels; ``width``, over all heads' channels together.
    """

    def __init__(self, config: ModelConfig, n_heads: int, norm: str) -> None:
        super().__init__(config.d_model, n_heads * config.d_head, bias=config.qkv_bias)
        self.d_head, self.over_width = config.d_head, norm == "width"
        width = self.out_features if self.over_width else config.d_head
        self.norm = RMSNorm(width, config.norm_eps) if norm != "none" else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map ``[B, T, D] → [B, heads, T, d_head]``."""
        x = super().forward(x_BTD)
        # On a GPU autocast norms in float32; queries and keys go on in the type of the values.
        if self.norm is not None and self.over_width:
            x = cast_once(self.norm(x))
        x = x.unflatten(-1, (-1, self.d_head))
        if self.norm is not None and not self.over_width:
            x = cast_once(self.norm(x))
        return x.transpose(1, 2)


class Attention(nn.Module):
    """Causal multi-head attention with grouped keys and values.

    Legend: B sequences, T queries, S keys, D width, H query heads, G key/value heads, K head width.
    """

    def __init__(self, config: ModelConfig, block: int) -> None:
        super().__init__()
        attention = config.attention
        self.layer = block + 1
        self.n_heads = config.n_heads
        self.scale, self.window, self.prefix = config.d_key**-0.5, attention.window_of(block), attention.prefix
        self.squares = config.squares
        self.has_positions = attention.has_positions(block)
        self.add_maps(config)
        n_out = config.n_heads * config.d_value
        self.o = Linear(n_out, config.d_model, config.bias, residual_writers=2 * config.n_layers)
        self.normaliser = build_part("normaliser", attention.normaliser, NORMALISERS, Softmax, config)
        self.normaliser.in_block(block)
        self.bias = KV_BIASES[attention.kv_bias](config)
        self.aggregate = build_aggregation(config, block)
        self.gate = build_part("gate", attention.gate, GATES, PlainOutput, config)
        self.gate_at, self.gates_by_value = attention.gate_at, attention.gate_input == "value"
        #: Modules of an adapter (models/adapters): keys beside the tokens', given their scores; and an addition to
        #: heads' outputs after everything else, given the queries.
        self.adapter_keys: nn.Module | None = None
        self.adapter_output: nn.Module | None = None
        self.d_value = config.d_value
        self.user_parts = frozenset(attention.user_parts)
        # A class of the user's own is given a key and a value for every query head.
        self.repeats_keys = bool(self.user_parts)

    def add_maps(self, config: ModelConfig) -> None:
        """Add the maps of queries, keys and values."""
        self.q: Linear = Projection(config, config.n_heads, config.attention.qk_norm)
        self.k = Projection(config, config.kv_heads, config.attention.qk_norm)
        self.v = Projection(config, config.kv_heads, config.attention.v_norm)

    def mapped(
        self, x_BTD: Tensor, place: Placement, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries ``[B, H, T, K]`` before they rotate; keys and values in the form that the scores take, cached
        positions first; and the input of the gate ``[B, T, C]``.
        """
        q, k, v = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        read_BTC = v.transpose(1, 2).flatten(2) if self.gates_by_value else x_BTD
        q, k, v = self.gated("query", q, read_BTC), self.gated("key", k, read_BTC), self.gated("value", v, read_BTC)
        k = rotate(k, place.rotation)
        if cache is not None:
            k, v = cache.extend(k, v)
        return q, k, v, read_BTC

    def forward(
        self, x_BTD: Tensor, place: Placement, observer: Observer | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """Attend, ``[B, T, D] → [B, T, D]``. A cache, if given, holds earlier keys and values and gets the new ones."""
        if not self.has_positions:
            place = place.without_positions()
        q, k, v, read_BTC = self.mapped(x_BTD, place, cache)
        biased = self.bias(q, place.rotation, self.scale)
        q = biased.q_BHTK
        # The kernels read shared heads from one place; observers of keys and values want them for each head.
        if self.repeats_keys or observer is not None:
            k, v = (over_heads(x, self.n_heads) for x in (k, v))

        if place.context is None:
            weighted = self.weighted(biased, k, v, place, observer is not None)
        else:
            # Whole sequences are measured: no part is observed.
            assert observer is None
            assert cache is None
            k, v = place.context.gathered(k, v)
            parts = [
                self.weighted(biased.of_queries(at.rows), k[:, :, : at.stop], v[:, :, : at.stop], place.chunk(at))
                for at in place.context.chunks(k.shape[2])
            ]
            weighted = Joined(Scores(q, k, self.scale, place, self.window), parts)
        out_BHTK = self.aggregate(weighted, v)
        if "aggregation" in self.user_parts:
            require_shape(self.aggregate, "forward", out_BHTK, (*q.shape[:3], self.d_value))
        out_BHTK = self.gated("output", out_BHTK, read_BTC)
        if self.adapter_output is not None:
            out_BHTK = out_BHTK + self.adapter_output(q)
        if observer is not None:
            observer.attention(self.layer, Attended(q, k, v, weighted.o_BHTK, out_BHTK, weighted))
        return self.gated("projection", self.o(out_BHTK.transpose(1, 2).flatten(2)), read_BTC)

    def weighted(
        self, biased: KeysAndValue, k: Tensor, v: Tensor, place: Placement, needs_weights: bool = False
    ) -> WeightedSum:
        """Sum the values by their weights, given queries with their biases, and keys and values as :meth:`mapped`
        returns them.
        """
        # A chunk that does not begin a sequence begins behind the prefix.
        prefix = None if place.is_chunk else self.prefix
        q, extra, added_HK = biased
        scores = Scores(q, k, self.scale, place, self.window, prefix, self.squares)
        if self.adapter_keys is not None:
            scores, of_adapter = self.adapter_keys(scores)
            extra = [*extra, *of_adapter]
        weighted: WeightedSum = self.normaliser(scores, v, extra, needs_weights, self.aggregate.needs_squares)
        if "normaliser" in self.user_parts:
            if not isinstance(weighted, WeightedSum):
                raise UsageError(
                    f"{name_in_config(self.normaliser)}: forward gives {type(weighted).__name__}; give a WeightedSum, "
                    "as super().forward does"
                )
            require_shape(self.normaliser, "the WeightedSum", weighted.o_BHTK, (*q.shape[:3], self.d_value))
        if added_HK is not None:
            weighted.o_BHTK = weighted.o_BHTK + added_HK[:, None].to(weighted.o_BHTK.dtype)
        return weighted

    def gated(self, where: str, y: Tensor, read_BTC: Tensor) -> Tensor:
        """Apply the gate to ``y`` if the gate belongs at this place."""
        if where != self.gate_at:
            return y
        gated: Tensor = self.gate(y, read_BTC)
        if "gate" in self.user_parts:
            require_shape(self.gate, "forward", gated, y.shape)
        return gated


# ---------------------------------------------------------------- latent attention
# Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1): all keys and values from one narrow vector.
#
# The cache keeps for each token that vector, after its norm, and one key whose channels rotate with position and
# which all heads share. Each head maps the vector to keys without positions, and to values. Queries may come from
# another narrow vector.
#
# Legend: B sequences, T queries, S keys, D width, H heads, K width of queries and keys, V of values, R rank, P of the
# channels that turn, N of the others.


class LatentAttention(Attention):
    """The one attention, its queries, keys and values mapped in two steps; the cache holds the vectors between the two
    steps.

    Rows of a head in ``q`` and ``q_up``: the channels that turn, then the others. Rows of ``kv_down``: the vector, then
    the key that turns. Rows of a head in ``kv_up``: keys, then values.
    """

    @override
    def add_maps(self, config: ModelConfig) -> None:
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
        q_BHTK = self.gated("query", q_BHTK, x_BTD)
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
