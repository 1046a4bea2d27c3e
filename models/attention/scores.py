"""The scores of one attention: which keys a query sees, what is added to q·k, and keys beside the tokens'."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernel_devices import runs_triton
from .fused.backends import over_heads
from .fused.kernels import visible_attention, visible_lse
from .fused.one_walk import Calibration, walk
from .positions import Placement
from .rotation import rotate_and_multiply

# ---------------------------------------------------------------- the scores of one attention
# Visible keys of each query, and additions to q·k. Never held as a whole matrix.
#
# Legend: B sequences, H query heads, G key/value heads, T queries, S keys (those in the cache first), K head width.


@dataclass(frozen=True)
class Scores:
    """Scores ``scale · q·k`` plus additions by position, over the keys that each query sees."""

    q_BHTK: Tensor
    k_BGSK: Tensor
    """Keys, those of grouped heads once."""
    scale: float
    place: Placement
    window: int | None = None
    """A query sees itself and the ``window − 1`` keys before it."""
    prefix: int | None = None
    """The first ``prefix`` positions see one another."""
    squares: Literal["auto", "joint", "separate"] = "separate"
    """Origin of Σ a² on a GPU: see ``calibration.squares``."""

    @property
    def k_BHSK(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Keys, repeated for the query heads that share them."""
        return over_heads(self.k_BGSK, self.q_BHTK.shape[1])

    @property
    def drops_weights(self) -> bool:
        """True if weights are dropped. Fused kernels have their own masks, which differ between devices."""
        return self.place.dropout is not None and self.place.dropout.rates.attention > 0

    @property
    def fusable(self) -> bool:
        """True if a softmax of these scores runs on the fused kernels."""
        at_start = self.place.first == 0 or self.place.is_chunk
        symmetric = self.prefix is not None and self.place.slopes_H is not None
        documents = self.place.documents
        if self.place.eviction is not None or self.drops_weights:
            return False
        return at_start and self.place.bias_HS is None and not symmetric and (documents is None or documents.known)

    @property
    def walks_once(self) -> bool:
        """True if output and Σ a² come from one kernel where these queries lie."""
        # In float32, whose products do not run on the matrix units, the kernel takes three times a plain attention.
        pays = self.squares == "joint" or (self.squares == "auto" and self.q_BHTK.element_size() == 2)
        return pays and runs_triton(self.q_BHTK)

    @property
    def of_one_query(self) -> bool:
        """True for the scores of one query with no additions: the next token of a text."""
        adds = self.place.slopes_H is not None or self.place.bias_HS is not None
        return self.q_BHTK.shape[2] == 1 and not adds

    def seen_by_one_query(self) -> Tensor | None:
        """Return a mask of the keys that the one query sees, broadcastable to ``[B, H, 1, S]``; None if it sees all."""
        place, n_keys = self.place, self.k_BGSK.shape[2]
        if place.documents is None and place.eviction is None and (self.window or n_keys) >= n_keys:
            return None
        which = (self.window, self.prefix)
        if which not in place.seen_by_one:
            place.seen_by_one[which] = self._seen(*self._positions(0, 1, n_keys), 0, 1)
        return place.seen_by_one[which]

    def softmax(self, v_BGSK: Tensor) -> tuple[Tensor, Tensor]:
        """Run the fused softmax: return value aggregation ``[B, H, T, K]`` and log-sum-exp of the scores ``[B, H, T]``,
        differentiable.
        """
        documents = self.place.documents
        if self.place.slopes_H is None:
            return visible_attention(self.q_BHTK, self.k_BGSK, v_BGSK, self.scale, self.window, self.prefix, documents)
        q, k, level = self._sloped()
        out, lse = visible_attention(q, k, v_BGSK, self.scale, self.window, documents=documents)
        return out, lse - level

    def softmax_with_squares(
        self, v_BGSK: Tensor, others_BHT: Tensor | None, calibration: Calibration | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the kernel of one walk over tokens and further keys without a value, given the log-sum-exp of their
        scores: return value aggregation ``[B, H, T, K]``, log-sum-exp over all keys, and ``Σ a²`` on tokens ``[B, H,
        T]``.
        """
        first_BT = self.first_keys()
        if self.place.slopes_H is None:
            return walk(self.q_BHTK, self.k_BGSK, v_BGSK, self.scale, first_BT, others_BHT, calibration)
        q, k, level = self._sloped()
        others_BHT = None if others_BHT is None else others_BHT + level
        out, total, squares = walk(q, k, v_BGSK, self.scale, first_BT, others_BHT, calibration)
        return out, total - level, squares

    def first_keys(self) -> Tensor | None:
        """Return the first key that each query sees, int32 ``[B, T]`` or ``[1, T]``; None: the first of all."""
        length, documents = self.k_BGSK.shape[2], self.place.documents
        first_BT = None if documents is None else documents.first_positions()[:, length - self.q_BHTK.shape[2] :]
        if self.window is not None and self.window < length:
            query_T = torch.arange(length - self.q_BHTK.shape[2], length, device=self.q_BHTK.device)
            first_T = (query_T - (self.window - 1)).clamp_min_(0)
            first_BT = first_T[None] if first_BT is None else torch.maximum(first_BT, first_T)
        return None if first_BT is None else first_BT.to(torch.int32)

    def lse(self, sharpness: float = 1.0) -> Tensor:
        """Compute the fused log-sum-exp of ``sharpness`` times the scores, ``[B, H, T]``, float32 or wider,
        differentiable.
        """
        scale, documents = sharpness * self.scale, self.place.documents
        if self.place.slopes_H is None:
            return visible_lse(self.q_BHTK, self.k_BGSK, scale, self.window, self.prefix, documents)
        q, k, level = self._sloped()
        return visible_lse(q, k, scale, self.window, documents=documents) - sharpness * level

    def _sloped(self) -> tuple[Tensor, Tensor, Tensor]:
        """Express linear distance penalties as channels: return queries, keys, and the excess of all scores of a query.

        ``−m·(t − j) = m·j − m·t``: the first part is a product of a query channel m and a key channel j, the second the
        same for all keys of a query, ``[H, T]`` or ``[B, H, T]``. j goes in as 256·high + low, whole numbers that every
        dtype holds exactly.
        """
        slopes_H = self.place.slopes_H
        assert slopes_H is not None
        n_sequences, _, n_queries, _ = self.q_BHTK.shape
        slopes_H = (slopes_H / self.scale).to(self.q_BHTK.dtype)
        channels_HK = F.pad(torch.stack([256 * slopes_H, slopes_H], dim=-1), (0, _SLOPE_CHANNELS - 2))
        q = torch.cat([self.q_BHTK, channels_HK[None, :, None].expand(n_sequences, -1, n_queries, -1)], dim=-1)
        documents = self.place.documents
        # [S], or [B, 1, S] of documents.
        position = (
            torch.arange(self.k_BGSK.shape[2], device=q.device) if documents is None else documents.position_BT[:, None]
        )
        places = F.pad(torch.stack([position // 256, position % 256], dim=-1), (0, _SLOPE_CHANNELS - 2)).to(q.dtype)
        k = torch.cat([self.k_BGSK, places.expand(n_sequences, self.k_BGSK.shape[1], -1, -1)], dim=-1)
        wide = torch.promote_types(q.dtype, torch.float32)
        return q, k, slopes_H.to(wide)[:, None] * self.scale * position[..., -n_queries:].to(wide)

    def seen_keys(self, stop: int) -> int:
        """Return the number of keys, from the first, that the queries before the ``stop``-th see between them."""
        # The keys of the queries stand last, whatever the cache has let go of.
        seen = self.k_BGSK.shape[2] - (self.q_BHTK.shape[2] - stop)
        return seen if self.prefix is None else min(max(seen, self.prefix), self.k_BGSK.shape[2])

    def block(self, start: int, stop: int, minus_BHT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute scores of the queries ``start … stop − 1`` over the keys that they see between them, as an explicit
        matrix.

        Args:
            start: first query, counted from the first of this pass.
            stop: one past the last.
            minus_BHT: subtracted from all scores of each query.

        Returns:
            Scores ``[B, H, stop − start, keys]``, float32 or wider, also for unseen keys; and a mask of seen keys,
                broadcastable to the last two axes.
        """
        n_sequences, n_heads, _, width = self.q_BHTK.shape
        n_keys = self.seen_keys(stop)
        wide = torch.promote_types(self.q_BHTK.dtype, torch.float32)
        # N = B·H: the batched product takes three axes, and adds on the way.
        q_NTK = self.q_BHTK[:, :, start:stop].to(wide).reshape(-1, stop - start, width)
        k_NSK = over_heads(self.k_BGSK[:, :, :n_keys], n_heads).to(wide).reshape(-1, n_keys, width)
        with torch.autocast(q_NTK.device.type, enabled=False):
            if minus_BHT is None:
                scores = torch.bmm(q_NTK * self.scale, k_NSK.transpose(1, 2))
            else:
                level_NT1 = -minus_BHT[:, :, start:stop].to(wide).reshape(-1, stop - start, 1)
                scores = torch.baddbmm(level_NT1, q_NTK, k_NSK.transpose(1, 2), alpha=self.scale)
        scores = scores.view(n_sequences, n_heads, stop - start, n_keys)
        query, key = self._positions(start, stop, n_keys)
        seen = self._seen(query, key, start, stop)
        distance = (query - key).abs()
        if self.place.slopes_H is not None:
            scores = scores - self.place.slopes_H.to(wide)[:, None, None] * distance
        if self.place.bias_HS is not None:
            scores = scores + self.place.bias_HS[:, distance]
        return scores, seen

    def _positions(self, start: int, stop: int, n_keys: int) -> tuple[Tensor, Tensor]:
        """Return positions of the queries ``start … stop − 1``, ``[queries, 1]``, and of the first keys."""
        device, key_S = self.q_BHTK.device, self.place.key_S
        query = torch.arange(self.place.first + start, self.place.first + stop, device=device)[:, None]
        return query, torch.arange(n_keys, device=device) if key_S is None else key_S[:n_keys]

    def _seen(self, query: Tensor, key: Tensor, start: int, stop: int) -> Tensor:
        """Return a mask of the keys, given by position, that the queries ``start … stop − 1`` see."""
        seen = key <= query
        if self.window is not None:
            seen &= key > query - self.window
        if self.prefix is not None:
            seen |= (key < self.prefix) & (query < self.prefix)
        if self.place.eviction is not None:
            seen &= self.place.eviction.seen(query, key)
        if (documents := self.place.documents) is not None:
            number_BS, before = documents.number_BT, documents.number_BT.shape[1] - self.q_BHTK.shape[2]
            of_queries = number_BS[:, None, before + start : before + stop, None]
            seen = seen & (of_queries == number_BS[:, None, None, : len(key)])
        return seen


#: The fused kernels like head widths in eights.
_SLOPE_CHANNELS = 8


# ---------------------------------------------------------------- extra keys
# Keys that belong to no token and that every query sees: those of a normaliser, learned ones, and prefixes.
#
# Legend: B sequences, H query heads, G key/value heads, T queries, N learned keys, K head width.


class ExtraKey(NamedTuple):
    """A key that every query sees and that belongs to no token; or several, which act as one in a softmax: its score is
    their log-sum-exp, its value their joint value. A tuple, in which ZeRO 3 finds the tensors that a module returns.
    """

    score_BHTN: Tensor
    """Float32 or wider."""
    value_HNK: Tensor | None = None
    """None: zero."""
    of_prefix: bool = False
    """True if it belongs to the prefix of an adapter."""

    @property
    def score(self) -> Tensor:
        """Score of the key, or log-sum-exp of the scores, ``[B, H, T]``."""
        return self.score_BHTN[..., 0] if self.score_BHTN.shape[-1] == 1 else self.score_BHTN.logsumexp(-1)

    def of_queries(self, queries: slice) -> ExtraKey:
        """Return the key as some of the queries see it."""
        return self._replace(score_BHTN=self.score_BHTN[:, :, queries])

    def values(self, start: int = 0, stop: int | None = None) -> Tensor | None:
        """Return the values that the queries ``start … stop − 1`` read from it, broadcastable to ``[B, H, queries,
        K]``.
        """
        if self.value_HNK is None or self.value_HNK.shape[1] == 1:
            return self.value_HNK
        return self.score_BHTN[:, :, start:stop].softmax(-1) @ self.value_HNK


def learned_keys(
    q_BHTK: Tensor, rotation: Tensor | None, scale: float, key_GNK: Tensor, value_GNK: Tensor | None, as_one: bool,
    of_prefix: bool = False,
) -> tuple[Tensor, list[ExtraKey]]:  # fmt: skip
    """Build keys from parameters, without positions; return them behind the queries, rotated, which go on from the
    products with these keys.

    Args:
        q_BHTK: queries.
        rotation: rotation of the queries; None: they have it, or have none.
        scale: scale of the scores.
        key_GNK: the keys; grouped keys without repeats.
        value_GNK: their values; None: zero.
        as_one: replace all by one key, which is exact in a softmax.
        of_prefix: the keys are the prefix of an adapter.
    """
    n_keys = key_GNK.shape[1]
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)

    def of_heads(x_GNK: Tensor) -> Tensor:
        return over_heads(x_GNK[None], q_BHTK.shape[1])[0].to(wide)

    value_HNK = None if value_GNK is None else of_heads(value_GNK)
    q_BHTK, product_BHTN = rotate_and_multiply(q_BHTK, rotation, of_heads(key_GNK))
    score_BHTN = product_BHTN * scale
    if as_one or n_keys == 1:
        return q_BHTK, [ExtraKey(score_BHTN, value_HNK, of_prefix)]
    values = [None] * n_keys if value_HNK is None else value_HNK.split(1, dim=1)
    of_each = zip(score_BHTN.split(1, -1), values, strict=True)
    return q_BHTK, [ExtraKey(score, value, of_prefix) for score, value in of_each]


