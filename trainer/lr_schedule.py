"""The learning rate over time, as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from .config import OptimConfig


def _cosine(config: OptimConfig, max_steps: int, step: int) -> float:
    progress = (step - config.warmup_steps) / max(1, max_steps - 1 - config.warmup_steps)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def _wsd(config: OptimConfig, max_steps: int, step: int) -> float:
    # A share of the run. The step after the warm-up is at the peak also where the run is too short for both.
    n_decay = min(config.decay_ratio * max_steps, max_steps - 1 - config.warmup_steps)
    left = max_steps - 1 - step
    into_decay = max(0.0, 1 - left / n_decay) if n_decay > 0 else 0.0
    return 1 - (1 - config.min_lr_ratio) * into_decay


#: Shapes after the warm-up by name: (config, steps of the run, step from 0) → share of the peak.
SCHEDULES: dict[str, Callable[[OptimConfig, int, int], float]] = {
    "cosine": _cosine,
    "wsd": _wsd,
    "constant": lambda config, max_steps, step: 1.0,
}


def lr_share(config: OptimConfig, max_steps: int, step: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0) over the peak ``config.lr``."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    return SCHEDULES[config.schedule](config, max_steps, step)
