"""Evaluation while it trains: scores at birth, every so many steps and at the end, in at most a share of the time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L

from ..measure.ranks import from_rank_zero, rank
from ..models.decoder import Decoder
from .milestones import MilestoneCallback, log_metrics


class Evaluation(MilestoneCallback):
    """Logs ``eval/NAME/SCORE`` at its milestones. A run that is being stopped is not evaluated for that.

    The first evaluation, at birth, is timed. Once steps are timed too it is known how many the run can afford: where
    they are fewer than asked for, every n-th is taken, and a line says so. What was decided goes with checkpoints.

    Args:
        every: optimizer steps between evaluations.
        evaluate: the model to its scores. Every rank calls it.
        told: what it evaluates on, in a few words.
        share: of training time, at most, or 1 for no limit; birth and the end are evaluated all the same.
        step_s: seconds of a step, None as long as they are not known.
        say: told what is evaluated, and where it is made more rarely.
    """

    def __init__(
        self,
        every: int,
        evaluate: Callable[[Decoder], dict[str, float]],
        told: str,
        share: float,
        step_s: Callable[[], float | None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(every)
        self.evaluate, self.told, self.share, self.step_s, self.say = evaluate, told, share, step_s, say
        self.last: dict[str, float] = {}
        self.nth: int | None = None
        """Of the steps that are asked for, every so manieth is evaluated; None as long as that is not decided."""

    def on_milestone(self, trainer: L.Trainer, module: Any, step: int) -> None:
        """Evaluate and log."""
        self.last = self.evaluate(module.model)
        if rank() == 0:
            log_metrics(trainer, self.last, step)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Birth; where it took."""
        super().on_train_start(trainer, pl_module)
        if self.acted_at == 0:
            self.say(f"evaluation of {self.told}: {self.seconds:.2g} s at step 0")

    @property
    def figures(self) -> list[str]:
        """The first scores in a few words, for a line."""
        told = [name for name in self.last if not name.endswith(("_stderr", "/chance"))]
        return [f"{name.removeprefix('eval/').replace('/', ' ')} {self.last[name]:.3f}" for name in told[:3]]

    def on_step_end(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Evaluate where it is due."""
        last = step == trainer.max_steps
        if step % self.every and not last:
            return
        if self.nth is None and not last:
            self._decide(trainer.max_steps)
        if last or step % (self.every * (self.nth or 1)) == 0:
            self.act(trainer, module, step)

    def _decide(self, max_steps: int) -> None:
        """How often it can be, from what the last one took; rank 0 decides for all. A run that goes on from before a
        first evaluation has nothing to go by yet."""
        if self.acted_at is None or (step_s := from_rank_zero(self.step_s)) is None:
            return
        seconds = from_rank_zero(lambda: self.seconds)
        self.nth = thinned(max_steps, self.every, seconds / step_s, self.share)
        if self.nth > 1:
            steps = self.every * self.nth
            rarely = f"every {steps} steps, not {self.every}" if steps < max_steps else "at step 0 and at the end alone"
            part = (2 + max(0, math.ceil(max_steps / steps) - 1)) * seconds / (max_steps * step_s)
            self.say(
                f"eval.share is {self.share:.3g}, and one evaluation takes as long as {seconds / step_s:.3g} steps: "
                f"the run is evaluated {rarely}, {part:.2g} of its training time"
            )

    def state_dict(self) -> dict[str, Any]:
        """How often it is, so that a run that goes on is evaluated at the same steps."""
        return {"every": self.every, "share": self.share, "nth": self.nth}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on as decided, unless another cadence is asked for now."""
        if (state_dict["every"], state_dict["share"]) == (self.every, self.share):
            self.nth = state_dict["nth"]


def thinned(max_steps: int, every: int, cost: float, share: float) -> int:
    """n, where every n-th of the evaluations that are asked for is within its share: birth, the end, and those between.

    Args:
        max_steps: of the run.
        every: optimizer steps between evaluations.
        cost: of one evaluation, in steps.
        share: of training time; 1 for all that is asked for.
    """
    if share >= 1:
        return 1
    asked, intervals = max(1, math.ceil(max_steps / every)), int(share * max_steps / cost) - 1
    return asked if intervals < 1 else max(1, math.ceil(asked / intervals))
