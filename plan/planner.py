"""Needs of a run, and if it fits: memory, messages, FLOPs and time, for its config and for alternatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch

from ..errors import UsageError
from ..models.birth import empty_decoder
from ..models.init import ParameterRole, parameter_roles
from ..trainer.activation_checkpointing import CHECKPOINTING
from ..trainer.config import RunConfig, TrainerConfig
from ..trainer.numerics import fast_in_bf16
from ..trainer.processes.launched_process import LaunchedProcess
from ..trainer.strategies.lightning_setup import check_launch
from ..trainer.strategies.table import STRATEGIES, STRATEGY_FIELDS, StrategyName
from ..trainer.throughput import flops_per_token
from .cluster import Cluster
from .describe import describe
from .rehearsal import rehearse
from .strategy_costs import STRATEGY_COSTS, StepSizes
from .tracing import MANY, PARTS, PHASES, Curve

#: Positions of sequences from which suggestions divide them among processes.
_LONG = 1 << 14
#: Share of the memory for tensors that suggestions leave free: plans were up to 5 % below the memory that processes
#: took.
MARGIN = 0.05


@dataclass(frozen=True)
class Plan:
    """Needs of a config under one strategy and one kind of activation checkpointing."""

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
    """Phase of the step with the peak, one of :data:`PHASES`."""
    fits: bool
    roomy: bool
    """True if it fits and leaves :data:`MARGIN` of the memory."""
    replicas: int
    """Groups of processes that each hold the whole model (``trainer.replicas``)."""
    context_parallel: int
    """Processes that divide every sequence (``trainer.context_parallel``)."""
    host_per_node: float
    """Bytes that offloading takes of each machine's own memory."""
    sent: float
    """Bytes that one process sends in a step."""
    estimated: tuple[str, ...]
    """Parts that follow from the strategy's formulas; all others were rehearsed."""
    flops: float
    """FLOPs of a step, over all processes, as the model counts them."""
    flops_again: float
    """Additional FLOPs that activation checkpointing recomputes."""
    step_seconds: float | None
    """Seconds of computing in a step; None if no peak is known."""
    sending_seconds: float | None
    """Seconds of sending alone."""
    between_seconds: float
    """Those of them between machines."""
    whole_seconds: float | None
    """Seconds of a step: computing and :attr:`Cluster.exposed` of the sending between machines, or all sending where
    that takes longer; None if no peak is known."""

    @property
    def order(self) -> tuple[bool, float, float, float]:
        """Sort key of plans, the best first.

        First those that leave a margin of memory; then the time of a step, or FLOPs where it is not known; then bytes
        sent; then the peak.
        """
        time = self.flops + self.flops_again if self.whole_seconds is None else self.whole_seconds
        return not self.roomy, time, self.sent, self.peak


@dataclass(frozen=True)
class Budget:
    """Needs of the whole run."""

    tokens: float
    tokens_per_second: float
    days: float
    gpu_hours: float
    cost: float


def budget(plan: Plan, config: RunConfig, cluster: Cluster, tokens: float, price: float) -> Budget | None:
    """Compute time and money for ``tokens``; None if the time of a step is unknown."""
    if plan.whole_seconds is None:
        return None
    speed = config.trainer.global_batch_size * config.model.max_seq_len / plan.whole_seconds
    hours = tokens / speed / 3600
    return Budget(tokens, speed, hours / 24, hours * cluster.n_gpus, hours * cluster.n_gpus * price)


def with_strategy(trainer: TrainerConfig, strategy: StrategyName, checkpointing: str) -> TrainerConfig:
    """Return ``trainer`` under another strategy, uncompiled.

    A change of strategy keeps those of ``gather``, ``reduce``, ``accumulate`` and ``context_parallel`` that the new one
    reads; other options of strategies take their defaults.
    """
    changes: dict[str, Any] = {"strategy": strategy, "activation_checkpointing": checkpointing, "compile": "no"}
    if strategy != trainer.strategy:
        kept = {"gather", "reduce", "accumulate", "context_parallel"} & STRATEGIES[strategy].reads
        changes |= {name: default for name, default in STRATEGY_FIELDS.items() if name not in kept}
    return replace(trainer, **changes)


