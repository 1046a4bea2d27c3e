"""The bias snapshot of a Lightning training: taken at birth, every so many steps and at the end, written and logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np

from ..errors import UsageError
from ..measure.config import SnapshotConfig
from ..measure.find_model import model_in
from ..measure.measurement import BirthReference
from ..measure.ranks import rank
from ..measure.recorder import SnapshotRecorder, TokenTexts
from ..measure.records import RunDir, Snapshot
from .loggers import log_snapshot
from .milestones import MilestoneCallback, log_metrics


class BiasSnapshot(MilestoneCallback):
    """Takes a :class:`Snapshot` of the language model in a LightningModule at every milestone and logs its scalars.

    The module is our own or anybody's that holds a causal language model of ``transformers``. Training is left alone;
    what is written, and what snapshots are compared with: :class:`SnapshotRecorder`, whose arguments are not told again
    here.

    Args:
        config: what to measure.
        every: optimizer steps between snapshots.
        dirpath: where they are written.
        run: our own run's directory, in place of ``dirpath``.
        model: finds the model in the module; by default the only one of ``transformers`` in it.
        probes: see there.
        newborn: see there.
        init_seed: see there.
        birth: see there.
        token_texts: see there.
        tokens_per_step: see there.

    Raises:
        UsageError: an impossible argument. When training begins: a model that cannot be found or measured.
    """

    def __init__(
        self,
        config: SnapshotConfig | None = None,
        *,
        every: int,
        dirpath: str | Path | None = None,
        run: RunDir | None = None,
        model: Callable[[Any], Any] = model_in,
        probes: Mapping[str, np.ndarray] | None = None,
        newborn: Callable[[int], Any] | None = None,
        init_seed: int | None = None,
        birth: BirthReference | None = None,
        token_texts: TokenTexts | None = None,
        tokens_per_step: int | None = None,
    ) -> None:
        super().__init__(every)
        folder = dirpath if run is None else run.path
        if folder is None:
            raise UsageError("BiasSnapshot: give dirpath, the folder that snapshots are written into")
        if every < 1:
            raise UsageError(f"BiasSnapshot: every is {every}; give at least 1")
        self.model = model
        self.recorder = SnapshotRecorder(
            folder,
            config,
            probes=probes,
            newborn=newborn,
            init_seed=init_seed,
            birth=birth,
            token_texts=token_texts,
            tokens_per_step=tokens_per_step,
        )
        self._step = self._taken = 0

    @property
    def last(self) -> Snapshot | None:
        """The snapshot taken last."""
        return self.recorder.last

    def on_milestone(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Take the snapshot."""
        snapshot = self.recorder.take(self.model(module), step)
        self._taken = step
        if rank() == 0:
            log_metrics(trainer, snapshot.scalars(), step)
            log_snapshot(trainer.loggers, snapshot)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Birth, or where a training goes on."""
        self._step = self._taken = trainer.global_step
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Act where a step was taken: with an epoch one may end before its accumulation is full."""
        before, self._step = self._step, trainer.global_step
        if self._step > before:
            self.on_step_end(trainer, pl_module, self._step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The end, where it came unannounced: of the epochs, or by a callback that stops after a validation."""
        if self._taken != trainer.global_step:
            self.on_milestone(trainer, pl_module, trainer.global_step)
