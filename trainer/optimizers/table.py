"""Optimizers: one class per ``optim.name``, with the fields that it reads, its paper, and the content of its state.

The fields of a class are the fields of ``optim`` that it reads; all read the learning rate, its schedule and the clip
norm. Light on purpose: configs read this table before torch is loaded, so each class imports torch where it builds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from ...errors import UsageError
from ..strategies.table import STRATEGIES, StrategyName

if TYPE_CHECKING:
    from torch.optim import Optimizer

UpdateScale = Literal["adamw", "spectral"]
StateDtype = Literal["fp32", "bf16"]
OptimizerName = Literal["adamw", "nadam", "sgd", "adafactor", "muon", "lion", "soap"]


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its settings; the base of the rows of :data:`OPTIMIZERS`."""

    weight_decay: float

    elementwise: ClassVar[bool] = True
    """True if the step of an element depends only on its own gradients, so that each process can step its shard."""

    gathers: ClassVar[bool] = False
    """For optimizers that are not elementwise: True if the step itself gathers tensors sharded by FSDP2 (DTensors)."""

    steps_matrices: ClassVar[bool] = False
    """True if it steps matrices alone, and AdamW the rest: their groups come first."""

    fields_of_rest: ClassVar[tuple[str, ...]] = ()
    """Fields that AdamW alone reads, for the rest."""

    @property
    def sharded_state(self) -> tuple[str, ...]:
        """State of the shape of its parameter, sharded as the parameter is, by torch's key."""
        return ()

    @property
    def replicated_state(self) -> tuple[str, ...]:
        """Numbers that are the same for all parameters, by torch's key."""
        return ()

    @property
    def weight_decay_of_rest(self) -> float:
        """Weight decay of the tables and the head, if matrices have a separate one."""
        return self.weight_decay

    def state_elements(self, shape: tuple[int, ...], is_matrix: bool) -> int:
        """Count the elements of one parameter's state, without single numbers.

        Args:
            shape: the parameter's shape.
            is_matrix: True if its role is that of a matrix.
        """
        return len(self.sharded_state) * math.prod(shape)

    def state_bytes(self, shape: tuple[int, ...], is_matrix: bool) -> int:
        """Count the bytes of the same."""
        return 4 * self.state_elements(shape, is_matrix)

    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Build torch's optimizer over these groups, which state their own weight decay."""
        raise NotImplementedError


@dataclass(frozen=True)
class Moments(OptimizerConfig):
    """Base of those that keep a running mean of gradients and one of their squares."""

    beta1: float
    beta2: float
    eps: float

    @property
    def sharded_state(self) -> tuple[str, ...]:
        """Keys of both moments."""
        return ("exp_avg", "exp_avg_sq")

    @property
    def replicated_state(self) -> tuple[str, ...]:
        """Key of the steps taken."""
        return ("step",)


@dataclass(frozen=True)
class AdamWConfig(Moments):
    """Adam with decoupled weight decay (arXiv 1711.05101)."""

    clip_in_step: bool = False
    state_dtype: StateDtype = "fp32"

    @override
    def state_bytes(self, shape: tuple[int, ...], is_matrix: bool) -> int:
        narrow = 2 if self.state_dtype == "bf16" else 1
        return super().state_bytes(shape, is_matrix) // narrow

    @override
    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        if self.state_dtype == "bf16":
            from .classes import NarrowAdamW

            return NarrowAdamW(groups, lr=lr, betas=(self.beta1, self.beta2), eps=self.eps)
        from torch import optim

        return optim.AdamW(groups, lr=lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)


@dataclass(frozen=True)
class NAdamConfig(Moments):
    """Adam with Nesterov momentum (Dozat 2016, openreview OM0jvwB8jIp57ZJjtNEZ) and decoupled weight decay."""

    @property
    def replicated_state(self) -> tuple[str, ...]:
        """Keys of the steps taken and of the product of their momentum factors."""
        return ("step", "mu_product")

    @override
    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        from torch import optim

        betas = (self.beta1, self.beta2)
        return optim.NAdam(groups, lr=lr, betas=betas, eps=self.eps, decoupled_weight_decay=True)


