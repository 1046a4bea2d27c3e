"""Whether a run fits and what it takes: memory, messages, FLOPs and time, as its config says and in other ways."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from ..errors import UsageError
from ..trainer.config import RunConfig, TrainerConfig
from ..trainer.processes import Place
from ..trainer.strategies import fsdp2
from ..trainer.strategies.lightning_setup import placed
from ..trainer.strategies.table import STRATEGIES, StrategyName
from ..trainer.throughput import GPUS, flops_per_token
from .describe import describe
from .ledger import MANY, PARTS, PHASES, Curve
from .rehearsal import rehearse
from .strategy_costs import WAYS, Share

#: Bytes per second that a GPU sends to other machines: one port of 400 Gbit/s each.
NETWORK = 50e9

#: Kinds of activation checkpointing that are tried.
CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Cluster:
    """What a run is planned for.

    Raises:
        UsageError: a value that makes no sense.
    """

    n_gpus: int
    gpu: str
    """A name of :data:`GPUS`; or ``cpu``, processes on this machine, whose times are not known."""
    gpus_per_node: int = 8
    usable: float = 0.92
    """Share of a GPU's memory that is for tensors; the rest is CUDA's, NCCL's, or lost between tensors."""
    mfu: float = 0.4
    """Share of the GPU's peak that the operations of a step run at."""
    bandwidth: float | None = None
    """Bytes per second that a GPU sends; by default its link within one machine, and :data:`NETWORK` beyond."""

    def __post_init__(self) -> None:
        if self.gpu != "cpu" and self.gpu not in GPUS:
            raise UsageError(f"--gpu {self.gpu}: give cpu or one of {', '.join(GPUS)}")
        for name, value in (("n_gpus", self.n_gpus), ("gpus_per_node", self.gpus_per_node)):
            if value < 1:
                raise UsageError(f"--{name} {value}: give at least 1")
        if self.n_gpus % self.per_node:
            raise UsageError(f"--n_gpus {self.n_gpus} is not a multiple of --gpus_per_node {self.per_node}")
        for name, share in (("usable", self.usable), ("mfu", self.mfu)):
            if not 0 < share <= 1:
                raise UsageError(f"--{name} {share}: give a share above 0 and at most 1")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise UsageError(f"--bandwidth {self.bandwidth / 1e9:g}: give a positive number")

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """What kernels are chosen for."""
        return "cpu" if self.gpu == "cpu" else "cuda"

    @property
    def per_node(self) -> int:
        """Processes on one machine."""
        return min(self.gpus_per_node, self.n_gpus)

    @property
    def memory(self) -> float:
        """Bytes that the tensors of one process may take."""
        if self.gpu == "cpu":
            return self.usable * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / self.per_node
        return self.usable * GPUS[self.gpu].memory

    @property
    def sends(self) -> float | None:
        """Bytes per second that one process sends; None where that is not known."""
        if self.bandwidth is not None or self.gpu == "cpu":
            return self.bandwidth
        return GPUS[self.gpu].link if self.n_gpus <= self.gpus_per_node else NETWORK

    def speed(self, precision: str) -> float | None:
        """FLOP/s of all GPUs at the stated share of their peak; None where no peak is known."""
        if self.gpu == "cpu" or precision != "bf16":
            return None
        return GPUS[self.gpu].bf16 * self.mfu * self.n_gpus


@dataclass(frozen=True)
class Plan:
    """What one way of training a config takes."""

    strategy: str
    activation_checkpointing: str
    micro_batch_size: int
    accumulate: int
    """Micro-batches of a process in a step."""
    peak: float
    """Bytes that the tensors of one process take at most."""
    parts: dict[str, float]
    """The same by part, at that moment."""
    phase: str
    """When in the step that is, one of :data:`PHASES`."""
    fits: bool
    host_per_node: float
    """Bytes that offloading takes of each machine's own memory."""
    sent: float
    """Bytes that one process sends in a step."""
    reckoned: tuple[str, ...]
    """What follows from the strategy's rules; all else was rehearsed."""
    flops: float
    """Of a step, over all processes, as the model counts them."""
    flops_again: float
    """What activation checkpointing computes again, on top."""
    step_seconds: float | None
    """Of computing; None where no peak is known."""
    sending_seconds: float | None
    """What sending takes by itself. How much of it is hidden behind the computing is not known here."""

    @property
    def order(self) -> tuple[float, float, float]:
        """The smaller, the better: the longer of computing and sending, as if the other were hidden; what is computed
        where times are not known; then what is sent, then the peak."""
        work = self.flops + self.flops_again
        time = work if self.step_seconds is None else max(self.step_seconds, self.sending_seconds or 0.0)
        return time, self.sent, self.peak


def way(trainer: TrainerConfig, strategy: StrategyName, checkpointing: str) -> TrainerConfig:
    """Another way of training; options that its strategy does not read go back to their defaults."""
    changes: dict[str, Any] = {"strategy": strategy, "activation_checkpointing": checkpointing, "compile": "no"}
    if strategy != trainer.strategy:
        gather = trainer.gather if STRATEGIES[strategy].shards_weights else "fp32"
        changes |= {"replicas": 1, "gather": gather, "offload": "none", "offload_dir": ""}
    return replace(trainer, **changes)