def lse_of_extra(extra: list[ExtraKey]) -> Tensor | None:
    """Compute the log-sum-exp of the scores of the extra keys ``[B, H, T]``; None without any."""
    scores = [key.score.to(torch.promote_types(key.score.dtype, torch.float32)) for key in extra]
    return reduce(torch.logaddexp, scores) if scores else None


def joined(extra: list[ExtraKey]) -> tuple[Tensor, Tensor | None]:
    """Join the scores ``[B, H, T, N]`` and values ``[H, N, K]`` of extra keys; None in place of values if no key has
    one.
    """
    wide = torch.promote_types(extra[0].score_BHTN.dtype, torch.float32)
    scores = [key.score_BHTN.to(wide) for key in extra]
    of_one = next((key.value_HNK for key in extra if key.value_HNK is not None), None)
    if of_one is None or len(extra) == 1:
        return torch.cat(scores, -1) if len(extra) > 1 else scores[0], of_one
    sizes = [(len(of_one), key.score_BHTN.shape[-1], of_one.shape[-1]) for key in extra]
    values = [
        of_one.new_zeros(size) if key.value_HNK is None else key.value_HNK
        for key, size in zip(extra, sizes, strict=True)
    ]
    return torch.cat(scores, -1), torch.cat(values, 1)
