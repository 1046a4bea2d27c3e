"""The bias snapshot of a Lightning training: taken at birth, every so many steps and at the end, written and logged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import lightning as L

from ..measure.find_model import find_language_model
from ..measure.ranks import rank
from ..measure.recorder import RecorderArguments, SnapshotRecorder, as_recorder, checked_every
from ..measure.records import Snapshot
from .loggers import log_snapshot
from .milestones import MilestoneCallback, is_due, log_metrics


class BiasSnapshot(MilestoneCallback):
    """Callback that takes a :class:`Snapshot` of the language model in a LightningModule at every milestone and logs
    its scalars.

    The module is this package's, or any that holds a causal language model of ``transformers``. Training is not
    affected. ``BiasSnapshot("bias", every=500)`` writes into the folder ``bias``;
    ``BiasSnapshot(SnapshotRecorder("bias", …), every=500)`` leaves measurements, files and references to that recorder.

    Args:
        recorder: folder of the snapshots, or a recorder that takes and writes them.
        every: optimizer steps between snapshots; ``steps`` and ``factor`` of the recorder's config ask for more. Where
            a batch counts several steps, the snapshot comes after it.
        model: function that finds the model in the module; by default the only one of ``transformers`` in it.
        dirpath: the folder, by its name.
        arguments: further arguments of the :class:`SnapshotRecorder` that writes into the folder.

    Raises:
        UsageError: an impossible argument; when training begins, a model that cannot be found. A failed measurement
            ends the training only if the config's ``on_error`` is ``raise``.
    """

    def __init__(
        self,
        recorder: SnapshotRecorder | str | Path | None = None,
        *,
        every: int,
        dirpath: str | Path | None = None,
        model: Callable[[Any], Any] = find_language_model,
        **arguments: Unpack[RecorderArguments],
    ) -> None:
        every = checked_every("BiasSnapshot", every)
        self.model = model
        self.recorder = as_recorder("BiasSnapshot", recorder, dirpath, arguments)
        super().__init__(every, more=self.recorder.config.asks)
        self._step = self._taken = 0

    @property
    def last(self) -> Snapshot | None:
        """The snapshot taken last."""
        return self.recorder.last

    def on_milestone(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Take the snapshot, if possible."""
        self._taken = step
        snapshot = self.recorder.take_if_possible(self.model(module), step)
        if snapshot is not None and rank() == 0:
            log_metrics(trainer, snapshot.scalars(), step)
            log_snapshot(trainer.loggers, snapshot)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin at birth, or at the step of a resumed training."""
        self._step = self._taken = trainer.global_step
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Act if a step was taken: at the end of an epoch one may end before its accumulation is full."""
        before, self._step = self._step, trainer.global_step
        if self._step > before and is_due(trainer, self.every, self.more, since=before):
            self.act(trainer, pl_module, self._step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the snapshot if training ends unannounced: after its last epoch, or by a callback that stops it after a
        validation.
        """
        if self._taken != trainer.global_step:
            self.on_milestone(trainer, pl_module, trainer.global_step)
