"""Learning rate over time, as a pure function of the step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from .config import OptimConfig
from .optimizers.optim_rows import read_row
from .optimizers.schedules import SCHEDULES


class LearningRate:
    """Share of its peak that the learning rate has at every step.

    Args:
        config: the schedule.
        max_steps: steps of the run.
        tokens_after: tokens that so many steps train on; read where the warm-up is given in tokens.
    """

    def __init__(self, config: OptimConfig, max_steps: int, tokens_after: Callable[[int], int]) -> None:
        self.config, self.max_steps, self.tokens_after = config, max_steps, tokens_after
        self.schedule = read_row(SCHEDULES, config.schedule, vars(config))
        self.warmup_steps = config.warmup_steps
        """Steps of the warm-up: the first steps that together have its tokens, where it is given in tokens."""
        if config.warmup_tokens:
            # A step has at least one token.
            self.warmup_steps = bisect_left(range(config.warmup_tokens), config.warmup_tokens, key=tokens_after)

    def share(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step`` (from 0) over the peak ``config.lr``."""
        if step >= self.warmup_steps:
            return self.schedule.share(self.warmup_steps, self.max_steps, step)
        if self.config.warmup_tokens:
            return min(1.0, self.tokens_after(step + 1) / self.config.warmup_tokens)
        return (step + 1) / self.warmup_steps
