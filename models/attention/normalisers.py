"""Normalisers: maps from scores to weights, and from weights and values to a head's output (definitions §9).

Each attention of a forward pass makes one :class:`WeightedSum`: the output, and rows of the weights on demand.
Softmax and its relatives run fused; similarities of single scores are explicit, a block of queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from ...errors import UsageError
from ..config import InitConfig, ModelConfig
from ..init import Constant, Distribution, ParameterRole
from ..user_classes import name_in_config, require_shape
from .fused.backends import over_heads
from .fused.blockwise import clipped_rows, softmax_rows, softpick_rows
from .fused.kernels import attention_beside, attention_with_squares, causal_attention, set_beside
from .fused.one_walk import Calibration
from .scores import ExtraKey, Scores, joined, lse_of_extra
from .weight_reader import EVERYTHING, WeightReader, new_reader, read_softmax

_QUERY_BLOCK = 256
_SMALLEST_SUM = 1e-6


def query_blocks(n_queries: int) -> list[tuple[int, int]]:
    """List first and one past the last query of each block whose explicit rows are held at once."""
    return [(start, min(start + _QUERY_BLOCK, n_queries)) for start in range(0, n_queries, _QUERY_BLOCK)]


class WeightedSum:
    """A head's output ``o [B, H, T, K]`` and the weights on tokens that it is made of."""

    scores: Scores
    reader: WeightReader | None = None
    """Reader that has seen the weights while they were computed, if any (``models/attention/weight_reader.py``)."""
    #: Set directly where the output is made: of what a setter writes torch 2.11's compiler reads the default.
    _o_BHTK: Tensor | None = None

    @property
    def o_BHTK(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Output, computed when it is read: what follows may be done by the kernel that makes it."""
        if self._o_BHTK is None:
            self._o_BHTK = self.summed()
        return self._o_BHTK

    @o_BHTK.setter
    def o_BHTK(self, o_BHTK: Tensor) -> None:  # noqa: N802 - a shape suffix
        self._o_BHTK = o_BHTK

    def summed(self) -> Tensor:
        """Compute the output, where it was not set."""
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> Tensor:
        """Return weights of the queries ``start … stop − 1`` on keys 0, 1, …, as many as these queries see between
        them: ``[B, H, stop − start, keys]``, float32 or wider.
        """
        raise NotImplementedError

    def row_sum(self) -> Tensor | None:
        """Return each query's sum of absolute weights on tokens ``[B, H, T]``; None if the softmax makes it 1."""
        raise NotImplementedError

    def sum_squares(self) -> Tensor:
        """Return ``Σ_j a[t,j]²`` over tokens, ``[B, H, T]``, float32 or wider, differentiable."""
        raise NotImplementedError

    def calibrated(self, calibration: Calibration) -> Tensor | None:
        """Compute the output calibrated by the kernel that sums it, ``[B, H, T, K]``; None where none does so, or where
        the output is there.
        """
        return None

    def normed(self, gain: Tensor, eps: float, times: float) -> Tensor | None:
        """Compute the output normalised over both heads of each pair by the kernel that makes it; None as above."""
        return None

    def squares_without_value(self) -> Tensor | None:
        """Return ``Σ a²`` over the keys that have no value, such as a sink's logit, ``[B, H, T]``; None without such
        keys.

        Differentiable, float32 or wider.
        """
        return None

    def prefix_share(self) -> Tensor | None:
        """Return each query's weight on the keys of an adapter's prefix ``[B, H, T]``; None without a prefix."""
        return None


class FusedSoftmax(WeightedSum):
    """Weights ``exp(s)/(Σ exp(s) + Σ exp(extra))``: never as a matrix, all from log-sum-exps."""

    def __init__(
        self, scores: Scores, v_BGSK: Tensor, extra: list[ExtraKey], needs_weights: bool, needs_squares: bool = False
    ) -> None:
        self.scores, self.extra = scores, extra
        whole = scores.window is None and scores.prefix is None and scores.place.documents is None
        self.plain = whole and scores.place.slopes_H is None and not scores.place.is_chunk
        self._lse_BHT: Tensor | None = None
        self._total_BHT: Tensor | None = None
        self._squares_BHT: Tensor | None = None
        if self.plain and not extra and not needs_weights and not needs_squares:
            self._o_BHTK = causal_attention(scores.q_BHTK, scores.k_BGSK, v_BGSK, scores.scale)
            return
        self.reader = new_reader(scores, rows_sum_to_one=not extra) if needs_weights else None
        if self.plain and extra and self.reader is None and not needs_squares:
            self.o_BHTK, self._lse_BHT, self._total_BHT = attention_beside(
                scores.q_BHTK, scores.k_BGSK, v_BGSK, scores.scale, *joined(extra)
            )
            return
        others_BHT = lse_of_extra(extra)
        if self.reader is not None:
            read = read_softmax(scores, v_BGSK, self.reader, others_BHT, needs_squares)
            o, self._lse_BHT, self._squares_BHT = read
        elif needs_squares and scores.walks_once and others_BHT is None:
            # The walk waits: its kernel may calibrate the output too.
            self._values_BGSK = v_BGSK
            return
        elif needs_squares and scores.walks_once:
            o, self._total_BHT, self._squares_BHT = scores.softmax_with_squares(v_BGSK, others_BHT)
        elif self.plain and needs_squares:
            o, self._lse_BHT, self._squares_BHT = attention_with_squares(
                scores.q_BHTK, scores.k_BGSK, v_BGSK, scores.scale
            )
        else:
            o, self._lse_BHT = scores.softmax(v_BGSK)
        if others_BHT is not None:
            if self._total_BHT is None:
                if self.reader is not None:  # which was shown the tokens' share
                    self._total_BHT = torch.logaddexp(self._lse(), others_BHT)
                else:
                    o, self._total_BHT = set_beside(o, self._lse(), others_BHT)
                if self._squares_BHT is not None:  # of the softmax over tokens alone
                    self._squares_BHT = self._squares_BHT * (2 * (self._lse() - self._total_BHT)).exp()
            for key in extra:
                if (values := key.values()) is not None:
                    share_BHT = (key.score - self._total_BHT).exp().to(o.dtype)
                    o = o + share_BHT[..., None] * values.to(o.dtype)
        self._o_BHTK = o

    @override
    def summed(self, calibration: Calibration | None = None) -> Tensor:
        o, self._lse_BHT, self._squares_BHT = self.scores.softmax_with_squares(self._values_BGSK, None, calibration)
        return o

    @override
    def calibrated(self, calibration: Calibration) -> Tensor | None:
        return self.summed(calibration) if self._o_BHTK is None else None

    def _lse(self) -> Tensor:
        """Return the log-sum-exp of the scores of tokens ``[B, H, T]``; usually it came with the output."""
        if self._lse_BHT is None:
            self._lse_BHT = self.scores.lse()
        return self._lse_BHT

    def _total(self) -> Tensor:
        """Return the log-sum-exp over tokens and extra keys."""
        return self._lse() if self._total_BHT is None else self._total_BHT

    @override
    def rows(self, start: int, stop: int) -> Tensor:
        scores, seen = self.scores.block(start, stop, self._total())
        if self.plain:  # only the last square has keys that are not seen; the rest stays in cache untouched
            scores[..., start:].masked_fill_(~seen[:, start:], -torch.inf)
        else:
            scores = scores.masked_fill(~seen, -torch.inf)
        return scores.exp_()

    @override
    def row_sum(self) -> Tensor | None:
        return (self._lse() - self._total()).exp() if self.extra else None

    def sum_squares(self) -> Tensor:
        """Compute ``exp(lse(2·s) − 2·lse(s))`` from float32 log-sum-exps: bf16 would lose the difference."""
        if self._squares_BHT is None:
            _ = self.o_BHTK  # with which they may come
        if self._squares_BHT is not None:
            return self._squares_BHT
        return (self.scores.lse(sharpness=2.0) - 2 * self._total()).exp()

    @override
    def squares_without_value(self) -> Tensor | None:
        squares = [(2 * (key.score - self._total())).exp() for key in self.extra if key.value_HNK is None]
        return sum(squares[1:], squares[0]) if squares else None

    @override
    def prefix_share(self) -> Tensor | None:
        shares = [(key.score - self._total()).exp() for key in self.extra if key.of_prefix]
        return sum(shares[1:], shares[0]) if shares else None


class Explicit(WeightedSum):
    """Weights from an explicit matrix, a block of queries at a time; the backward pass recomputes each block."""

    def __init__(
        self, scores: Scores, v_BGSK: Tensor, extra: list[ExtraKey], weigh: Weigh, needs_weights: bool = False
    ) -> None:
        v_BHSK = over_heads(v_BGSK, scores.q_BHTK.shape[1])
        self.scores, self.extra, self.weigh = scores, extra, weigh
        self.reader = new_reader(scores, rows_sum_to_one=weigh is softmax_rows and not extra) if needs_weights else None

        def weighted_sum(start: int, stop: int) -> Tensor:
            weights, shares = self._weights(start, stop, self.reader)
            if scores.place.dropout is not None:
                first = scores.place.first + start
                weights = scores.place.dropout.of_weights(weights, first, scores.q_BHTK.shape[2])
            o = weights.to(v_BHSK.dtype) @ v_BHSK[:, :, : weights.shape[-1]]
            for key, share in zip(extra, shares, strict=True):
                if (values := key.values(start, stop)) is not None:
                    o = o + share.to(o.dtype) * values.to(o.dtype)
            if self.reader is not None:
                self.reader.read(EVERYTHING, start, weights)
            return o

        self._o_BHTK = self._by_block(weighted_sum)

    def _by_block(self, of: Callable[[int, int], Tensor]) -> Tensor:
        """Apply ``of`` (first query, one past the last) to every block and join the results along the queries."""
        n_queries = self.scores.q_BHTK.shape[2]
        again = n_queries > _QUERY_BLOCK and torch.is_grad_enabled()
        return torch.cat(
            [checkpoint(of, *block, use_reentrant=False) if again else of(*block) for block in query_blocks(n_queries)],
            dim=2,
        )

    def _weights(self, start: int, stop: int, reader: WeightReader | None = None) -> tuple[Tensor, list[Tensor]]:
        scores, seen = self.scores.block(start, stop)
        if reader is not None:
            reader.read_scores(EVERYTHING, scores.masked_fill(~seen, -torch.inf))
        return self.weigh(scores, seen, [key.score[:, :, start:stop, None].to(scores.dtype) for key in self.extra])

    @override
    def rows(self, start: int, stop: int) -> Tensor:
        return self._weights(start, stop)[0]

    @override
    def row_sum(self) -> Tensor | None:
        return self._by_block(lambda start, stop: self.rows(start, stop).abs().sum(-1))

    def sum_squares(self) -> Tensor:
        """Sum the squares of the weights as they are."""
        return self._by_block(lambda start, stop: self.rows(start, stop).square().sum(-1))

    @override
    def squares_without_value(self) -> Tensor | None:
        return self._sum_over_extra([key.value_HNK is None for key in self.extra], power=2)

    @override
    def prefix_share(self) -> Tensor | None:
        return self._sum_over_extra([key.of_prefix for key in self.extra], power=1)

    def _sum_over_extra(self, is_chosen: list[bool], power: int) -> Tensor | None:
        """Sum a power of the weights on some extra keys ``[B, H, T]``; None if no key is chosen."""
        if not any(is_chosen):
            return None

        def of_block(start: int, stop: int) -> Tensor:
            shares = zip(self._weights(start, stop)[1], is_chosen, strict=True)
            return torch.stack([share[..., 0] ** power for share, chosen in shares if chosen]).sum(0)

        return self._by_block(of_block)


class OneQuery(Explicit):
    """Softmax of one query over the keys that it sees, in one fused call; further quantities are computed
    explicitly.
    """

    def __init__(self, scores: Scores, v_BGSK: Tensor) -> None:
        self.scores, self.extra, self.weigh, self.reader = scores, [], softmax_rows, None
        grouped = v_BGSK.shape[1] != scores.q_BHTK.shape[1]
        self._o_BHTK = F.scaled_dot_product_attention(
            scores.q_BHTK,
            scores.k_BGSK,
            v_BGSK,
            attn_mask=scores.seen_by_one_query(),
            scale=scores.scale,
            enable_gqa=grouped,
        )


class Joined(WeightedSum):
    """Weighted sums of chunks of a part of a sequence (context_parallel.py), one after the other.

    Args:
        scores: queries of all chunks, with the keys of whole sequences.
        parts: the weighted sum of each chunk.
    """

    def __init__(self, scores: Scores, parts: list[WeightedSum]) -> None:
        self.scores, self.parts = scores, parts
        self._o_BHTK = torch.cat([part.o_BHTK for part in parts], dim=2)

    @override
    def sum_squares(self) -> Tensor:
        return torch.cat([part.sum_squares() for part in self.parts], dim=2)

    @override
    def squares_without_value(self) -> Tensor | None:
        found = [squares for part in self.parts if (squares := part.squares_without_value()) is not None]
        return torch.cat(found, dim=2) if found else None


#: (scores, which keys are seen, scores of extra keys ``[B, H, rows, 1]``) → weights, 0 where unseen, and extra shares.
Weigh = Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]


