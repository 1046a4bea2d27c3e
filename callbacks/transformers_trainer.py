"""Bias snapshots in a training by the ``Trainer`` of ``transformers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..measure.recorder import SnapshotRecorder

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback


def bias_callback(trainer: Trainer, recorder: SnapshotRecorder, *, every: int) -> TrainerCallback:
    """Make a callback for ``trainer.add_callback``: snapshots at birth, every ``every`` optimizer steps and at the end.

    Scalars go to ``trainer.log``: into ``log_history`` under their names, and to the trainer's reports, which may add a
    prefix. Training is not affected; a failed measurement ends it only if the recorder's config has ``on_error:
    raise``.

    Args:
        trainer: the trainer.
        recorder: recorder that takes and writes the snapshots; its text is read by the trainer's tokenizer, unless it
            has another.
        every: optimizer steps between them; ``steps`` and ``factor`` of the recorder's config ask for more.

    Raises:
        UsageError: ``every`` is below 1.
    """
    from transformers import TrainerCallback

    if every < 1:
        raise UsageError(f"every is {every}: give at least 1")
    if recorder.text is not None and recorder.tokenizer is None:
        recorder.tokenizer = trainer.processing_class

    class BiasCallback(TrainerCallback):
        taken = 0

        def take(self, state: Any, control: Any, model: Any) -> None:
            self.taken = state.global_step
            snapshot = recorder.take_if_possible(model, state.global_step)
            if snapshot is None:
                return
            # Logging anything counts as having logged this step: its loss would be left out.
            should_log = control.should_log
            trainer.log(snapshot.scalars())
            control.should_log = should_log

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.taken = state.global_step
            if state.global_step == 0:
                self.take(state, control, model)

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            ends = state.global_step >= state.max_steps or control.should_training_stop
            if state.global_step % every == 0 or recorder.config.asks(state.global_step) or ends:
                self.take(state, control, model)

        def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if control.should_training_stop and self.taken != state.global_step:
                self.take(state, control, model)

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            # The best weights are those of another step.
            if self.taken != state.global_step and not args.load_best_model_at_end:
                self.take(state, control, model)

    return BiasCallback()
