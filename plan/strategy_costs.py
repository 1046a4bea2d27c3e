"""Costs of a strategy for a rehearsed step: memory and bytes sent. Parts that no rehearsal shows are estimated here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..trainer.config import TrainerConfig
from ..trainer.strategies import fsdp2
from ..trainer.strategies.table import STRATEGIES, StrategyName
from .rehearsal import Sharding
from .tracing import PARTS, Curve, Ring

_PARAMETERS, _GRADIENTS, _OPTIMIZER, _GATHERED, _ = range(len(PARTS))

#: DeepSpeed's defaults, which `trainer/strategies/zero.py` keeps, in elements: size of a bucket of gradients, of the
#: weights that ZeRO 3 may hold gathered, and of one part of its update.
BUCKET, LIVE, SUB_GROUP = 500_000_000, 1_000_000_000, 1_000_000_000


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a step and of one process's shard, as formulas need them."""

    trainer: TrainerConfig
    n_params: int
    n_processes: int
    n_moments: int = 2
    """Tensors of the optimizer's state that have the shape of the weights: two of AdamW."""
    n_averages: int = 0
    """Averages of the weights, which lie where these do: 1 with ``optim.ema``."""

    @property
    def accumulate(self) -> int:
        """Micro-batches of a process in a step."""
        return self.trainer.batch_shares(self.n_processes).accumulation

    @property
    def full(self) -> float:
        """Bytes of all weights, or all gradients, in float32."""
        return 4.0 * self.n_params

    @property
    def shard(self) -> float:
        """Bytes of one process's shard of them."""
        return self.full / self.n_processes

    @property
    def gathered_itemsize(self) -> float:
        """Bytes of a weight in passes."""
        return 2.0 if self.trainer.gathers_in == "bf16" else 4.0

    @property
    def ring(self) -> float:
        """Fraction of a tensor that a process sends when the tensor is gathered, or reduced and scattered."""
        return (self.n_processes - 1) / self.n_processes

    @property
    def offloaded(self) -> bool:
        """True if the optimizer's state is outside the GPU."""
        return self.trainer.offload != "none"


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _memory_as_rehearsed(held: np.ndarray, curve: Curve, sizes: StepSizes) -> np.ndarray:
    return held


def _memory_of_ddp(held: np.ndarray, curve: Curve, sizes: StepSizes) -> np.ndarray:
    # Buckets as large as all gradients stay. Gradients are views of them once they are reduced, which is in the last
    # backward pass of a step; those of the passes before it lie beside them.
    beside = ~curve.during("first forward", "update") & (sizes.accumulate > 1)
    held[:, _GRADIENTS] = sizes.full + np.where(beside, held[:, _GRADIENTS], 0)
    return held


def _memory_of_zero1(held: np.ndarray, curve: Curve, sizes: StepSizes) -> np.ndarray:
    # Each process sums all gradients, and stages them through one bucket.
    gradients = np.where(curve.during("first forward"), 0, held[:, _GRADIENTS]) + 4.0 * BUCKET * curve.reducing
    return _with_sharded_states(held, gradients, 1, curve, sizes)


def _memory_of_zero2(held: np.ndarray, curve: Curve, sizes: StepSizes) -> np.ndarray:
    # Gradients go through two buckets as they arrive; the shard is kept, and the sum of the shards of earlier passes.
    return _with_sharded_states(held, 2 * 4.0 * BUCKET * curve.reducing, min(sizes.accumulate, 2), curve, sizes)


def _with_sharded_states(
    held: np.ndarray, gradients: np.ndarray, n_shards: int, curve: Curve, sizes: StepSizes
) -> np.ndarray:
    """Add sharded optimizer state, ``gradients`` and ``n_shards`` shards of sums, which offloading moves away."""
    if not sizes.offloaded:
        gradients = gradients + sizes.shard * (n_shards + curve.during("update"))
    held[:, _GRADIENTS] = gradients
    # The shard of the weights that is updated is a copy.
    held[:, _OPTIMIZER] = (sizes.n_averages + (0 if sizes.offloaded else 1 + sizes.n_moments)) * sizes.shard
    return held


def _memory_of_zero3(held: np.ndarray, curve: Curve, sizes: StepSizes) -> np.ndarray:
    update, itemsize = curve.during("update"), sizes.gathered_itemsize
    # One for gradients of maps, and one for those of embeddings and norms where they are sent in another precision.
    bucket = {2.0: 2.0 + 4.0, 4.0: 4.0}[itemsize] * BUCKET
    # While a bucket is reduced its gradients are laid out by process once more.
    held[:, _GRADIENTS] = bucket + curve.reducing * itemsize * min(BUCKET, sizes.n_params)
    if not sizes.offloaded:
        held[:, _GRADIENTS] += sizes.shard + update * min(sizes.shard, 4.0 * SUB_GROUP)
    held[:, _PARAMETERS] = 0 if sizes.offloaded else sizes.shard
    held[:, _OPTIMIZER] = 0 if sizes.offloaded else (sizes.n_averages + sizes.n_moments) * sizes.shard
    held[:, _GATHERED] = ~update * itemsize * min(LIVE, sizes.n_params)
    return held