@dataclass
class Planner:
    """Plans of one config on one cluster. Steps are rehearsed once for all plans that need them.

    Args:
        config: the run.
        cluster: where.
        rehearsed: is called after every rehearsal.
    """

    config: RunConfig
    cluster: Cluster
    rehearsed: Callable[[], object] = lambda: None
    _curves: dict[tuple[Any, ...], Curve] = field(default_factory=dict)

    @cached_property
    def n_params(self) -> int:
        """Parameters of the model."""
        return int(describe(self.config.model)["n_params"])

    def _flops(self, checkpointing: str) -> tuple[float, float]:
        """FLOPs of a step: the model's own, and what checkpointing computes again: of ``full``, the forward passes of
        blocks; of ``selective`` nothing that counts, since it keeps what matrix products and attention give."""
        model = self.config.model
        tokens = self.config.trainer.global_batch_size * model.max_seq_len
        own = flops_per_token(model, self.n_params, model.max_seq_len)
        if checkpointing != "full":
            return own * tokens, 0.0
        forward = own / 3 - 2.0 * model.vocab_size * model.d_model
        if model.norm == "none" or model.norm_placement == "pre":
            # Torch stops where nothing more is needed: nothing reads what a block's last map gave.
            forward -= 2.0 * model.n_layers * model.ff * model.d_model
        return own * tokens, forward * tokens

    def _needed(self, trainer: TrainerConfig) -> tuple[Any, ...]:
        """What tells the rehearsals of ways apart."""
        cut = WAYS[trainer.strategy].cut
        # On CPU attention chooses its kernel by the size of the micro-batch.
        size = trainer.micro_batch_size if self.cluster.device == "cpu" else MANY
        if cut and trainer.gather == "fp32":
            cut = fsdp2.sharder  # all cut alike then
        return cut, size, trainer.activation_checkpointing, cut and (trainer.gather, trainer.replicas)

    def n_rehearsals(self, ways: list[TrainerConfig]) -> int:
        """How many rehearsals these ways need between them."""
        return len({self._needed(trainer) for trainer in ways})

    def _curve(self, trainer: TrainerConfig) -> Curve:
        needed = cut, size, *_ = self._needed(trainer)
        if needed not in self._curves:
            self._curves[needed] = rehearse(
                replace(self.config, trainer=trainer),
                self.cluster.n_gpus,
                cut=cut,
                device=self.cluster.device,
                micro_batch_size=size,
            )
            self.rehearsed()
        return self._curves[needed]

    def plan(self, trainer: TrainerConfig | None = None) -> Plan:
        """What the config takes, or another way of training it.

        Raises:
            UsageError: batch, processes and strategy do not go together.
        """
        trainer, cluster = trainer or self.config.trainer, self.cluster
        n, alone = cluster.n_gpus, not STRATEGIES[trainer.strategy].launched and cluster.n_gpus == 1
        # The devices of this machine are not asked for.
        placed(replace(trainer, device="cpu"), None if alone else Place(0, n, 0, cluster.per_node))
        rules, share, curve = WAYS[trainer.strategy], Share(trainer, self.n_params, n), self._curve(trainer)
        held = rules.held(curve.at(trainer.micro_batch_size), curve, share)
        if share.accumulates == 1:
            held[curve.during("later forward", "later backward")] = 0
        highest = int(held.sum(axis=1).argmax())
        peak, sent = float(held[highest].sum()), rules.sent(curve, share)
        (flops, again), speed = self._flops(trainer.activation_checkpointing), cluster.speed(trainer.precision)
        return Plan(
            strategy=trainer.strategy,
            activation_checkpointing=trainer.activation_checkpointing,
            micro_batch_size=trainer.micro_batch_size,
            accumulate=share.accumulates,
            peak=peak,
            parts=dict(zip(PARTS, map(float, held[highest]), strict=True)),
            phase=PHASES[curve.phases[highest]],
            fits=peak <= cluster.memory,
            host_per_node=rules.host(share) * cluster.per_node,
            sent=sent,
            reckoned=rules.reckoned,
            flops=flops,
            flops_again=again,
            step_seconds=None if speed is None else (flops + again) / speed,
            sending_seconds=None if cluster.sends is None else sent / cluster.sends,
        )

    def ways(self) -> list[TrainerConfig]:
        """Other ways to train the config, and its own: strategies with kinds of checkpointing."""
        alone = self.cluster.n_gpus == 1
        strategies = [name for name, facts in STRATEGIES.items() if facts.launched != alone]
        found = []
        for strategy in strategies:
            for checkpointing in CHECKPOINTING:
                try:
                    trainer = way(self.config.trainer, strategy, checkpointing)
                    found.append(replace(self.config, trainer=trainer).trainer)
                except UsageError:
                    # These do not go together.
                    continue
        return found

    def largest(self, trainer: TrainerConfig) -> Plan | None:
        """The plan of the largest micro-batch, a power of two, that fits; of the smallest if none does.

        None if no micro-batch divides the global batch.
        """
        plans: list[Plan] = []
        size, per_process = 1, trainer.global_batch_size // self.cluster.n_gpus
        while size <= per_process:
            if trainer.global_batch_size % (size * self.cluster.n_gpus) == 0:
                plan = self.plan(replace(trainer, micro_batch_size=size))
                if plans and not plan.fits:
                    break
                plans.append(plan)
            size *= 2
        return plans[-1] if plans else None


def best(plans: list[Plan]) -> Plan | None:
    """The first of those that fit, by :attr:`Plan.order`; None if none does."""
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.order, default=None)
