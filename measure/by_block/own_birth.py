"""Comparison of a birth with itself, in the same pass that computes its reference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...models.observe import Site
from ..observed import Arrays, Scalars, Setting
from ..our_metrics import ObservedBirth


class ObservedOwnBirth(ObservedBirth):
    """:class:`ObservedBirth` of a birth in a pass by block: its reference needs no other pass.

    The setting's ``birth`` holds zeros, which are filled in as places are passed. A place's last positions are kept
    until the place is whole and its seed direction therefore known.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.kept: list[Tensor] = []

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        if site != "attention":
            self.kept.append(h_BTD[:, -1:].clone())

    def passed(self, layer: int) -> None:
        """See :class:`~birthmark.measure.observed.Observed`."""
        assert self.birth is not None
        last_N1D = torch.cat(self.kept)
        self.kept = []
        direction_D = F.normalize(last_N1D.sum((0, 1), dtype=torch.float64), dim=-1, eps=0.0)
        self.alignment.references[0, layer] = direction_D
        self.birth.direction[layer] = direction_D.cpu().numpy()
        self.alignment.update(layer, last_N1D)

    def result(self) -> tuple[Scalars, Arrays]:
        """See :class:`~birthmark.measure.observed.Observed`."""
        assert self.birth is not None
        self.birth.mean_prob[:] = self.preference.compute().mean_prob
        return super().result()