def _no_host_memory(sizes: StepSizes) -> float:
    return 0.0


def _host_memory_of_zero(sizes: StepSizes) -> float:
    """Compute the host memory of one process: weights to update, moments, gradients and their sums; for ZeRO 3 the
    weights themselves too, for ZeRO 1 and 2 a copy of the shard that is sent back.
    """
    if not sizes.offloaded:
        return 0.0
    on_drive = 1 + sizes.n_moments if sizes.trainer.offload == "nvme" else 0
    averages = sizes.n_averages if STRATEGIES[sizes.trainer.strategy].shards_weights else 0
    return (4 + sizes.n_moments + averages - on_drive) * sizes.shard


# ── bytes sent ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _sent_as_rehearsed(curve: Curve, sizes: StepSizes) -> dict[Ring, float]:
    # The last of several micro-batches is the later one of the rehearsal; all before it are like its first.
    found: dict[Ring, float] = {}
    for phase in curve.messages:
        times = {"first": max(sizes.accumulate - 1, 1), "later": int(sizes.accumulate > 1)}.get(phase.split()[0], 1)
        for ring, n_bytes in curve.messages_at(phase, sizes.trainer.micro_batch_size).items():
            found[ring] = found.get(ring, 0.0) + times * n_bytes
    return found


def _among_all(sizes: StepSizes, n_bytes: float) -> dict[Ring, float]:
    return {Ring(sizes.n_processes): n_bytes}


def _sent_by_ddp(curve: Curve, sizes: StepSizes) -> dict[Ring, float]:
    found = _among_all(sizes, 2 * sizes.ring * sizes.full)
    # A rehearsal without shards sends what context groups exchange, and nothing else.
    for ring, n_bytes in _sent_as_rehearsed(curve, sizes).items():
        found[ring] = found.get(ring, 0.0) + n_bytes
    return found


def _sent_by_zero1(curve: Curve, sizes: StepSizes) -> dict[Ring, float]:
    # Buckets are summed in all processes, of which each takes its shard; then updated weights are gathered.
    return _among_all(sizes, sizes.ring * sizes.full * (2 + 1))


def _sent_by_zero2(curve: Curve, sizes: StepSizes) -> dict[Ring, float]:
    # As ZeRO 1, but buckets are summed after every micro-batch.
    return _among_all(sizes, sizes.ring * sizes.full * (2 * sizes.accumulate + 1))


def _sent_by_zero3(curve: Curve, sizes: StepSizes) -> dict[Ring, float]:
    # Weights before the forward and before the backward pass, gradients after it.
    return _among_all(sizes, 3 * sizes.accumulate * sizes.ring * sizes.gathered_itemsize * sizes.n_params)


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class StrategyCosts:
    """Rules for a strategy's memory and messages, from a rehearsed step."""

    shard: Sharding | None = None
    """Sharding of the model for the rehearsal; None if every process holds all of it."""
    memory: Callable[[np.ndarray, Curve, StepSizes], np.ndarray] = _memory_as_rehearsed
    """(bytes held ``[operators, parts]``, the rehearsed step, sizes) → the same bytes under this strategy."""
    sent: Callable[[Curve, StepSizes], dict[Ring, float]] = _sent_as_rehearsed
    """Bytes that one process sends in a step, by the processes that it sends them among."""
    host_memory: Callable[[StepSizes], float] = _no_host_memory
    """Bytes of one process in its machine's own memory."""
    estimated: tuple[str, ...] = ()
    """Parts that follow from formulas; all others are rehearsed."""


_STATES = ("parameters", "gradients", "optimizer", "sent")

#: Costs by ``trainer.strategy``: one entry for each row of ``trainer.strategies.table.STRATEGIES``.
STRATEGY_COSTS: dict[StrategyName, StrategyCosts] = {
    "single": StrategyCosts(),
    "ddp": StrategyCosts(None, _memory_of_ddp, _sent_by_ddp, estimated=("gradients", "sent")),
    "fsdp2": StrategyCosts(fsdp2.sharder),
    "zero1": StrategyCosts(None, _memory_of_zero1, _sent_by_zero1, _host_memory_of_zero, _STATES),
    "zero2": StrategyCosts(None, _memory_of_zero2, _sent_by_zero2, _host_memory_of_zero, _STATES),
    # Both gather a block at a time, and round the same weights.
    "zero3": StrategyCosts(
        fsdp2.sharder, _memory_of_zero3, _sent_by_zero3, _host_memory_of_zero, (*_STATES, "gathered")
    ),
}
