"""Plans as tables for people, and what a run takes beside its steps: checkpoints, their copies, snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from ..measure.passes import sequences_of_pass
from ..report.table import Cell, Column, Table
from ..report.terminal import say
from ..trainer.config import RunConfig, TrainerConfig
from ..trainer.gpu_specs import GPUS
from ..trainer.strategies.table import STRATEGIES
from .cluster import Cluster
from .planner import MARGIN, Budget, Plan, Planner, best

# ---------------------------------------------------------------- checkpoints and snapshots

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
    strategy, moments = STRATEGIES[trainer.strategy], float(planner.state_bytes)
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


# ---------------------------------------------------------------- plans as tables for people

#: Parts of memory, and of a step, in the words of a person.
_WORDS = {
    "first forward": "the first forward pass",
    "first backward": "the first backward pass",
    "later forward": "a later forward pass",
    "later backward": "a later backward pass",
    "update": "the optimizer's update",
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered weights",
    "activations": "activations",
}


def _si(number: float, unit: str = "") -> str:
    """Write four digits with a decimal prefix."""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(number) >= 10**power:
            return f"{number / 10**power:.4g} {prefix}{unit}"
    return f"{number:.4g} {unit}".rstrip()


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:,.2f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f} s"


def print_memory(plan: Plan, cluster: Cluster, console: Console) -> None:
    """Print the memory of one process at the peak, by part, and if it fits."""
    batches = "micro-batches" if plan.accumulate > 1 else "micro-batch"
    rows: list[list[object]] = [
        [_WORDS[part], n_bytes / 1e9, "estimated" if part in plan.estimated else ""]
        for part, n_bytes in plan.parts.items()
    ]
    peak = [Cell("peak", look="bold"), Cell(plan.peak / 1e9, look="bold"), f"in {_WORDS[plan.phase]}"]
    columns = [Column("one process", "text"), Column("GB", format=".2f"), Column("", "text")]
    say(
        console,
        f"{plan.strategy}{f' ÷ {plan.context_parallel}' if plan.context_parallel > 1 else ''}, micro-batch "
        f"{plan.micro_batch_size}, {plan.accumulate} {batches} a step, activation "
        f"checkpointing {plan.activation_checkpointing}",
    )
    Table(columns, [*rows, peak]).print(console, ruled=False)
    verdict = "fits" if plan.fits else "does not fit"
    say(console, f"{verdict}: {_gb(cluster.memory)} GB are for tensors", style="bold")
    if plan.host_per_node:
        say(console, f"offloaded, on each machine  {_gb(plan.host_per_node)} GB (estimated)")


def print_work(
    plan: Plan, config: RunConfig, cluster: Cluster, budget: Budget | None, price: float, console: Console
) -> None:
    """Print messages, FLOPs and time of a step, and of the whole run if the time of a step is known."""
    again = f", {_si(plan.flops_again, 'FLOP')} again for checkpointing" if plan.flops_again else ""
    rate = ""
    if plan.sending_seconds:
        rate = f": {_seconds(plan.sending_seconds)} at {_si(plan.sent / plan.sending_seconds, 'B/s')}"
    estimated = " (estimated)" if "sent" in plan.estimated else ""
    lines = [
        f"a process sends  {_si(plan.sent, 'B')} a step{estimated}{rate}",
        f"a step computes  {_si(plan.flops, 'FLOP')}{again}",
    ]
    if budget is None:
        why = "on CPU" if cluster.gpu == "cpu" else f"of {config.trainer.precision}"
        lines.append(f"a step takes     unknown: no peak {why} is known here")
    else:
        peak, share = _si(GPUS[cluster.gpu].bf16, "FLOP/s"), cluster.share_of_peak(config.trainer.compile)
        between = ""
        if plan.between_seconds:
            between = f", with {100 * cluster.exposed:g} % of {_seconds(plan.between_seconds)} between machines"
        of_one = _si(budget.tokens_per_second / cluster.n_gpus)
        lines += [
            f"a step takes     {_seconds(plan.whole_seconds)}: computing {_seconds(plan.step_seconds)} at "
            f"{100 * share:g} % of {peak} each{between}; "
            f"{_seconds((plan.step_seconds or 0) + (plan.sending_seconds or 0))} if no sending is hidden",
            f"all of it        {_si(budget.tokens)} tokens at {_si(budget.tokens_per_second)} a second "
            f"({of_one} a GPU): "
            f"{budget.days:,.1f} days, {budget.gpu_hours:,.0f} GPU hours, {budget.cost:,.0f} at {price:g} an hour",
        ]
    for line in lines:
        say(console, line)


def print_upkeep(upkeep: Upkeep, console: Console) -> None:
    """Print the needs of checkpoints and snapshots."""
    copied = "" if upkeep.copying_seconds is None else f": training stands still for {_seconds(upkeep.copying_seconds)}"
    taking = "" if upkeep.snapshot_seconds is None else f", {_seconds(upkeep.snapshot_seconds)}"
    part, on_machine = _gb(upkeep.checkpoint_part), _gb(upkeep.host_per_node)
    lines = [
        f"a checkpoint     {_gb(upkeep.checkpoint)} GB on the disk, {_seconds(upkeep.writing_seconds)} to write",
        f"host copies      {part} GB of one process{copied}; {on_machine} GB of one machine",
    ]
    if upkeep.snapshot_memory is not None:
        lines.append(f"a snapshot       {_gb(upkeep.snapshot_memory)} GB of one process{taking}, between steps")
    for line in lines:
        say(console, f"{line} (estimated)")


def print_alternatives(plans: Sequence[Plan], console: Console) -> None:
    """Print a row per plan, the best one marked."""
    chosen = best(list(plans))
    rows = []
    for plan in plans:
        mark = "best" if plan is chosen else "" if plan.roomy else "barely fits" if plan.fits else "does not fit"
        look = "bold" if plan is chosen else "" if plan.fits else "dim"
        cells = [
            plan.strategy
            + (f" × {plan.replicas}" if plan.replicas > 1 else "")
            + (f" ÷ {plan.context_parallel}" if plan.context_parallel > 1 else ""),
            plan.activation_checkpointing,
            plan.micro_batch_size,
            plan.peak / 1e9,
            _seconds(plan.step_seconds),
            _seconds(plan.sending_seconds),
            _seconds(plan.whole_seconds),
            mark,
        ]
        rows.append([Cell(cell, look=look) for cell in cells])
    say(
        console,
        f"\nAlternatives, each with the largest micro-batch that leaves {100 * MARGIN:g} % of that memory free:",
    )
    columns = [Column("strategy", "name"), Column("checkpointing", "name"), Column("micro-batch")]
    columns += [Column("peak GB", format=".2f"), Column("computing"), Column("sending"), Column("a step")]
    Table([*columns, Column("", "text")], rows).print(console)
    if any(plan.replicas > 1 for plan in plans):
        say(console, "strategy × N: trainer.replicas N, groups that each hold the whole model")
    if any(plan.context_parallel > 1 for plan in plans):
        say(console, "strategy ÷ C: trainer.context_parallel C, processes that divide every sequence")
    if chosen is None:
        say(console, "none fits: more GPUs, larger ones, or offloading (docs/cluster.md)")
