"""Evaluation while a run trains: scores at birth, every so many steps and at the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L

from ..measure.ranks import from_rank_zero, rank
from ..models.decoder import Decoder
from .milestones import MilestoneCallback, log_metrics


class Evaluation(MilestoneCallback):
    """Callback that logs ``eval/NAME/SCORE`` at its milestones. A stop of the run is no reason to evaluate it.

    The first evaluation, at birth, is timed. Once steps are timed too, the affordable number is computed: if it is
    below the number asked for, only every n-th is taken, and a line says so. Checkpoints keep the decision, and the
    time: a run that is extended decides anew.

    Args:
        every: optimizer steps between evaluations.
        evaluate: function from the model to its scores. Collective.
        title: name of the evaluation in a few words.
        share: largest share of training time, 1 for no limit; birth and the end are evaluated in any case.
        step_s: function that returns the seconds of a step, None while unknown.
        say: called with lines about the evaluation, and about a lower frequency.
    """

    def __init__(
        self,
        every: int,
        evaluate: Callable[[Decoder], dict[str, float]],
        title: str,
        share: float,
        step_s: Callable[[], float | None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(every)
        self.evaluate, self.title, self.share, self.step_s, self.say = evaluate, title, share, step_s, say
        self.last: dict[str, float] = {}
        self.nth: int | None = None
        """Interval of the evaluations taken, among those asked for; None until decided."""
        self.decided_for: int | None = None
        """Steps of the run that the interval was decided for."""

    def on_milestone(self, trainer: L.Trainer, module: Any, step: int) -> None:
        """Evaluate and log."""
        self.last = self.evaluate(module.model)
        if rank() == 0:
            log_metrics(trainer, self.last, step)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate at birth, and report the time."""
        super().on_train_start(trainer, pl_module)
        if self.acted_at == 0:
            self.say(f"evaluation of {self.title}: {self.seconds:.2g} s at step 0")

    @property
    def figures(self) -> list[str]:
        """The first scores in a few words, for a line."""
        scores = [name for name in self.last if not name.endswith(("_stderr", "/chance"))]
        return [f"{name.removeprefix('eval/').replace('/', ' ')} {self.last[name]:.3f}" for name in scores[:3]]

    def on_step_end(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Evaluate if it is due."""
        last = step == trainer.max_steps
        if step % self.every and not last:
            return
        if self.decided_for != trainer.max_steps and not last:
            self._decide(trainer.max_steps)
        if last or step % (self.every * (self.nth or 1)) == 0:
            self.act(trainer, module, step)

    def _decide(self, max_steps: int) -> None:
        """Decide the interval from the time of the last evaluation; rank 0 decides for all. A run resumed from before
        its first evaluation has no data for this yet.
        """
        self.nth = None
        if not (seconds := from_rank_zero(lambda: self.seconds)) or (step_s := from_rank_zero(self.step_s)) is None:
            return
        self.nth, self.decided_for = thinned(max_steps, self.every, seconds / step_s, self.share), max_steps
        if self.nth > 1:
            steps = self.every * self.nth
            rarely = f"every {steps} steps, not {self.every}" if steps < max_steps else "at step 0 and at the end alone"
            part = (2 + max(0, math.ceil(max_steps / steps) - 1)) * seconds / (max_steps * step_s)
            self.say(
                f"eval.share is {self.share:.3g}, and one evaluation takes as long as {seconds / step_s:.3g} steps: "
                f"the run is evaluated {rarely}, {part:.2g} of its training time"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the interval, so that a resumed run is evaluated at the same steps, and the time of an evaluation."""
        decided = {"nth": self.nth, "decided_for": self.decided_for}
        return {"every": self.every, "share": self.share, "seconds": self.seconds, **decided}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the time, and the interval unless another cadence is asked for now."""
        # Earlier versions kept no time: such a run decides once it is evaluated.
        self.seconds = state_dict.get("seconds", 0.0)
        if (state_dict["every"], state_dict["share"]) == (self.every, self.share):
            self.nth, self.decided_for = state_dict["nth"], state_dict.get("decided_for")


def thinned(max_steps: int, every: int, cost: float, share: float) -> int:
    """Return the smallest n such that every n-th of the evaluations asked for fits the share: birth, the end, and those
    between.

    Args:
        max_steps: steps of the run.
        every: optimizer steps between evaluations.
        cost: cost of one evaluation, in steps.
        share: share of training time; 1 for all that is asked for.
    """
    if share >= 1:
        return 1
    asked, intervals = max(1, math.ceil(max_steps / every)), int(share * max_steps / cost) - 1
    return asked if intervals < 1 else max(1, math.ceil(asked / intervals))
