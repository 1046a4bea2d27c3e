"""Observers of the decoder's named places: the metrics that read them, and a watch for NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.observe import Attended, Site, Sublayer
from .observed import PLACES, AttentionView, Observed
from .ranks import sum_over_ranks

_SITES = {
    "attention": "the residual stream after the attention of block {}",
    "heads": "the queries, keys, values or outputs of the attention of block {}",
    "neurons": "the hidden activations of the MLP of block {}",
    "mlp": "the residual stream after the MLP of block {}",
}


class FiniteWatch:
    """Record of the places of a forward pass that showed NaN or inf. Queries the device only at the end."""

    def __init__(self, n_layers: int, device: torch.device) -> None:
        self.n_layers = n_layers
        self.names = {("embedding", 0): "the embeddings"}
        for layer in range(1, n_layers + 1):
            for site in ("heads", "attention", "neurons", "mlp"):
                self.names[site, layer] = _SITES[site].format(layer)
        self.names["logits", n_layers] = "the logits"
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self.totals = dict.fromkeys(self.names, zero)

    def see(self, site: str, layer: int, x: Tensor) -> None:
        """Check a tensor; one pass over it, no copy."""
        # NaN and inf survive every sum.
        total = x.sum(dtype=torch.promote_types(x.dtype, torch.float32))
        self.totals[site, layer] = self.totals[site, layer] + total

    def first(self, *, everywhere: bool = False) -> str | None:
        """Name the first place of the pass that showed any, on this or any rank; None if all was finite."""
        broken = ~torch.stack(list(self.totals.values())).isfinite()
        shown = (sum_over_ranks(broken.int()) if everywhere else broken).tolist()
        return next((name for name, broken in zip(self.names.values(), shown, strict=True) if broken), None)


class MetricObserver:
    """Observer that shows every place of a pass to the metrics that read it, in their order.

    Args:
        metrics: the metrics.
        finite: looks at all tensors first; None where nothing watches for NaN.
    """

    def __init__(self, metrics: Sequence[Observed], finite: FiniteWatch | None = None) -> None:
        self.finite = finite
        self.first_BT: Tensor | None = None
        """First position of each position's document in the batch; None if each sequence counts as one."""
        self.tokens_BT: Tensor | None = None
        """The batch that passes."""
        self.metrics = metrics
        self.hooks = {place: [hook for m in metrics if (hook := m.hook(place)) is not None] for place in PLACES}

    def _show(self, place: Any, *tensors: Any) -> None:
        for hook in self.hooks[place]:
            hook(*tensors)

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        if self.finite is not None:
            self.finite.see(site, layer, h_BTD)
        self._show("residual", site, layer, h_BTD)

    def attention(self, layer: int, attended: Attended) -> None:
        """See models/observe.py."""
        if self.finite is not None:
            # Fused kernels may give finite outputs for queries that are not. Values that are not make outputs that are
            # not.
            for x_BHTK in (attended.q_BHTK, attended.k_BHTK, attended.out_BHTK):
                self.finite.see("heads", layer, x_BHTK)
        self._show(
            "attention", layer, AttentionView(**vars(attended), first_BT=self.first_BT, tokens_BT=self.tokens_BT)
        )

    def sublayer(self, site: Sublayer, layer: int, x_BTD: Tensor) -> None:
        """See models/observe.py."""
        self._show("sublayer", site, layer, x_BTD)

    def neurons(self, layer: int, a_BTF: Tensor) -> None:
        """See models/observe.py."""
        if self.finite is not None:
            self.finite.see("neurons", layer, a_BTF)
        self._show("neurons", layer, a_BTF)

    def routing(self, layer: int, chosen_BTK: Tensor) -> None:
        """See models/observe.py."""
        self._show("routing", layer, chosen_BTK)

    def expert_units(self, layer: int, expert: int, a_RF: Tensor, position_R: Tensor) -> None:
        """See models/observe.py."""
        self._show("expert_units", layer, expert, a_RF, position_R)

    def logits(self, logits_BV: Tensor) -> None:
        """Show the last-position logits of a batch, at the end of its pass."""
        if self.finite is not None:
            self.finite.see("logits", self.finite.n_layers, logits_BV)
        self._show("logits", logits_BV)

    def passed(self, layer: int) -> None:
        """See :class:`Observed`."""
        for metric in self.metrics:
            metric.passed(layer)
