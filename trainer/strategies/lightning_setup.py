"""Set-up of each strategy: from ``trainer.strategy`` to Lightning's strategy and the function that shards a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy

from ...errors import UsageError
from ...files import user_path
from ...models.attention.context_parallel import ContextGroup
from ...models.birth import Sharder
from ..config import TrainerConfig
from ..processes.launched_process import LaunchedProcess
from ..processes.process_group import TIMEOUT, collective_timeout, join_context_group
from .table import STRATEGIES, StrategyName


@dataclass(frozen=True)
class StrategySetup:
    """Parts of a strategy that a run needs, once its processes have joined."""

    lightning: Strategy | str
    """Strategy argument for ``lightning.Trainer``."""
    shard: Sharder | None = None
    """Function that shards the model to be trained while it is on the meta device; None where every process holds all
    of it.
    """
    shard_reference: Sharder | None = None
    """The same for models that are only measured, such as strangers' births."""
    context: ContextGroup | None = None
    """Group whose processes divide every sequence; None where each has whole ones."""


def _single(config: TrainerConfig, grad_clip: float, device: torch.device) -> StrategySetup:
    return StrategySetup("auto")


def _ddp(config: TrainerConfig, grad_clip: float, device: torch.device) -> StrategySetup:
    # Buffers are functions of the config, or reduced over ranks by their owner: none needs to be sent at every pass.
    return StrategySetup(DDPStrategy(timeout=TIMEOUT, broadcast_buffers=False, gradient_as_bucket_view=True))


def _fsdp2(config: TrainerConfig, grad_clip: float, device: torch.device) -> StrategySetup:
    from . import fsdp2

    shard = fsdp2.sharder(config, device)
    return StrategySetup(fsdp2.FSDP2Strategy(config), shard, shard)


def _zero(config: TrainerConfig, grad_clip: float, device: torch.device) -> StrategySetup:
    from . import fsdp2, zero

    zero.prepare_deepspeed(device)
    if config.offload == "nvme":
        zero.check_drive(user_path(config.offload_dir))
    strategy = zero.ZeroStrategy(config, grad_clip)
    if not STRATEGIES[config.strategy].shards_weights:
        return StrategySetup(strategy)
    # A model without an engine is sharded by torch.
    return StrategySetup(strategy, zero.sharder(config, grad_clip), fsdp2.sharder(config, device))


#: Function from (config, clip norm, device) to the run's setup, by ``trainer.strategy``.
SETUPS: dict[StrategyName, Callable[[TrainerConfig, float, torch.device], StrategySetup]] = {
    "single": _single,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "zero1": _zero,
    "zero2": _zero,
    "zero3": _zero,
}


def set_up_strategy(config: TrainerConfig, grad_clip: float, device: torch.device) -> StrategySetup:
    """Set up ``trainer.strategy`` for a run. Collective: call on every rank, after the processes have joined.

    Args:
        config: the strategy and its fields.
        grad_clip: clip norm, for engines that clip.
        device: device of this process.

    Raises:
        UsageError: DeepSpeed is not installed, or its drive cannot be written to.
    """
    setup = SETUPS[config.strategy](config, grad_clip, device)
    if config.context_parallel == 1:
        return setup
    return replace(setup, context=join_context_group(config.context_parallel, collective_timeout(config.timeout_s)))


def check_launch(config: TrainerConfig, process: LaunchedProcess | None) -> LaunchedProcess | None:
    """Return the process that joins a group; None if the strategy has one process without a group.

    Raises:
        UsageError: strategy, processes and batch do not fit together.
    """
    if not STRATEGIES[config.strategy].launched:
        if process is not None and process.world_size > 1:
            raise UsageError(
                f"trainer.strategy is {config.strategy}, but {process.world_size} processes were started: give "
                + ", ".join(name for name, facts in STRATEGIES.items() if facts.launched)
            )
        return None
    if process is None:
        raise UsageError(
            f"trainer.strategy is {config.strategy}, but no launcher started this process: start it with torchrun "
            "(docs/cluster.md), or give single"
        )
    if process.world_size % config.context_parallel:
        raise UsageError(
            f"trainer.context_parallel {config.context_parallel} does not divide {process.world_size} processes: "
            "change one of them"
        )
    config.shared_by(process.world_size)
    if process.world_size % config.replicas:
        raise UsageError(
            f"trainer.replicas {config.replicas} does not divide {process.world_size} processes: change one of them"
        )
    if config.device != "cpu" and torch.cuda.is_available() and process.local_world_size > torch.cuda.device_count():
        raise UsageError(
            f"{process.local_world_size} processes on a node, but torch sees {torch.cuda.device_count()} GPUs: start "
            "one per GPU, or give trainer.device cpu"
        )
    return process
