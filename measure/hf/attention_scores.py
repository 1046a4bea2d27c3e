"""Scores, masks and softmax as the attentions of ``transformers`` compute them, each as a function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from ...models.attention.fused.backends import over_heads
from ...models.attention.fused.blockwise import softmax_rows
from ...models.attention.normalisers import Softmax, WeightedSum
from ...models.attention.positions import Placement
from ...models.attention.scores import ExtraKey, Scores
from ...models.config import ModelConfig
from ...models.linear_cross_entropy import soft_capped

# ---------------------------------------------------------------- attentions beside the attention interface
# Attentions of ``transformers`` that do not run through its attention interface, as functions that do.
#
# Each replaces a method of one attention module during an observed pass, and passes queries, keys and values to
# ``attend`` like the interface.
#
# Legend: B sequences, H query heads, T positions, K head width.

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


class ReplacedMethod(NamedTuple):
    """A replacement of a method."""

    method: str
    make: Callable[[Any, Attend], Callable[..., Any]]
    """Function from (attention module, function that attends) to the replacement of the method."""


#: Model types whose attentions do not run through the interface, or did not in earlier versions of the library.
REPLACED_METHODS: Mapping[str, ReplacedMethod] = {
    "gptj": ReplacedMethod("_attn", _gptj),
    "gpt_neo": ReplacedMethod("_attn", _gpt_neo),
    "bloom": ReplacedMethod("forward", _bloom),
    "mpt": ReplacedMethod("forward", _mpt),
    "falcon": ReplacedMethod("forward", _falcon),
}


# ---------------------------------------------------------------- scores and masks
# Scores and masks of attentions of ``transformers``, and the softmax of them.
#
# Legend: B sequences, H query heads, G key/value heads, T queries, S keys, K head width.


@dataclass(frozen=True)
class FamilyScores(Scores):
    """Scores with soft-capping, additions, or a mask of arbitrary form: explicit, a block at a time."""

    softcap: float | None = None
    """``c·tanh(s / c)`` in place of s."""
    added: Tensor | None = None
    """Term that is added to the scores: ``[B, H, T, S]``, or 1 on any axis but the last."""
    seen: Tensor | None = None
    """Mask of the keys that a query sees, among those that causality, window and prefix leave: the same shapes,
    bool.
    """

    @property
    def fusable(self) -> bool:
        """Always False: no fused kernel computes these scores."""
        return False

    @override
    def block(self, start: int, stop: int, minus_BHT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores, seen = super().block(start, stop)
        n_keys = scores.shape[-1]
        scores = soft_capped(scores, self.softcap)
        if self.added is not None:
            scores = scores + _rows(self.added, start, stop)[..., :n_keys].to(scores.dtype)
        if minus_BHT is not None:
            scores = scores - minus_BHT[:, :, start:stop, None].to(scores.dtype)
        if self.seen is not None:
            seen = seen & _rows(self.seen, start, stop)[..., :n_keys]
        return scores, seen


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    return x if x.shape[-2] == 1 else x[..., start:stop, :]


@dataclass(frozen=True)
class ReadMask:
    """Content of a mask, in the terms of :class:`Scores` as far as these can express it."""

    window: int | None = None
    prefix: int | None = None
    seen: Tensor | None = None
    added: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor | None, n_positions: int, window: int | None, *, causal: bool) -> ReadMask:
        """Read a mask.

        Args:
            mask: ``[B, H, T, S]`` or 1 on the first axes: bool, True where a key is seen; or floating, added to scores,
                hugely negative where a key is not seen. None: every key that causality and window leave.
            n_positions: T, which is S: there is no cache.
            window: the sliding window, if there is no mask.
            causal: if a query sees no later key, when there is no mask.
        """
        if mask is None:
            window = window if window and window < n_positions else None
            return cls(window, None if causal else n_positions)
        mask = mask[..., :n_positions, :n_positions]
        seen, added = mask, None
        if mask.dtype != torch.bool:
            seen = mask > torch.finfo(mask.dtype).min / 4
            added = mask.masked_fill(~seen, 0)
            added = added if bool(added.any()) else None
        query = torch.arange(n_positions, device=mask.device)[:, None]
        key = torch.arange(n_positions, device=mask.device)
        # The keys that the last query sees give the window.
        width = int(seen.reshape(-1, n_positions)[-1].sum())
        for known in (cls(added=added), cls(width, added=added)):
            pattern = key <= query if known.window is None else (key <= query) & (key > query - known.window)
            if bool((seen == pattern).all()):
                return known
        later = bool((seen & (key > query)).any())
        return cls(None, n_positions if later else None, seen, added)


#: The softmax of this package's arms, with whatever keys beside the tokens' are given.
_SOFTMAX = Softmax(ModelConfig())
#: Fused kernels take the exponential in fewer digits than float32 has (seen: some units of 2⁻²⁰).
_EXPONENTIAL = 2.0**-18
#: Number of times that scores are rounded: as products, and scaled.
_STORED = 2
#: Number of random outcomes of rounding that are tried.
_DRAWS = 8
#: By the name that torch gives to the precision of float32 products: the rounding of one.
_FLOAT32_PRODUCTS = {"highest": 2.0**-24, "high": 2.0**-11, "medium": 2.0**-8}


@dataclass(frozen=True)
class Attending:
    """An attention: its scores, values, and a logit per head of a key that every query sees and that has value 0."""

    scores: Scores
    v_BGSK: Tensor
    sinks_H: Tensor | None = None

    @classmethod
    def of(
        cls,
        q_BHTK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        scale: float,
        mask: ReadMask,
        *,
        softcap: float | None = None,
        added: Tensor | None = None,
        sinks_H: Tensor | None = None,
    ) -> Attending:
        """Put the parts of an attention together.

        Args:
            q_BHTK: queries as they enter the scores.
            k_BGSK: keys, grouped ones without repeats.
            v_BGSK: values, of any width.
            scale: factor of ``q·k``.
            mask: seen keys, and additions to scores.
            softcap: cap of the scores, applied before additions.
            added: additions to the scores beside the mask's: a bias of positions.
            sinks_H: see the class.
        """
        parts = [x for x in (mask.added, added) if x is not None]
        more = None if not parts else sum(parts[1:], parts[0])
        place = Placement()
        # Fused kernels want values as wide as keys, and on a CPU no float16.
        fits = v_BGSK.shape[-1] == k_BGSK.shape[-1] and not (q_BHTK.dtype == torch.float16 and q_BHTK.is_cpu)
        if softcap is None and more is None and mask.seen is None and fits:
            return cls(Scores(q_BHTK, k_BGSK, scale, place, mask.window, mask.prefix), v_BGSK, sinks_H)
        scores = FamilyScores(
            q_BHTK, k_BGSK, scale, place, mask.window, mask.prefix, softcap=softcap, added=more, seen=mask.seen
        )
        return cls(scores, v_BGSK, sinks_H)

    def weighed(self) -> WeightedSum:
        """Sum the values by weights that can be read."""
        extra = [] if self.sinks_H is None else [ExtraKey(self._sinks_BHT[..., None])]
        found = _SOFTMAX(self.scores, self.v_BGSK, extra, needs_weights=True, needs_squares=False)
        assert isinstance(found, WeightedSum)
        return found

    def rounded(self) -> Tensor:
        """Sum the values, ``[B, H, T, K]`` in float64, and perturb every number by the rounding on the way: products,
        scores each time that they are stored, weights, and the sum.
        """
        scores, dtype = self.scores, self.v_BGSK.dtype
        # Models of float64 have their softmax in float32.
        unit = max(torch.finfo(dtype).eps / 2, 2.0**-24)
        summing = 2.0**-24 if dtype != torch.float32 else _FLOAT32_PRODUCTS[torch.get_float32_matmul_precision()]
        generator = torch.Generator(self.v_BGSK.device).manual_seed(0)

        def signs(x: Tensor) -> Tensor:
            """Draw signs by row and column, the same for all heads."""
            return torch.rand(x.shape[-2:], generator=generator, device=x.device).sub_(0.5).sign_()

        q, k = scores.q_BHTK.double(), scores.k_BHSK.double()
        v = over_heads(self.v_BGSK, q.shape[1]).double()
        s_BHTS, seen = replace(scores, q_BHTK=q, k_BGSK=k).block(0, q.shape[2])
        size = s_BHTS.abs()
        if isinstance(scores, FamilyScores) and scores.added is not None:
            size = size + scores.added[..., : size.shape[-1]].abs()
        by = _STORED * unit * size + summing * scores.scale * (q.abs() @ k.abs().mT)
        extra = [] if self.sinks_H is None else [self._sinks_BHT[..., None].double()]

        def summed(s_BHTS: Tensor, off: float | Tensor = 0.0) -> Tensor:
            return softmax_rows(s_BHTS, seen, extra)[0].mul_(1 + off) @ v

        o_BHTK = summed(s_BHTS)
        square = (unit * o_BHTK).square()
        for _ in range(_DRAWS):
            drawn = summed(s_BHTS + signs(by) * by, max(unit, _EXPONENTIAL) * signs(by))
            square += (drawn - o_BHTK).square() / _DRAWS
        return o_BHTK + signs(o_BHTK) * square.sqrt()

    @property
    def _sinks_BHT(self) -> Tensor:  # noqa: N802 - a shape suffix
        assert self.sinks_H is not None
        return self.sinks_H[:, None].expand(self.scores.q_BHTK.shape[:3])