@dataclass
class Planner:
    """Plans of one config on one cluster. Steps are rehearsed once for all plans that need them.

    Args:
        config: the run; precision ``auto`` is decided for the cluster.
        cluster: the cluster.
        rehearsed: called after every rehearsal.
    """

    config: RunConfig
    cluster: Cluster
    rehearsed: Callable[[], object] = lambda: None
    _curves: dict[tuple[Any, ...], Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.config.trainer.precision == "auto":
            # Every GPU of the table has units for bf16.
            fast = self.cluster.device == "cuda" or fast_in_bf16(torch.device("cpu"))
            decided = replace(self.config.trainer, precision="bf16" if fast else "fp32")
            self.config = replace(self.config, trainer=decided)

    @cached_property
    def n_params(self) -> int:
        """Parameters of the model."""
        return int(describe(self.config.model)["n_params"])

    @cached_property
    def n_active(self) -> int:
        """Parameters that a token passes."""
        return int(describe(self.config.model)["n_active"])

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state, and of the average of the weights if there is one."""
        model = empty_decoder(self.config.model, "meta")
        roles, row = parameter_roles(model), self.config.optim.optimizer
        averaged = 0 if self.config.optim.ema is None else 4 * self.n_params
        return averaged + sum(
            row.state_bytes(tuple(parameter.shape), roles[name] is ParameterRole.MATRIX)
            for name, parameter in model.named_parameters()
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Return the model FLOPs of one trained token at this length, forward and backward."""
        return flops_per_token(self.config.model, self.n_params, seq_len)

    def _flops(self, checkpointing: str) -> tuple[float, float]:
        """Return the FLOPs of a step: the model's own, and those that checkpointing recomputes.

        ``full`` repeats the forward passes of blocks. ``selective`` repeats nothing that counts, since it keeps the
        outputs of matrix products and of attention.
        """
        model = self.config.model
        tokens = self.config.trainer.global_batch_size * model.max_seq_len
        own = self.flops_per_token(model.max_seq_len)
        if checkpointing != "full":
            return own * tokens, 0.0
        forward = own / 3 - 2.0 * model.vocab_size * model.d_model
        if model.norm == "none" or model.norm_placement == "pre":
            # Torch stops where nothing more is needed: nothing reads the output of a block's last map. Experts' outputs
            # are read, for the gradient of their weights.
            n_dense = sum(not model.experts.in_block(block) for block in range(model.n_layers))
            forward -= 2.0 * n_dense * model.ff * model.d_model
        return own * tokens, forward * tokens

    def _rehearsal_key(self, trainer: TrainerConfig) -> tuple[Any, ...]:
        """Return the key of a rehearsal: configs of one key share it.

        Begins with the sharding, the micro-batch, and a flag for gradients summed whole.
        """
        shard = STRATEGY_COSTS[trainer.strategy].shard
        # On CPU attention chooses its kernel by the size of the micro-batch.
        size = trainer.micro_batch_size if self.cluster.device == "cpu" else MANY
        n_shares = trainer.data_shares(self.cluster.n_gpus)
        several = trainer.global_batch_size > n_shares * trainer.micro_batch_size
        whole = several and "accumulate" in STRATEGIES[trainer.strategy].reads and trainer.accumulate == "whole"
        sharded = shard and (trainer.gathers_in, trainer.reduce, trainer.replicas)
        return shard, size, whole, trainer.activation_checkpointing, sharded, trainer.context_parallel

    def n_rehearsals(self, trainers: list[TrainerConfig]) -> int:
        """Count the rehearsals that the plans of these need together."""
        return len({self._rehearsal_key(trainer) for trainer in trainers})

    def _curve(self, trainer: TrainerConfig) -> Curve:
        key = shard, size, whole, *_ = self._rehearsal_key(trainer)
        if key not in self._curves:
            self._curves[key] = rehearse(
                replace(self.config, trainer=trainer),
                self.cluster.n_gpus,
                shard=shard,
                device=self.cluster.device,
                micro_batch_size=size,
                whole=whole,
            )
            self.rehearsed()
        return self._curves[key]

    def plan(self, trainer: TrainerConfig | None = None) -> Plan:
        """Plan the config, unchanged by default, else with ``trainer`` in place of its own.

        Raises:
            UsageError: batch, processes and strategy do not fit together.
        """
        cluster = self.cluster
        trainer = (trainer or self.config.trainer).shared_by(cluster.n_gpus)
        n, alone = cluster.n_gpus, not STRATEGIES[trainer.strategy].launched and cluster.n_gpus == 1
        # The check against this machine's own devices is for runs, not for plans.
        check_launch(replace(trainer, device="cpu"), None if alone else LaunchedProcess(0, n, 0, cluster.per_node))
        costs, sizes, curve = (
            STRATEGY_COSTS[trainer.strategy],
            StepSizes(
                trainer,
                self.n_params,
                n,
                n_moments=len(self.config.optim.optimizer.sharded_state),
                n_averages=int(self.config.optim.ema is not None),
            ),
            self._curve(trainer),
        )
        held = costs.memory(curve.at(trainer.micro_batch_size), curve, sizes)
        held[:, PARTS.index("activations")] += cluster.workspaces
        if sizes.accumulate == 1:
            held[curve.during("later forward", "later backward")] = 0
        highest = int(held.sum(axis=1).argmax())
        peak, messages = float(held[highest].sum()), costs.sent(curve, sizes)
        (flops, again) = self._flops(trainer.activation_checkpointing)
        speed = cluster.speed(trainer.precision, trainer.compile)
        computing = None if speed is None else (flops + again) / speed
        sending, between = cluster.seconds(messages), cluster.seconds_between(messages)
        whole = None if computing is None else max(computing + cluster.exposed * between, sending or 0.0)
        return Plan(
            strategy=trainer.strategy,
            activation_checkpointing=trainer.activation_checkpointing,
            micro_batch_size=trainer.micro_batch_size,
            accumulate=sizes.accumulate,
            peak=peak,
            parts=dict(zip(PARTS, map(float, held[highest]), strict=True)),
            phase=PHASES[curve.phases[highest]],
            fits=peak <= cluster.memory,
            roomy=peak <= (1 - MARGIN) * cluster.memory,
            replicas=trainer.replicas,
            context_parallel=trainer.context_parallel,
            host_per_node=costs.host_memory(sizes) * cluster.per_node,
            sent=sum(messages.values()),
            estimated=costs.estimated,
            flops=flops,
            flops_again=again,
            step_seconds=computing,
            sending_seconds=sending,
            between_seconds=between,
            whole_seconds=whole,
        )

    def alternatives(self) -> list[TrainerConfig]:
        """List the config under every strategy with every kind of activation checkpointing, its own included."""
        alone = self.cluster.n_gpus == 1
        n_nodes = self.cluster.n_gpus // self.cluster.per_node
        strategies = [name for name, facts in STRATEGIES.items() if facts.launched != alone]
        found = []
        for strategy in strategies:
            for checkpointing, size in product(CHECKPOINTING, self._context_sizes(strategy)):
                try:
                    trainer = with_strategy(self.config.trainer, strategy, checkpointing)
                    trainer = replace(trainer, context_parallel=size)
                    found.append(replace(self.config, trainer=trainer).trainer)
                except UsageError:
                    # These do not go together.
                    continue
                reads_replicas = "replicas" in STRATEGIES[strategy].reads and size == 1
                if reads_replicas and trainer.replicas == 1 and n_nodes > 1:
                    # Sharded within each machine, whose GPUs have the faster links.
                    found.append(replace(trainer, replicas=n_nodes))
        return found

    def _context_sizes(self, strategy: StrategyName) -> list[int]:
        """List the sizes of context groups to plan: of long sequences, or where the config has groups, the smallest
        four powers of two that leave a sequence for each group; else 1.
        """
        if "context_parallel" not in STRATEGIES[strategy].reads:
            return [1]
        n, length, trainer = self.cluster.n_gpus, self.config.model.max_seq_len, self.config.trainer
        if length < _LONG and trainer.context_parallel == 1:
            return [1]
        powers = [1 << i for i in range(n.bit_length()) if n % (1 << i) == 0]
        fitting = [size for size in powers if n // size <= trainer.global_batch_size]
        return [size for size in fitting if size == 1 or length % (2 * size) == 0][:4]

    def largest(self, trainer: TrainerConfig) -> Plan | None:
        """Return the plan of the largest micro-batch, a power of two, that leaves a margin; the plan of the smallest if
        none does.

        A size that divides a process's share is preferred; None if there are more processes than sequences.
        """
        plans: list[Plan] = []
        n_shares = trainer.data_shares(self.cluster.n_gpus)
        size, (per_process, left) = 1, divmod(trainer.global_batch_size, n_shares)
        while size <= per_process:
            if left or per_process % size == 0:
                plan = self.plan(replace(trainer, micro_batch_size=size))
                if plans and not plan.roomy:
                    break
                plans.append(plan)
            size *= 2
        return plans[-1] if plans else None


def best(plans: list[Plan]) -> Plan | None:
    """Return the first plan that fits, by :attr:`Plan.order`; None if none does."""
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.order, default=None)
