"""Progress of a run for a person: a bar on a terminal, lines now and then elsewhere, one at every milestone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

from ..findings.formatting import format_value
from ..measure.records import Snapshot
from ..metrics.quantities import LOGGED, MEASURED, is_shown, over_training
from ..metrics.quantity import Quantity
from ..time_left import Pace, duration
from .evaluation import Evaluation
from .milestones import MilestoneCallback, is_due, never
from .snapshot import BiasSnapshot
from .training import TrainingLog, Validation


def _named(quantity: Quantity, value: float, label: str = "") -> str:
    return f"{label or quantity.label} {format_value(value, quantity.format)}"


def _figures(snapshot: Snapshot) -> list[str]:
    """Write the scalars that the table of snapshots shows on a terminal; on text, where that has a column too."""
    found, text = [], snapshot.summary.get("bias_text", {})
    for quantity, shown in over_training(MEASURED.values()):
        if not is_shown(quantity.name, snapshot.bias):
            continue
        if shown.text_heading and quantity.name in text:
            found.append(_named(quantity, text[quantity.name], shown.text_heading))
        elif quantity.name in snapshot.bias and not shown.page_only:
            found.append(_named(quantity, snapshot.bias[quantity.name]))
    return found


class RunProgress(MilestoneCallback):
    """The last callback: a bar on a terminal, a line every half minute elsewhere, and one per milestone anywhere.

    Args:
        every: optimizer steps between milestones.
        console: the console to print to.
        training: whose rates are shown.
        validation: whose loss is shown.
        snapshot: whose figures are shown, if any is taken.
        evaluation: whose scores are shown where it acts, if there is one.
        more: asks for further steps.
    """

    def __init__(
        self,
        every: int,
        console: Console,
        training: TrainingLog,
        validation: Validation,
        snapshot: BiasSnapshot | None,
        evaluation: Evaluation | None = None,
        more: Callable[[int], bool] = never,
    ) -> None:
        super().__init__(every, more=more)
        self.console, self.training, self.validation, self.snapshot = console, training, validation, snapshot
        self.evaluation = evaluation
        self.bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            Remaining(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task: TaskID | None = None
        self.pace: Pace | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the bar."""
        self.bar.start()
        self.task = self.bar.add_task("", total=trainer.max_steps, completed=trainer.global_step, figures="")
        super().on_train_start(trainer, pl_module)

    def on_step_end(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Move the bar."""
        assert self.task is not None
        last = self.training.last
        figures = f"loss {last['train/loss']:.3f}  {last['train/tokens_per_s']:,.0f} tokens/s" if last else ""
        self.bar.update(self.task, completed=step, figures=figures)
        if self.pace is None:
            # The first step compiles, and makes the optimizer's state.
            self.pace = Pace(trainer.max_steps, step)
        elif self.bar.disable and not is_due(trainer, self.every, self.more) and self.pace.is_due():
            parts = [f"step {step:>6} of {trainer.max_steps:,}", *([figures] if figures else []), *self._left(step)]
            self.console.print("  ".join(parts), soft_wrap=True, highlight=False)
        super().on_step_end(trainer, module, step)

    def on_milestone(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Print the line."""
        parts = [f"step {step:>6}"]
        for name in ("val/loss", "val/bits_per_byte"):
            if name in self.validation.last:
                parts.append(_named(LOGGED[name], self.validation.last[name]))
        if self.snapshot is not None and self.snapshot.last is not None:
            parts += _figures(self.snapshot.last)
        if self.evaluation is not None and self.evaluation.acted_at == step:
            parts += self.evaluation.figures
        if self.training.last and step:
            parts += [f"{self.training.last['train/tokens_per_s']:,.0f} tokens/s", *self._left(step)]
        if self.pace is not None:
            self.pace.said()
        # The line is a record, not part of the bar: it must not be folded to the terminal's width.
        self.console.print("  ".join(parts), soft_wrap=True, highlight=False)

    def _left(self, step: int) -> list[str]:
        """Estimate the remaining time of the run, with validation, snapshots and checkpoints."""
        seconds = None if self.pace is None else self.pace.seconds_left(step)
        return [f"about {duration(seconds)} left"] if seconds else []

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove the bar."""
        self.bar.stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> Any:
        """Remove the bar."""
        self.bar.stop()