@dataclass(frozen=True)
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum ``beta1``; weight decay is added to the gradient."""

    beta1: float

    @property
    def sharded_state(self) -> tuple[str, ...]:
        """Key of the momentum, if there is one."""
        return ("momentum_buffer",) if self.beta1 else ()

    @override
    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        from torch import optim

        return optim.SGD(groups, lr=lr, momentum=self.beta1)


@dataclass(frozen=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor (arXiv 1804.04235): second moments of a matrix by row and by column, and no first ones.

    ``lr`` is relative: torch multiplies it by the RMS of each parameter, and takes at most 1/√step.
    """

    elementwise: ClassVar[bool] = False

    def state_elements(self, shape: tuple[int, ...], is_matrix: bool) -> int:
        """Count one element per row and one per column; all elements of a vector."""
        return sum(math.prod(shape) // shape[axis] for axis in (-1, -2)) if len(shape) > 1 else math.prod(shape)

    @override
    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        from torch import optim

        return optim.Adafactor(groups, lr=lr)


@dataclass(frozen=True)
class LionConfig(OptimizerConfig):
    """The sign of an interpolated momentum, with decoupled weight decay (arXiv 2302.06675)."""

    beta1: float
    beta2: float

    @property
    def sharded_state(self) -> tuple[str, ...]:
        """Key of the momentum."""
        return ("exp_avg",)

    @override
    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        from .classes import Lion

        return Lion(groups, lr=lr, betas=(self.beta1, self.beta2))


@dataclass(frozen=True)
class MatrixOptimizer(OptimizerConfig):
    """Base of optimizers that step matrices; AdamW steps tables, the output head, gains and biases."""

    beta1: float
    beta2: float
    eps: float
    adamw_lr: float | None
    adamw_weight_decay: float | None

    elementwise: ClassVar[bool] = False
    steps_matrices: ClassVar[bool] = True
    fields_of_rest: ClassVar[tuple[str, ...]] = ("adamw_lr", "adamw_weight_decay")

    @property
    def weight_decay_of_rest(self) -> float:
        """Weight decay of AdamW's groups."""
        return self.weight_decay if self.adamw_weight_decay is None else self.adamw_weight_decay

    def matrix_elements(self, rows: int, columns: int) -> int:
        """Count the elements of one matrix's state."""
        raise NotImplementedError

    def build_for_matrices(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """Build the optimizer of the matrices' groups."""
        raise NotImplementedError

    def state_elements(self, shape: tuple[int, ...], is_matrix: bool) -> int:
        """Count the elements of this row's state for a matrix, of AdamW's two moments for the rest."""
        return self.matrix_elements(*shape) if is_matrix else 2 * math.prod(shape)

    @override
    def build(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        from .classes import MatricesAndRest

        matrices, *rest = groups
        if not rest:  # of some adapters
            return self.build_for_matrices([matrices], lr)
        adamw = AdamWConfig(self.weight_decay, self.beta1, self.beta2, self.eps)
        adamw_lr = lr if self.adamw_lr is None else self.adamw_lr
        return MatricesAndRest(self.build_for_matrices([matrices], lr), adamw.build(rest, adamw_lr))


@dataclass(frozen=True)
class MuonConfig(MatrixOptimizer):
    """Orthogonalised momentum (kellerjordan.github.io/posts/muon, arXiv 2502.16982)."""

    momentum: float
    update_scale: UpdateScale

    gathers: ClassVar[bool] = True
    fields_of_rest: ClassVar[tuple[str, ...]] = (*MatrixOptimizer.fields_of_rest, "beta1", "beta2", "eps")

    def matrix_elements(self, rows: int, columns: int) -> int:
        """Count the elements of the momentum."""
        return rows * columns

    @override
    def build_for_matrices(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        from .classes import Muon

        return Muon(groups, lr=lr, momentum=self.momentum, update_scale=self.update_scale)


@dataclass(frozen=True)
class SOAPConfig(MatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner (arXiv 2409.11321), by ``pytorch-optimizer``.

    The paper also rotates the width of tables and of the head; here AdamW steps them.
    """

    precondition_every: int

    #: Sides longer than this are not rotated, as in the paper's code.
    longest_side: ClassVar[int] = 10_000

    def matrix_elements(self, rows: int, columns: int) -> int:
        """Count the elements of both moments, and of a covariance and its eigenvectors for each side."""
        return 2 * rows * columns + sum(2 * side**2 for side in (rows, columns) if side <= self.longest_side)

    def build_for_matrices(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """See :class:`MatrixOptimizer`.

        Raises:
            UsageError: the package is not installed.
        """
        try:
            from pytorch_optimizer.optimizer.soap import SOAP
        except ImportError:
            raise UsageError(
                "optim.name is soap, which needs pytorch-optimizer: pip install pytorch-optimizer"
            ) from None

        built: Optimizer = SOAP(
            groups,
            lr=lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            precondition_frequency=self.precondition_every,
            max_precondition_dim=self.longest_side,
        )
        return built


#: Optimizers by ``optim.name``.
OPTIMIZERS: dict[OptimizerName, type[OptimizerConfig]] = {
    "adamw": AdamWConfig,
    "nadam": NAdamConfig,
    "sgd": SGDConfig,
    "adafactor": AdafactorConfig,
    "muon": MuonConfig,
    "lion": LionConfig,
    "soap": SOAPConfig,
}


def optimizer_strategy_problem(name: OptimizerName, strategy: StrategyName) -> str | None:
    """Say why this strategy cannot run this optimizer, with the remedy; None if it can."""
    row, facts = OPTIMIZERS[name], STRATEGIES[strategy]
    if row.elementwise or not facts.shards_optimizer or (row.gathers and not facts.engine):
        return None
    others = " or ".join(
        other
        for other, its in STRATEGIES.items()
        if its.launched and (not its.shards_optimizer or (row.gathers and not its.engine))
    )
    return (
        f"optim.name is {name}, which steps whole matrices, but {strategy} shards its state: give trainer.strategy "
        f"{others} or single, or another optimizer"
    )
