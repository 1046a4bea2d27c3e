"""Mixture of experts: a router, the experts that it sends tokens to, and an optional one for all tokens.

Plain experts are one operator (``fused_experts.py``). If their maps do more, tokens are sorted by expert, so that each
expert is called once for all of its rows, or for none: every parameter then has a gradient, and ranks that gather
weights for a module's pass gather the same ones in the same order.

Legend: B sequences, T positions, D width, N tokens, E experts, K experts of a token, M = N·K rows, one for each choice.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..config import ModelConfig
from ..init import Linear
from ..linear_cross_entropy import wide
from ..mlp import MLP
from ..observe import ExpertObserver, Observer, show_routing
from .fused_experts import fused_experts, inverse
from .routing_losses import RoutingLosses


class _Reordered(torch.autograd.Function):
    """Rows of ``x_ND`` in another order, each ``copies`` times: ``x[order // copies]``.

    Backwards it reads in the inverse order and sums the copies. Neither direction adds to memory that others add to, so
    that gradients are the same each time, and on CPU fast.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, inverse_M: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse_M)
        ctx.copies = copies
        return x_ND[order_M // copies]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_M,) = ctx.saved_tensors
        return gradients[0][inverse_M].unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


def _reordered(x_ND: Tensor, order_M: Tensor, inverse_M: Tensor, copies: int = 1) -> Tensor:
    return cast(Tensor, _Reordered.apply(x_ND, order_M, inverse_M, copies))


def rows_of_experts(count_E: Tensor, n_sequences: int, n_choices: int) -> list[int]:
    """Return the number of rows of each expert. A rehearsal under fake tensors has no choices, so all experts get equal
    numbers.

    Args:
        count_E: choices of each expert over all sequences.
        n_sequences: B.
        n_choices: rows of one sequence, T·K.
    """
    if not isinstance(count_E, FakeTensor):
        found: list[int] = count_E.tolist()
        return found
    each, left = divmod(n_choices, len(count_E))
    return [n_sequences * (each + (expert < left)) for expert in range(len(count_E))]


class _OneExpert:
    """Observer adapter that shows the hidden units of one expert."""

    def __init__(self, observer: ExpertObserver, expert: int, position_R: Tensor) -> None:
        self.observer, self.expert, self.position_R = observer, expert, position_R

    def neurons(self, layer: int, a_RF: Tensor) -> None:
        """See models/observe.py."""
        self.observer.expert_units(layer, self.expert, a_RF, self.position_R)


class Mixture(nn.Module):
    """``Σ_k weight_k · expert_k(x)`` over the experts that the router chooses for a token, and the shared one's
    output."""

    def __init__(self, config: ModelConfig, block: int = 0) -> None:
        super().__init__()
        experts = config.experts
        assert experts.n_experts is not None
        self.layer, self.top_k, self.renormalise = block + 1, experts.top_k, experts.renormalise
        self.router = Linear(config.d_model, experts.n_experts, bias=False)
        self.experts = nn.ModuleList(MLP(config, block, experts.d_ff) for _ in range(experts.n_experts))
        self.shared = None if experts.d_shared is None else MLP(config, block, experts.d_shared)

    def forward(self, x_BTD: Tensor, observer: Observer | None = None, losses: RoutingLosses | None = None) -> Tensor:
        """Apply the mixture, ``[B, T, D] → [B, T, D]``; the router's cost is added to ``losses``."""
        logits_BTE = self.router(x_BTD)
        logits_BTE = logits_BTE.to(wide(logits_BTE.dtype))
        share_BTE = logits_BTE.softmax(-1)
        weight_BTK, chosen_BTK = share_BTE.topk(self.top_k, dim=-1)
        if self.renormalise:
            weight_BTK = weight_BTK / weight_BTK.sum(-1, keepdim=True)
        show_routing(observer, self.layer, chosen_BTK)
        flat_M = chosen_BTK.flatten()
        count_E = flat_M.new_zeros(len(self.experts)).scatter_add_(0, flat_M, torch.ones_like(flat_M))
        if losses is not None:
            losses.add(logits_BTE, share_BTE, chosen_BTK)
        x_ND, weight_NK, chosen_NK = (x.flatten(0, 1) for x in (x_BTD, weight_BTK, chosen_BTK))
        # The operator keeps no activations without gradients.
        looks = observer if isinstance(observer, ExpertObserver) else None
        y_ND = None if looks else fused_experts(self.experts, x_ND, weight_NK, chosen_NK, count_E)
        y_BTD = self._mixed(x_BTD, weight_BTK, flat_M, count_E, looks) if y_ND is None else y_ND.view_as(x_BTD)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)

    # The number of an expert's rows depends on the choices, so no graph can be compiled over it.
    @torch.compiler.disable
    def _mixed(
        self,
        x_BTD: Tensor,
        weight_BTK: Tensor,
        chosen_M: Tensor,
        count_E: Tensor,
        observer: ExpertObserver | None = None,
    ) -> Tensor:
        """Compute the weighted sum of the experts' outputs, ``[B, T, D]``."""
        n_sequences, n_positions, _ = x_BTD.shape
        order_M = chosen_M.argsort(stable=True)
        inverse_M = inverse(order_M)
        rows_MD = _reordered(x_BTD.flatten(0, 1), order_M, inverse_M, self.top_k)
        n_rows = rows_of_experts(count_E, n_sequences, n_positions * self.top_k)
        positions = (order_M // self.top_k % n_positions).split(n_rows)
        shown = [None if observer is None else _OneExpert(observer, e, rows) for e, rows in enumerate(positions)]
        of_experts = zip(self.experts, rows_MD.split(n_rows), shown, strict=True)
        y_MD = torch.cat([expert(part_RD, one) for expert, part_RD, one in of_experts])
        y_BTKD = _reordered(y_MD, inverse_M, order_M).unflatten(0, (n_sequences, n_positions, self.top_k))
        return (y_BTKD * weight_BTK.to(y_BTKD.dtype)[..., None]).sum(2)
