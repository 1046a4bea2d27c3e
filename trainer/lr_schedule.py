"""The learning rate over time, as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from .config import OptimConfig


def _cosine(config: OptimConfig, progress: float) -> float:
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def _wsd(config: OptimConfig, progress: float) -> float:
    into_decay = (progress - (1 - config.decay_ratio)) / config.decay_ratio if config.decay_ratio else 0.0
    return 1 - (1 - config.min_lr_ratio) * max(0.0, into_decay)


#: Shapes by name: (config, progress from 0 at the end of the warm-up to 1 at the last step) → share of the peak.
SCHEDULES: dict[str, Callable[[OptimConfig, float], float]] = {
    "cosine": _cosine,
    "wsd": _wsd,
    "constant": lambda config, progress: 1.0,
}


def lr_share(config: OptimConfig, max_steps: int, step: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0) over the peak ``config.lr``."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, max_steps - 1 - config.warmup_steps)
    return SCHEDULES[config.schedule](config, min(1.0, progress))
