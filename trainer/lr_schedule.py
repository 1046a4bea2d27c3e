"""The learning rate over time, as a pure function of the step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

from .config import OptimConfig


def _cosine(config: OptimConfig, warmup: int, max_steps: int, step: int) -> float:
    progress = (step - warmup) / max(1, max_steps - 1 - warmup)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def _wsd(config: OptimConfig, warmup: int, max_steps: int, step: int) -> float:
    # A share of the run. The step after the warm-up is at the peak also where the run is too short for both.
    n_decay = min(config.decay_ratio * max_steps, max_steps - 1 - warmup)
    left = max_steps - 1 - step
    into_decay = max(0.0, 1 - left / n_decay) if n_decay > 0 else 0.0
    return 1 - (1 - config.min_lr_ratio) * into_decay


#: Shapes after the warm-up by name: (config, steps of the warm-up, steps of the run, step from 0) → share of the peak.
SCHEDULES: dict[str, Callable[[OptimConfig, int, int, int], float]] = {
    "cosine": _cosine,
    "wsd": _wsd,
    "constant": lambda config, warmup, max_steps, step: 1.0,
}


class LearningRate:
    """Share of its peak that the learning rate has at every step.

    Args:
        config: the schedule.
        max_steps: steps of the run.
        tokens_after: tokens that so many steps train on; read where the warm-up is given in tokens.
    """

    def __init__(self, config: OptimConfig, max_steps: int, tokens_after: Callable[[int], int]) -> None:
        self.config, self.max_steps, self.tokens_after = config, max_steps, tokens_after
        self.warmup_steps = config.warmup_steps
        """Steps of the warm-up: the first steps that together have its tokens, where it is given in tokens."""
        if config.warmup_tokens:
            # A step has at least one token.
            self.warmup_steps = bisect_left(range(config.warmup_tokens), config.warmup_tokens, key=tokens_after)

    def share(self, step: int) -> float:
        """Learning rate of optimizer step ``step`` (from 0) over the peak ``config.lr``."""
        if step >= self.warmup_steps:
            return SCHEDULES[self.config.schedule](self.config, self.warmup_steps, self.max_steps, step)
        if self.config.warmup_tokens:
            return min(1.0, self.tokens_after(step + 1) / self.config.warmup_tokens)
        return (step + 1) / self.warmup_steps
