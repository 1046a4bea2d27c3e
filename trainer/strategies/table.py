"""How a run is spread over processes: one table, from ``trainer.strategy`` to Lightning's strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy

from ...errors import UsageError
from ...models.birth import Spread
from ..config import TrainerConfig
from ..processes import TIMEOUT, Place


@dataclass(frozen=True)
class Spreading:
    """What a run needs of its strategy, once its processes have joined."""

    lightning: Strategy | str
    """What ``lightning.Trainer`` takes."""
    spread: Spread | None = None
    """Cuts the model that is trained, before it holds anything; None where every process holds all of it."""
    spread_reference: Spread | None = None
    """The same for models that are only measured, such as strangers' births."""


def _single(config: TrainerConfig, grad_clip: float, device: torch.device) -> Spreading:
    return Spreading("auto")


def _ddp(config: TrainerConfig, grad_clip: float, device: torch.device) -> Spreading:
    # Buffers are functions of the config, or reduced over ranks by their owner: none needs to be sent at every pass.
    return Spreading(DDPStrategy(timeout=TIMEOUT, broadcast_buffers=False, gradient_as_bucket_view=True))


def _fsdp2(config: TrainerConfig, grad_clip: float, device: torch.device) -> Spreading:
    from . import fsdp2

    cut = fsdp2.cutter(config, device)
    return Spreading(fsdp2.FSDP2Strategy(), cut, cut)


def _zero(config: TrainerConfig, grad_clip: float, device: torch.device) -> Spreading:
    from . import fsdp2, zero

    zero.ready(device)
    if config.offload == "nvme":
        zero.check_drive(Path(config.offload_dir))
    strategy = zero.ZeroStrategy(config, grad_clip)
    if config.strategy != "zero3":
        return Spreading(strategy)
    # What has no engine is cut by torch.
    return Spreading(strategy, zero.cutter(config, grad_clip), fsdp2.cutter(config, device))


@dataclass(frozen=True)
class Kind:
    """One way to spread a run."""

    prepare: Callable[[TrainerConfig, float, torch.device], Spreading]
    """(config, longest gradient, device) → what the run needs; all processes call, after they have joined."""
    launched: bool = True
    """Whether its processes are started by a launcher."""
    cuts_weights: bool = False
    """Whether no process holds all weights, so that what runs a whole step would see them come and go."""
    engine: bool = False
    """Whether DeepSpeed steps."""


STRATEGIES: dict[str, Kind] = {
    "single": Kind(_single, launched=False),
    "ddp": Kind(_ddp),
    "fsdp2": Kind(_fsdp2, cuts_weights=True),
    "zero1": Kind(_zero, engine=True),
    "zero2": Kind(_zero, engine=True),
    "zero3": Kind(_zero, engine=True, cuts_weights=True),
}


def placed(config: TrainerConfig, where: Place | None) -> Place | None:
    """Where this process of the run stands; None where it is the only one, outside any group.

    Raises:
        UsageError: strategy, processes and batch do not go together.
    """
    if not STRATEGIES[config.strategy].launched:
        if where is not None and where.world_size > 1:
            raise UsageError(
                f"trainer.strategy is {config.strategy}, but {where.world_size} processes were started: give "
                + ", ".join(name for name, kind in STRATEGIES.items() if kind.launched)
            )
        return None
    if where is None:
        raise UsageError(
            f"trainer.strategy is {config.strategy}, but no launcher started this process: start it with torchrun "
            "(docs/cluster.md), or give single"
        )
    if config.global_batch_size % (config.micro_batch_size * where.world_size):
        raise UsageError(
            f"trainer.global_batch_size {config.global_batch_size} is not a multiple of trainer.micro_batch_size × "
            f"processes = {config.micro_batch_size} × {where.world_size}: change one of them"
        )
    if where.world_size % config.replicas:
        raise UsageError(
            f"trainer.replicas {config.replicas} does not divide {where.world_size} processes: change one of them"
        )
    if config.device != "cpu" and torch.cuda.is_available() and where.local_world_size > torch.cuda.device_count():
        raise UsageError(
            f"{where.local_world_size} processes on a node, but torch sees {torch.cuda.device_count()} GPUs: start one "
            "per GPU, or give trainer.device cpu"
        )
    return where
