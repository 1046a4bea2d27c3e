"""Scores and masks as an attention of ``transformers`` has them, and the softmax of them.

Legend: B sequences, H query heads, G key/value heads, T queries, S keys, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.attention.extra_keys import ExtraKey
from ...models.attention.normalisers import Softmax, WeightedSum
from ...models.attention.positions import Placement
from ...models.attention.scores import Scores
from ...models.config import ModelConfig
from ...models.linear_cross_entropy import soft_capped


@dataclass(frozen=True)
class TheirScores(Scores):
    """Scores that are soft-capped, added to, or of keys that only a mask tells: explicit, a block at a time."""

    softcap: float | None = None
    """``c·tanh(s / c)`` in place of s."""
    added: Tensor | None = None
    """Is added to the scores: ``[B, H, T, S]``, or 1 on any axis but the last."""
    seen: Tensor | None = None
    """Which keys a query sees, of those that causality, window and prefix leave: the same shapes, bool."""

    @property
    def fusable(self) -> bool:
        """No fused kernel has these."""
        return False

    def block(self, start: int, stop: int, minus_BHT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :class:`Scores`."""
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
    """What a mask says, in the words of :class:`Scores` where these can say it."""

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
            window: where there is no mask, the sliding window.
            causal: where there is no mask, whether a query sees no later key.
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
        # A window is what the last query sees.
        width = int(seen.reshape(-1, n_positions)[-1].sum())
        for known in (cls(added=added), cls(width, added=added)):
            pattern = key <= query if known.window is None else (key <= query) & (key > query - known.window)
            if bool((seen == pattern).all()):
                return known
        later = bool((seen & (key > query)).any())
        return cls(None, n_positions if later else None, seen, added)


#: The softmax of our own arms, with whatever keys beside the tokens' are given.
_SOFTMAX = Softmax(ModelConfig())


def weigh(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    scale: float,
    mask: ReadMask,
    *,
    softcap: float | None = None,
    added: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> WeightedSum:
    """The attention of some queries, keys and values, with weights that can be read.

    Args:
        q_BHTK: queries as they enter the scores.
        k_BGSK: keys, those of grouped heads once.
        v_BGSK: values, of any width.
        scale: of ``q·k``.
        mask: which keys are seen, and what it adds.
        softcap: of the scores, before anything is added.
        added: to the scores beside what the mask adds: a bias of positions.
        sinks_H: a logit per head of a key that every query sees and that has value 0.
    """
    parts = [x for x in (mask.added, added) if x is not None]
    more = None if not parts else sum(parts[1:], parts[0])
    place = Placement()
    # Fused kernels want values as wide as keys.
    one_width = v_BGSK.shape[-1] == k_BGSK.shape[-1]
    if softcap is None and more is None and mask.seen is None and one_width:
        scores = Scores(q_BHTK, k_BGSK, scale, place, mask.window, mask.prefix)
    else:
        scores = TheirScores(
            q_BHTK, k_BGSK, scale, place, mask.window, mask.prefix, softcap=softcap, added=more, seen=mask.seen
        )
    extra = [] if sinks_H is None else [ExtraKey(sinks_H[:, None].expand(q_BHTK.shape[:3]))]
    found = _SOFTMAX(scores, v_BGSK, extra, needs_weights=True, needs_squares=False)
    assert isinstance(found, WeightedSum)
    return found
