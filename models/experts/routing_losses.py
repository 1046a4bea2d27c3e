"""Costs of routers in training: uneven use of the experts, and large logits.

Legend: B sequences, T positions, N counted tokens, L blocks with experts, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: Function from this batch's choices of each expert ``[L, E]`` to those of the global batch, in any common unit.
GlobalChoices = Callable[[Tensor], Tensor]


class RoutingCost(NamedTuple):
    """Means over a model's blocks with experts, without their coefficients; scalars, float32 or wider."""

    load_balance: Tensor
    """``E · Σ_e f_e · P_e``: f_e is expert e's share of all choices, P_e the mean of its softmax share. 1 where all are
    used alike, E where one gets all (Switch Transformers, arXiv 2101.03961; with several choices for each token as in
    DeepSeekMoE, arXiv 2401.06066)."""
    router_z: Tensor
    """Mean of the squared log-sum-exp of the router's logits (ST-MoE, arXiv 2202.08906)."""


class BlockRouting(NamedTuple):
    """Statistics of one block's router over the tokens of a batch that count."""

    count_E: Tensor
    """Choices of each expert, int64."""
    share_E: Tensor
    """Mean of each expert's softmax share; carries gradients."""
    router_z: Tensor
    """Mean of the squared log-sum-exp of the logits, a scalar; carries gradients."""


class RoutingLosses:
    """Collector of the choices and costs of the routers in one training pass, block by block.

    Args:
        counts_BT: True at the positions that count, those whose loss does: padding is routed too, and counts nowhere.
            None: all count.
        n_counted: number that sums over positions are divided by, ``[]``, for the mean over processes to be that over
            their positions; by default the number of those that count.
    """

    def __init__(self, counts_BT: Tensor | None = None, n_counted: Tensor | None = None) -> None:
        self.counts_BT, self.n_counted = counts_BT, n_counted
        self.by_block: list[BlockRouting] = []

    def add(self, logits_BTE: Tensor, share_BTE: Tensor, chosen_BTK: Tensor) -> None:
        """Add one block's router: its logits, their softmax, and the experts that it chooses."""
        squares_BT = logits_BTE.logsumexp(-1).square()
        counts_BT = torch.ones_like(squares_BT, dtype=torch.bool) if self.counts_BT is None else self.counts_BT
        # Sums over numbers: where all count, these are the means to the last bit.
        n_tokens = counts_BT.sum() if self.n_counted is None else self.n_counted
        share_E = (share_BTE * counts_BT[..., None]).flatten(0, -2).sum(0) / n_tokens
        router_z = (squares_BT * counts_BT).sum() / n_tokens
        counted_M = counts_BT[..., None].expand_as(chosen_BTK).flatten().long()
        count_E = counted_M.new_zeros(logits_BTE.shape[-1]).scatter_add_(0, chosen_BTK.flatten(), counted_M)
        self.by_block.append(BlockRouting(count_E, share_E, router_z))

    def counts(self) -> Tensor:
        """Return the choices of each expert by block, int64 ``[L, E]``."""
        return torch.stack([block.count_E for block in self.by_block])

    def cost(self, global_choices: GlobalChoices | None = None) -> RoutingCost:
        """Compute the mean cost over the blocks.

        The shares f_e are those of the whole global batch (arXiv 2501.11873): then the costs of its micro-batches,
        weighted by their tokens, sum to its cost for any split. Shares of a micro-batch alone would keep experts from
        specialising in its content.

        Args:
            global_choices: function that sums the choices over micro-batches and processes; None if this batch is the
                whole.
        """
        count_LE = self.counts()
        if global_choices is not None:
            count_LE = global_choices(count_LE)
        chosen_LE = count_LE / count_LE.sum(-1, keepdim=True)
        share_LE = torch.stack([block.share_E for block in self.by_block])
        balance_L = chosen_LE.shape[-1] * (chosen_LE * share_LE).sum(-1)
        return RoutingCost(balance_L.mean(), torch.stack([block.router_z for block in self.by_block]).mean())
