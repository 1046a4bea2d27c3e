"""Bias snapshots in a training by the ``Trainer`` of ``transformers``."""

from __future__ import annotations

import inspect
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..errors import UsageError
from ..measure.recorder import RecorderArguments, SnapshotRecorder, as_recorder, checked_every

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
else:
    TrainerCallback = object


class TrainerSnapshot(TrainerCallback):
    """Callback for ``Trainer(callbacks=[…])``: snapshots at birth, every ``every`` optimizer steps and at the end.

    Trainers of ``trl`` take it too. Scalars go where ``Trainer.log`` writes: into ``log_history`` under their names,
    and to the trainer's reports, which may add a prefix. Training is not affected; a failed measurement ends it only if
    the recorder's config has ``on_error: raise``.

    Args:
        recorder: folder of the snapshots, or a recorder that takes and writes them; its text is read by the trainer's
            tokenizer, unless it has another.
        every: optimizer steps between snapshots; ``steps`` and ``factor`` of the recorder's config ask for more.
        dirpath: the folder, by its name.
        arguments: further arguments of the :class:`SnapshotRecorder` that writes into the folder.

    Raises:
        UsageError: an impossible argument, or ``transformers`` is missing.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> TrainerSnapshot:
        """Make an instance of a subclass of ``TrainerCallback`` too; ``transformers`` is loaded only now."""
        kind: Any = cls
        return super().__new__(_as_trainer_callback(kind))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the class that the module has, and without the trainer."""
        return _made_anew, (vars(type(self)).get("_named", type(self)),), vars(self) | {"trainer": None}

    def __init__(
        self,
        recorder: SnapshotRecorder | str | Path | None = None,
        *,
        every: int,
        dirpath: str | Path | None = None,
        **arguments: Unpack[RecorderArguments],
    ) -> None:
        self.every = checked_every("TrainerSnapshot", every)
        self.recorder = as_recorder("TrainerSnapshot", recorder, dirpath, arguments)
        self.trainer: Any = None
        """Trainer that scalars are logged to; found when training begins, and let go when it ends."""
        self._has_tokenizer = self.recorder.tokenizer is not None
        self._taken = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Find trainer and tokenizer; take the snapshot of birth."""
        if self.trainer is None or self.trainer.state is not state:
            self.trainer = _calling_trainer(state)
        self.read_text_by(kwargs.get("processing_class"))
        self._taken = state.global_step
        if state.global_step == 0:
            self._take(state, control, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take the snapshot if one is due after this step."""
        ends = state.global_step >= state.max_steps or control.should_training_stop
        if state.global_step % self.every == 0 or self.recorder.config.asks(state.global_step) or ends:
            self._take(state, control, model)

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take the snapshot of a training that an evaluation has stopped."""
        if control.should_training_stop and self._taken != state.global_step:
            self._take(state, control, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take the last snapshot, unless the best weights are loaded, which are those of another step."""
        if self._taken != state.global_step and not args.load_best_model_at_end:
            self._take(state, control, model)
        # It holds the model.
        self.trainer = None

    def read_text_by(self, tokenizer: Any) -> None:
        """Have the recorder's text read by this tokenizer, unless the user gave it one."""
        if self.recorder.text is not None and not self._has_tokenizer:
            self.recorder.tokenizer = tokenizer

    def _take(self, state: Any, control: Any, model: Any) -> None:
        self._taken = state.global_step
        snapshot = self.recorder.take_if_possible(model, state.global_step)
        if snapshot is None:
            return
        if self.trainer is None:
            state.log_history.append({**snapshot.scalars(), "epoch": state.epoch, "step": state.global_step})
            return
        # Logging anything counts as having logged this step: its loss would be left out.
        should_log = control.should_log
        from transformers import Trainer

        # A subclass may empty what it has gathered into every row that it logs, as those of trl do: it is for the loss.
        log = partial(Trainer.log, self.trainer) if isinstance(self.trainer, Trainer) else self.trainer.log
        log(snapshot.scalars())
        control.should_log = should_log


@cache
def _as_trainer_callback(cls: type) -> Any:
    """Return the class itself if it derives from ``TrainerCallback``, else a subclass that derives from both."""
    try:
        from transformers import TrainerCallback as Base
    except ImportError:
        raise UsageError("TrainerSnapshot needs transformers: pip install transformers") from None
    named = {"__module__": cls.__module__, "_named": cls}
    return cls if issubclass(cls, Base) else type(cls.__name__, (cls, Base), named)


def _made_anew(cls: type[TrainerSnapshot]) -> TrainerSnapshot:
    """Make an instance for the state of a pickle."""
    return cls.__new__(cls)


def _calling_trainer(state: Any) -> Any:
    """Return the trainer whose event is being handled; None in a loop of another kind.

    ``transformers`` hands no trainer to its callbacks, and only ``Trainer.log`` reaches W&B, TensorBoard and the
    others. It is the object, among the callers, that has this state.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if getattr(caller, "state", None) is state and callable(getattr(caller, "log", None)):
            return caller
        frame = frame.f_back
    return None


def bias_callback(trainer: Trainer, recorder: SnapshotRecorder, *, every: int) -> TrainerSnapshot:
    """Make a :class:`TrainerSnapshot` for ``trainer.add_callback``, of a trainer that exists already.

    Raises:
        UsageError: ``every`` is below 1.
    """
    callback = TrainerSnapshot(recorder, every=every)
    callback.trainer = trainer
    callback.read_text_by(trainer.processing_class)
    return callback
