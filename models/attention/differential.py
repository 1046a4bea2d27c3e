"""Differential attention (arXiv 2410.05258): the output of one softmax, minus λ times that of another.

Neighbouring heads 2i and 2i + 1 are a pair: their queries and keys make the two softmaxes, and the values of both are
summed by the difference. Every map has the shape that it has in plain attention of as many heads.

Legend: B sequences, H heads, T queries, S keys, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..config import InitConfig, ModelConfig
from ..init import Distribution, Normal, ParameterRole
from .fused.difference import difference, normed_difference
from .fused.kernels import wide_values_pay
from .normalisers import Softmax, WeightedSum, query_blocks
from .scores import ExtraKey, Scores
from .weight_reader import EVERYTHING, new_reader

#: Standard deviation at birth of the vectors that λ is learned through.
_VECTOR_STD = 0.1


def initial_lambda(block: int) -> float:
    """Compute λ_init of a block (from 0): ``0.8 − 0.6·exp(−0.3·block)``."""
    return 0.8 - 0.6 * math.exp(-0.3 * block)


def _of_pairs(x_BH: Tensor) -> tuple[Tensor, Tensor]:
    """Split by softmax: return the values of the first and of the second softmax of each pair, each repeated for both
    heads; heads are axis 1.
    """
    first, second = x_BH.unflatten(1, (-1, 2)).unbind(2)
    return first.repeat_interleave(2, 1), second.repeat_interleave(2, 1)


class Difference(WeightedSum):
    """Weights ``a₁ − λ·a₂``, of either sign.

    Args:
        scores: scores of all heads.
        softmax: their weights.
        sums: sums by those weights of the values of the first and of the second head of each pair, ``[B, H, T, K]``.
        share: λ.
        needs_weights: see :meth:`Softmax.forward`.
    """

    def __init__(
        self, scores: Scores, softmax: WeightedSum, sums: list[Tensor], share: Tensor, needs_weights: bool
    ) -> None:
        self.scores, self.softmax, self.sums, self.share = scores, softmax, sums, share
        self.reader = new_reader(scores, rows_sum_to_one=False) if needs_weights else None
        if self.reader is not None:
            for start, stop in query_blocks(scores.q_BHTK.shape[2]):
                block, seen = scores.block(start, stop)
                self.reader.read_scores(EVERYTHING, block.masked_fill(~seen, -torch.inf))
                self.reader.read(EVERYTHING, start, self.rows(start, stop))

    @override
    def summed(self) -> Tensor:
        return difference(self.sums, self.share)

    @override
    def normed(self, gain: Tensor, eps: float, times: float) -> Tensor | None:
        return normed_difference(self.sums, self.share, gain, eps, times) if self._o_BHTK is None else None

    @override
    def rows(self, start: int, stop: int) -> Tensor:
        first, second = _of_pairs(self.softmax.rows(start, stop))
        return first - self.share * second

    def _over_rows(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum ``of`` rows over their keys, a block of queries at a time."""
        return torch.cat([of(self.rows(*block)).sum(-1) for block in query_blocks(self.scores.q_BHTK.shape[2])], dim=2)

    @override
    def row_sum(self) -> Tensor | None:
        return self._over_rows(torch.abs)

    @override
    def sum_squares(self) -> Tensor:
        return self._over_rows(torch.square)


class DifferentialSoftmax(Softmax):
    """``softmax(s₁) − λ·softmax(s₂)`` with ``λ = exp(q₁·k₁) − exp(q₂·k₂) + λ_init``, its four vectors ``[d_head]``
    learned, one λ for all heads of a block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.q1, self.k1, self.q2, self.k2 = (nn.Parameter(torch.zeros(config.d_key)) for _ in range(4))
        self.parameter_roles = dict.fromkeys(("q1", "k1", "q2", "k2"), ParameterRole.GAIN)
        self.lambda_init = initial_lambda(0)

    @override
    def in_block(self, block: int) -> None:
        self.lambda_init = initial_lambda(block)

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Draw from a normal distribution, whatever the kind of the other parameters."""
        return dict.fromkeys(("q1", "k1", "q2", "k2"), Normal(_VECTOR_STD))

    def share(self) -> Tensor:
        """Compute λ."""
        # The backward pass keeps the copies. ZeRO 3 releases the parameters after a forward pass, and gathers them
        # again only for modules that return tensors alone.
        q1, k1, q2, k2 = (x.clone() for x in (self.q1, self.k1, self.q2, self.k2))
        first, second = (q1 * k1).sum().exp(), (q2 * k2).sum().exp()
        return first - second + self.lambda_init

    def forward(
        self, scores: Scores, v_BGSK: Tensor, extra: list[ExtraKey], needs_weights: bool, needs_squares: bool
    ) -> WeightedSum:
        """See :class:`Softmax`. Takes the keys of tokens only: configs that would add others are refused."""
        assert not extra
        # Each softmax sums the values of both heads of its pair: side by side, or one after the other where a kernel
        # that takes values as wide would take longer than twice.
        pairs = [v.repeat_interleave(2, 1) for v in v_BGSK.unflatten(1, (-1, 2)).unbind(2)]
        if not scores.fusable or wide_values_pay(scores.q_BHTK, 2 * v_BGSK.shape[-1]):
            pairs = [torch.cat(pairs, dim=-1)]
        parts = [super(DifferentialSoftmax, self).forward(scores, values, [], False, False) for values in pairs]
        sums = [part.o_BHTK for part in parts] if len(parts) == 2 else list(parts[0].o_BHTK.chunk(2, dim=-1))
        return Difference(scores, parts[0], sums, self.share(), needs_weights)
