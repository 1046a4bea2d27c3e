"""How a run is spread over processes: one table, from ``trainer.strategy`` to Lightning's strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy

from ..errors import UsageError
from .config import TrainerConfig
from .processes import TIMEOUT, Place


def _ddp() -> Strategy:
    # Buffers are functions of the config, or reduced over ranks by their owner: none needs to be sent at every pass.
    return DDPStrategy(timeout=TIMEOUT, broadcast_buffers=False, gradient_as_bucket_view=True)


@dataclass(frozen=True)
class Kind:
    """One way to spread a run."""

    lightning: Callable[[], Strategy | str]
    """Makes what ``lightning.Trainer`` takes."""
    launched: bool
    """Whether its processes are started by a launcher."""


STRATEGIES: dict[str, Kind] = {
    "single": Kind(lambda: "auto", launched=False),
    "ddp": Kind(_ddp, launched=True),
}


def placed(config: TrainerConfig, where: Place | None) -> Place | None:
    """Where this process of the run stands; None where it is the only one, outside any group.

    Raises:
        UsageError: strategy, processes and batch do not go together.
    """
    if not STRATEGIES[config.strategy].launched:
        if where is not None and where.world_size > 1:
            raise UsageError(
                f"trainer.strategy is {config.strategy}, but {where.world_size} processes were started: give ddp"
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
    if config.device != "cpu" and torch.cuda.is_available() and where.local_world_size > torch.cuda.device_count():
        raise UsageError(
            f"{where.local_world_size} processes on a node, but torch sees {torch.cuda.device_count()} GPUs: start one "
            "per GPU, or give trainer.device cpu"
        )
    return where