class Softmax(nn.Module):
    """``exp(s) / Σ exp(s)``; also the base of the other normalisers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def in_block(self, block: int) -> None:
        """Set the index of its block (from 0); called before birth."""

    def extra_keys(self, scores: Scores) -> list[ExtraKey]:
        """Return the keys beside the tokens' that the normaliser adds."""
        return []

    def _with_own(self, scores: Scores, v_BGSK: Tensor, extra: list[ExtraKey]) -> list[ExtraKey]:
        """Put the normaliser's own keys before the others; those of a user's own may have any type and shape."""
        own = self.extra_keys(scores)
        if not isinstance(own, list) or not all(isinstance(key, ExtraKey) for key in own):
            raise UsageError(f"{name_in_config(self)}: extra_keys gives no list of ExtraKey; give one, [] for none")
        for key in own:
            shape: tuple[int, ...] = getattr(key.score_BHTN, "shape", ())
            n_keys = shape[-1] if len(shape) == 4 else 1
            require_shape(self, "a score of extra_keys", key.score_BHTN, (*scores.q_BHTK.shape[:3], n_keys))
            if key.value_HNK is not None:
                wanted = (scores.q_BHTK.shape[1], n_keys, v_BGSK.shape[-1])
                require_shape(self, "a value of extra_keys", key.value_HNK, wanted)
        return own + extra

    def forward(
        self, scores: Scores, v_BGSK: Tensor, extra: list[ExtraKey], needs_weights: bool, needs_squares: bool
    ) -> WeightedSum:
        """Sum the values by their weights.

        Args:
            scores: scores of this attention.
            v_BGSK: values; grouped values without repeats, except that a user's class gets one copy per query head.
            extra: keys beside the tokens' that every query sees.
            needs_weights: weights will be read afterwards.
            needs_squares: :meth:`WeightedSum.sum_squares` will be called.
        """
        extra = self._with_own(scores, v_BGSK, extra)
        if scores.fusable:
            return FusedSoftmax(scores, v_BGSK, extra, needs_weights, needs_squares)
        if scores.of_one_query and not extra and not needs_weights:
            return OneQuery(scores, v_BGSK)
        return Explicit(scores, v_BGSK, extra, softmax_rows, needs_weights)


