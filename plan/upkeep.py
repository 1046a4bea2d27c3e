"""Needs of a run beside its steps: its checkpoints, their copies in the machines' own memory, its snapshots."""

from __future__ import annotations

from dataclasses import dataclass

from ..measure.passes import sequences_of_pass
from ..trainer.config import RunConfig, TrainerConfig
from ..trainer.strategies.table import STRATEGIES
from .cluster import Cluster
from .planner import Planner

#: Bytes per second from a GPU to its machine's memory: about the speed of PCIe 4.0 × 16 with pinned memory (its peak is
#: 32e9).
COPY = 25e9
#: A snapshot over the forward pass of its probe: benchmarks/results/snapshot_cost.md, at 134M parameters.
SNAPSHOT = 1.16


@dataclass(frozen=True)
class Upkeep:
    """Sizes and times at a milestone of a run; all follow from formulas."""

    checkpoint: float
    """Bytes of a checkpoint on the disk: weights and the optimizer's state in float32."""
    checkpoint_part: float
    """Bytes of the largest part that one process writes."""
    copying_seconds: float | None
    """Seconds that training stands still while that part is copied; None without a GPU. It is written beside
    training.
    """
    writing_seconds: float
    """Seconds of writing on the machine that writes most."""
    host_per_node: float
    """Bytes of the copies in that machine's memory, kept from one checkpoint to the next."""
    snapshot_memory: float | None
    """Bytes of one process beside those that training holds between steps: a stranger's weights, and the logits and the
    residual streams of a batch of the probe. The step's own activations are not in memory at the same time. None where
    the run takes no snapshots.
    """
    snapshot_seconds: float | None
    """Seconds of one snapshot at a checkpoint, over all its probes; None if no speed is known, or if the run takes no
    snapshots. At birth, strangers too are measured.
    """


def upkeep(planner: Planner, trainer: TrainerConfig, drive: float) -> Upkeep:
    """Estimate the needs of checkpoints and snapshots.

    Args:
        planner: planner of the run.
        trainer: the trainer's settings, with the strategy.
        drive: bytes per second that one machine writes.
    """
    config, cluster = planner.config, planner.cluster
    n, whole = cluster.n_gpus, 4.0 * planner.n_params
    strategy, moments = STRATEGIES[trainer.strategy], 4.0 * planner.state_elements
    # The first of several processes that hold the same data writes it.
    in_shards = n // trainer.replicas
    weights_part = whole / in_shards if strategy.shards_weights else whole
    moments_part = moments / in_shards if strategy.shards_optimizer else moments
    part = weights_part + moments_part
    # The first machine has the process that writes unsharded parts, and as many others as write shards.
    writers = min(cluster.per_node, in_shards)
    on_machine = sum(
        bytes_part * (writers if sharded else 1)
        for bytes_part, sharded in ((weights_part, strategy.shards_weights), (moments_part, strategy.shards_optimizer))
    )
    return Upkeep(
        checkpoint=whole + moments,
        checkpoint_part=part,
        copying_seconds=None if cluster.gpu == "cpu" else part / COPY,
        writing_seconds=on_machine / drive,
        host_per_node=on_machine,
        snapshot_memory=weights_part + _of_a_batch(config, cluster) if config.snapshot.enabled else None,
        snapshot_seconds=_snapshot_seconds(planner, config, cluster, trainer) if config.snapshot.enabled else None,
    )


def _of_a_batch(config: RunConfig, cluster: Cluster) -> float:
    model, snapshot = config.model, config.snapshot
    at_once = sequences_of_pass(snapshot.batch_size, snapshot.seq_len, model.ff, on_gpu=cluster.gpu != "cpu")
    sequences = min(at_once, -(-snapshot.n_sequences // cluster.n_gpus))
    # Logits of the last position alone, and their softmax; the two streams of a block, before and after it.
    return 4.0 * sequences * (2 * model.vocab_size + 2 * snapshot.seq_len * model.d_model)


def _snapshot_seconds(planner: Planner, config: RunConfig, cluster: Cluster, trainer: TrainerConfig) -> float | None:
    # Snapshots run uncompiled.
    speed, snapshot = cluster.speed(trainer.precision, "no"), config.snapshot
    if speed is None:
        return None
    tokens = sum(snapshot.sequences(reads_text=config.data.reads_text).values()) * snapshot.seq_len
    return SNAPSHOT * tokens * planner.flops_per_token(snapshot.seq_len) / 3 / speed
