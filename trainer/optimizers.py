"""Optimizers: one class per ``optim.name``, with the fields that it reads, its paper, and what its state holds.

The fields of a class are the fields of ``optim`` that it reads; all read the learning rate, its schedule and the clip
norm. Light on purpose: configs read this table before torch is loaded, so each class imports torch where it builds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch.optim import Optimizer

OptimizerName = Literal["adamw", "nadam", "sgd", "adafactor"]


@dataclass(frozen=True)
class OptimizerConfig:
    """One optimizer and its settings; the base of the rows of :data:`OPTIMIZERS`."""

    weight_decay: float

    elementwise: ClassVar[bool] = True
    """Whether the step of an element depends on its own gradients only, so that each process can step its shard."""

    @property
    def sharded_state(self) -> tuple[str, ...]:
        """State of the shape of its parameter, sharded as the parameter is, by torch's key."""
        return ()

    @property
    def replicated_state(self) -> tuple[str, ...]:
        """Numbers that are the same for all parameters, by torch's key."""
        return ()

    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Torch's optimizer over these groups, which state their own weight decay."""
        raise NotImplementedError


@dataclass(frozen=True)
class AdamW(OptimizerConfig):
    """Adam with decoupled weight decay (arXiv 1711.05101)."""

    beta1: float
    beta2: float
    eps: float

    @property
    def sharded_state(self) -> tuple[str, ...]:
        """Both moments."""
        return ("exp_avg", "exp_avg_sq")

    @property
    def replicated_state(self) -> tuple[str, ...]:
        """Steps taken."""
        return ("step",)

    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """See :class:`OptimizerConfig`."""
        from torch import optim

        return optim.AdamW(groups, lr=lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)


@dataclass(frozen=True)
class NAdam(AdamW):
    """Adam with Nesterov momentum (Dozat 2016, openreview OM0jvwB8jIp57ZJjtNEZ) and decoupled weight decay."""

    @property
    def replicated_state(self) -> tuple[str, ...]:
        """Steps taken, and the product of their momentum factors."""
        return ("step", "mu_product")

    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """See :class:`OptimizerConfig`."""
        from torch import optim

        betas = (self.beta1, self.beta2)
        return optim.NAdam(groups, lr=lr, betas=betas, eps=self.eps, decoupled_weight_decay=True)


@dataclass(frozen=True)
class SGD(OptimizerConfig):
    """Stochastic gradient descent with momentum ``beta1``; weight decay is added to the gradient."""

    beta1: float

    @property
    def sharded_state(self) -> tuple[str, ...]:
        """The momentum, where there is one."""
        return ("momentum_buffer",) if self.beta1 else ()

    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """See :class:`OptimizerConfig`."""
        from torch import optim

        return optim.SGD(groups, lr=lr, momentum=self.beta1)


@dataclass(frozen=True)
class Adafactor(OptimizerConfig):
    """Adafactor (arXiv 1804.04235): second moments of a matrix by row and by column, and no first ones.

    ``lr`` is relative: torch multiplies it by the RMS of each parameter, and takes at most 1/√step.
    """

    elementwise: ClassVar[bool] = False

    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """See :class:`OptimizerConfig`."""
        from torch import optim

        return optim.Adafactor(groups, lr=lr)


#: Optimizers by ``optim.name``.
OPTIMIZERS: dict[OptimizerName, type[OptimizerConfig]] = {
    "adamw": AdamW,
    "nadam": NAdam,
    "sgd": SGD,
    "adafactor": Adafactor,
}


def optimizer_fields(kind: type[OptimizerConfig]) -> set[str]:
    """The fields of ``optim`` that an optimizer reads besides those that all read."""
    return {field.name for field in dataclasses.fields(kind)}


def read_optimizer(name: OptimizerName, values: Mapping[str, Any]) -> OptimizerConfig:
    """The optimizer that these values of ``optim``'s fields describe."""
    kind = OPTIMIZERS[name]
    return kind(**{field: values[field] for field in optimizer_fields(kind)})


def unread_fields(name: OptimizerName, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """A line for every value of ``optim`` that was set although this optimizer does not read it."""
    fields = set().union(*map(optimizer_fields, OPTIMIZERS.values())) - optimizer_fields(OPTIMIZERS[name])
    return [
        f"optim.{field} is {values[field]}, which optimizer {name} does not read: remove it"
        for field in sorted(fields)
        if values[field] != defaults[field]
    ]