class OffByOne(Softmax):
    """``exp(s) / (1 + Σ exp(s))``: a head may attend to nothing."""

    def extra_keys(self, scores: Scores) -> list[ExtraKey]:
        """Return one key of score 0 and value 0."""
        return [ExtraKey(scores.q_BHTK.new_zeros((*scores.q_BHTK.shape[:3], 1), dtype=torch.float32))]


class LearnedSink(Softmax):
    """``exp(s) / (exp(b) + Σ exp(s))`` with one learned logit b per head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.logit = nn.Parameter(torch.zeros(config.n_heads))
        self.parameter_roles = {"logit": ParameterRole.BIAS}

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Start as softmax-off-by-one, with logits 0."""
        return {"logit": Constant(0.0)}

    def extra_keys(self, scores: Scores) -> list[ExtraKey]:
        """Return one key of score b and value 0."""
        return [ExtraKey(self.logit[:, None, None].expand((*scores.q_BHTK.shape[:3], 1)))]


class Softpick(Softmax):
    """``relu(exp(s) − 1) / (Σ |exp(s) − 1| + ε)`` (arXiv 2504.20966): a key of a score below 0 gets no weight, and what
    it takes from the others makes a row sum to less than 1. Explicit."""

    def rows(self, scores: Tensor, seen: Tensor, extra: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Compute weights from rows of scores; see ``blockwise.py``."""
        return softpick_rows(scores, seen, extra)

    @override
    def forward(
        self, scores: Scores, v_BGSK: Tensor, extra: list[ExtraKey], needs_weights: bool, needs_squares: bool
    ) -> WeightedSum:
        return Explicit(scores, v_BGSK, self._with_own(scores, v_BGSK, extra), self.rows, needs_weights)


class ClippedSoftmax(Softpick):
    """``clip((ζ − γ) · softmax(s) + γ, 0, 1)`` with ``γ = −α / max_seq_len`` (arXiv 2306.12929): weights can be exactly
    0, and 1. Explicit."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        attention = config.attention
        self.zeta, self.gamma = attention.clip_zeta or 1.0, -attention.clip_alpha / config.max_seq_len

    @override
    def rows(self, scores: Tensor, seen: Tensor, extra: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return clipped_rows(scores, seen, extra, self.zeta, self.gamma)


class Similarity(Softmax):
    """Weights of single scores, ``a = φ(s)``, with rows divided by their sum if the config says so [AS]."""

    signed = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.normalise = config.attention.normalise_rows

    def phi(self, scores: Tensor) -> Tensor:
        """Compute the similarity of each score."""
        return scores

    @override
    def forward(
        self, scores: Scores, v_BGSK: Tensor, extra: list[ExtraKey], needs_weights: bool, needs_squares: bool
    ) -> WeightedSum:
        return Explicit(scores, v_BGSK, self._with_own(scores, v_BGSK, extra), self._rows, needs_weights)

    def _rows(self, scores: Tensor, seen: Tensor, extra: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        weights = self._of_each(scores).masked_fill(~seen, 0.0)
        shares = [self._of_each(score) for score in extra]
        if self.normalise:
            total = weights.sum(-1, keepdim=True) + sum(shares)
            # A row of ReLUs may sum to 0; a signed sum may be anything, and is kept from dividing by less than 1.
            total = total.abs().clamp_min(1.0) if self.signed else total.clamp_min(_SMALLEST_SUM)
            weights, shares = weights / total, [share / total for share in shares]
        return weights, shares

    def _of_each(self, scores: Tensor) -> Tensor:
        """Compute the similarity of each score; a phi of the user's own may give another shape."""
        weights = self.phi(scores)
        require_shape(self, "phi", weights, scores.shape)
        return weights


class IdentitySimilarity(Similarity):
    """Similarity equal to the score, of either sign."""

    signed = True


class SigmoidSimilarity(Similarity):
    """Similarity ``σ(s)``, or ``σ(s − log max_seq_len)`` (arXiv 2409.04431)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.bias = -math.log(config.max_seq_len) if config.attention.sigmoid_bias == "log_length" else 0.0

    @override
    def phi(self, scores: Tensor) -> Tensor:
        return (scores + self.bias).sigmoid()


class ReluSimilarity(Similarity):
    """Similarity ``max(s, 0)``."""

    @override
    def phi(self, scores: Tensor) -> Tensor:
        return F.relu(scores)


class EluSimilarity(Similarity):
    """Similarity ``ELU(s) + 1``."""

    @override
    def phi(self, scores: Tensor) -> Tensor:
        return F.elu(scores) + 1
