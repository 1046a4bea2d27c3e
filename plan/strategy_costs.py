"""What a strategy makes of a rehearsed step: memory and bytes sent. What no rehearsal shows is reckoned here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..trainer.config import TrainerConfig
from ..trainer.strategies import fsdp2
from ..trainer.strategies.table import STRATEGIES
from .ledger import PARTS, Curve
from .rehearsal import Cut, cut_as_zero_3

_PARAMETERS, _GRADIENTS, _OPTIMIZER, _GATHERED, _ = range(len(PARTS))

#: DeepSpeed's defaults, which `trainer/strategies/zero.py` leaves as they are, in elements: of a bucket of gradients,
#: of the weights that ZeRO 3 may hold gathered, and of what it updates at a time.
BUCKET, LIVE, SUB_GROUP = 500_000_000, 1_000_000_000, 1_000_000_000


@dataclass(frozen=True)
class Share:
    """What a process has its part of."""

    trainer: TrainerConfig
    n_params: int
    n_processes: int

    @property
    def accumulates(self) -> int:
        """Micro-batches of a step."""
        return self.trainer.global_batch_size // (self.trainer.micro_batch_size * self.n_processes)

    @property
    def whole(self) -> float:
        """Bytes of all weights, or all gradients, in float32."""
        return 4.0 * self.n_params

    @property
    def part(self) -> float:
        """Bytes of this process's part of them."""
        return self.whole / self.n_processes

    @property
    def gathered(self) -> float:
        """Bytes of a weight as passes use it."""
        return 2.0 if self.trainer.gather == "bf16" else 4.0

    @property
    def ring(self) -> float:
        """Share of a tensor that a process sends when all of it is gathered or scattered."""
        return (self.n_processes - 1) / self.n_processes


def _as_rehearsed(held: np.ndarray, curve: Curve, share: Share) -> np.ndarray:
    return held


def _ddp(held: np.ndarray, curve: Curve, share: Share) -> np.ndarray:
    # Buckets as large as all gradients stay. Gradients are views of them once they are reduced, which is in the last
    # backward pass of a step; those of the passes before it lie beside them.
    beside = ~curve.during("first forward", "update") & (share.accumulates > 1)
    held[:, _GRADIENTS] = share.whole + np.where(beside, held[:, _GRADIENTS], 0)
    return held


def _zero_1_and_2(held: np.ndarray, curve: Curve, share: Share) -> np.ndarray:
    offloaded = share.trainer.offload != "none"
    if STRATEGIES[share.trainer.strategy].zero_stage == 1:
        # Each process sums all gradients, and stages them through one bucket.
        gradients = np.where(curve.during("first forward"), 0, held[:, _GRADIENTS]) + 4.0 * BUCKET * curve.reducing
        parts = 1
    else:
        # They go through two buckets as they come; what is kept is the part, and the sum of those of the passes before.
        gradients = 2 * 4.0 * BUCKET * curve.reducing
        parts = min(share.accumulates, 2)
    if not offloaded:
        gradients = gradients + share.part * (parts + curve.during("update"))
    held[:, _GRADIENTS] = gradients
    # The part of the weights that is updated is a copy.
    held[:, _OPTIMIZER] = 0 if offloaded else 3 * share.part
    return held


def _zero_3(held: np.ndarray, curve: Curve, share: Share) -> np.ndarray:
    update, offloaded = curve.during("update"), share.trainer.offload != "none"
    # One for gradients of maps, and one for those of embeddings and norms where they are sent in another precision.
    bucket = {2.0: 2.0 + 4.0, 4.0: 4.0}[share.gathered] * BUCKET
    # While a bucket is reduced its gradients are laid out by process once more.
    held[:, _GRADIENTS] = bucket + curve.reducing * share.gathered * min(BUCKET, share.n_params)
    if not offloaded:
        held[:, _GRADIENTS] += share.part + update * min(share.part, 4.0 * SUB_GROUP)
    held[:, _PARAMETERS] = 0 if offloaded else share.part
    held[:, _OPTIMIZER] = 0 if offloaded else 2 * share.part
    held[:, _GATHERED] = ~update * share.gathered * min(LIVE, share.n_params)
    return held


def _sent_as_rehearsed(curve: Curve, share: Share) -> float:
    later = share.accumulates - 1
    return sum(sent * (later if phase.startswith("later") else 1) for phase, sent in curve.sent.items())


def _sent_by_ddp(curve: Curve, share: Share) -> float:
    return 2 * share.ring * share.whole


def _sent_by_zero_1_and_2(curve: Curve, share: Share) -> float:
    # Buckets are summed in all processes, of which each takes its part; then updated weights are gathered.
    sums = share.accumulates if STRATEGIES[share.trainer.strategy].zero_stage == 2 else 1
    return share.ring * share.whole * (2 * sums + 1)


def _sent_by_zero_3(curve: Curve, share: Share) -> float:
    # Weights before the forward and before the backward pass, gradients after it.
    return 3 * share.accumulates * share.ring * share.gathered * share.n_params


def _none_on_host(share: Share) -> float:
    return 0.0


def _on_host_of_zero(share: Share) -> float:
    """Of one process: weights to update, moments, gradients and their sums; of ZeRO 3 the weights themselves too, and
    of ZeRO 1 and 2 a copy of the part that goes back."""
    if share.trainer.offload == "none":
        return 0.0
    on_drive = 3 if share.trainer.offload == "nvme" else 0
    return (6 - on_drive) * share.part


@dataclass(frozen=True)
class Way:
    """How a strategy's memory and messages follow from a rehearsed step."""

    cut: Cut | None = None
    """What cuts the model for the rehearsal."""
    held: Callable[[np.ndarray, Curve, Share], np.ndarray] = _as_rehearsed
    """(bytes held ``[operators, parts]``, what was rehearsed, share) → the same bytes of this strategy."""
    sent: Callable[[Curve, Share], float] = _sent_as_rehearsed
    """Bytes that one process sends in a step."""
    host: Callable[[Share], float] = _none_on_host
    """Bytes of one process in its machine's own memory."""
    reckoned: tuple[str, ...] = ()
    """Parts that were reckoned, not rehearsed."""


_STATES = ("parameters", "gradients", "optimizer", "sent")

#: Ways by ``trainer.strategy``.
WAYS: dict[str, Way] = {
    "single": Way(),
    "ddp": Way(held=_ddp, sent=_sent_by_ddp, reckoned=("gradients", "sent")),
    "fsdp2": Way(fsdp2.sharder),
    "zero1": Way(None, _zero_1_and_2, _sent_by_zero_1_and_2, _on_host_of_zero, _STATES),
    "zero2": Way(None, _zero_1_and_2, _sent_by_zero_1_and_2, _on_host_of_zero, _STATES),
    "zero3": Way(cut_as_zero_3, _zero_3, _sent_by_zero_3, _on_host_of_zero, (*_STATES, "gathered")),
}
