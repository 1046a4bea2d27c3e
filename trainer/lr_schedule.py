"""The learning rate over time, as a pure function of the step; and that of a run that continues another model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..measure.records import RunDir, step_of
from .config import OptimConfig, TrainerConfig
from .initial_model import config_group, find_initial_birth, find_initial_checkpoint
from .optimizers.schedules import SCHEDULES, read_row
from .saved_config import read_saved_fields


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


# ---------------------------------------------------------------- the rate of a continued run
# Default learning rate of a run that continues from another model.

#: The least that is taken, over the source's peak. A higher rate adapts faster and forgets more (arXiv 2308.04014).
_SHARE = 0.1
#: Peak where the source's is not known: that share of 3e-4, with which models from a billion parameters on are
#: pretrained (arXiv 2307.09288).
_UNKNOWN = 3e-5


@dataclass(frozen=True)
class ContinuedRate:
    """A peak learning rate, with the reason for it."""

    lr: float
    why: str


def continued_rate(init_from: str) -> ContinuedRate:
    """Choose the peak learning rate of a run that starts from the model ``init_from``.

    For a run it is the rate at that checkpoint, at least a tenth of its peak; up to the end of its warm-up, the peak.
    For a birth it is the default, and for a model of unknown training 3e-5.

    Raises:
        UsageError: a run without this checkpoint.
        RunError: a run whose config was changed.
    """
    if find_initial_birth(init_from) is not None:
        return ContinuedRate(OptimConfig.lr, "that of a birth")
    source = find_initial_checkpoint(init_from)
    if source is None:
        return ContinuedRate(
            _UNKNOWN, "a tenth of 3e-4, with which models of a billion parameters are usually pretrained"
        )
    run, step = RunDir(source.checkpoint.parent.parent), step_of(source.checkpoint)
    fields = read_saved_fields(run)
    optim = config_group(OptimConfig, fields, "optim.")
    sizes, seq_len = config_group(TrainerConfig, fields, "trainer.").batch_sizes, fields["model.max_seq_len"]
    rate = LearningRate(optim, fields["trainer.max_steps"], lambda step: sizes.before(step) * seq_len)
    if step <= rate.warmup_steps:
        return ContinuedRate(optim.lr, f"the peak of {run.path}")
    there = rate.share(step - 1)
    if there < _SHARE:
        return ContinuedRate(_SHARE * optim.lr, f"a tenth of {run.path}'s peak, {optim.lr:g}")
    return ContinuedRate(there * optim.lr, f"what {run.path} had at step {step}; its peak was {optim.lr:g}")


def with_continued_rate(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add ``optim.lr`` to fields of a run, by dotted name, if they name a model to continue from and no rate."""
    named = fields.get("init_from")
    if not named or not isinstance(named, str) or "optim.lr" in fields:
        return dict(fields)
    return {**fields, "optim.lr": continued_rate(named).lr}
