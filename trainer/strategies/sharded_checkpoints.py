"""Checkpoints of strategies that shard the model: every rank saves and loads its own shards, in one format for all."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from ...errors import RunError
from ..checkpoints.folder_io import FolderCheckpointIO
from ..checkpoints.stored_tensors import StoredTensor, load_into


def _like(parameter: Tensor, value: Any) -> Any:
    """Load optimizer state for ``parameter``, sharded like it if it has the same shape."""
    if not isinstance(value, StoredTensor):
        return value
    if value.shape != tuple(parameter.shape) or not value.shape:
        return value.whole()
    new = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    load_into(new, value)
    return new


class ShardedCheckpoints(Strategy):
    """Mixin for a Lightning strategy, listed before it, that saves and loads through :class:`FolderCheckpointIO`.

    The trainer must have been given one as a plugin. A strategy whose tensors are no DTensors overrides
    :meth:`lightning_module_state_dict` and :meth:`optimizer_state` with :class:`TensorShard` in place of tensors, under
    the names and numbers that they have in a single process.
    """

    @property
    def folder_io(self) -> FolderCheckpointIO:
        """Writer and reader of the folders."""
        io = self.checkpoint_io
        if not isinstance(io, FolderCheckpointIO):
            raise TypeError(f"the trainer needs plugins=[FolderCheckpointIO()], it has {type(io).__name__}")
        return io

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Always True: shards are read into the memory in which they stay."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Always True, so that Lightning calls :meth:`load_optimizer_state_dict`."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's own names, with this rank's part of each tensor."""
        assert self.lightning_module is not None
        # The parameters themselves: a strategy keeps facts about its shards on them.
        return self.lightning_module.state_dict(keep_vars=True)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return torch's own form, parameters by number, with this rank's part of each tensor."""
        return Strategy.optimizer_state(self, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save every rank's shards."""
        self.folder_io.save_sharded(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the checkpoint, with weights and optimizer state not yet read."""
        return self.folder_io.load_sharded(checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fill this rank's part of the model, in place.

        Raises:
            RunError: the checkpoint belongs to another model.
        """
        stored, loaded = checkpoint["state_dict"], self.lightning_module_state_dict()
        if strict and (odd := sorted(loaded.keys() ^ stored.keys())):
            who = "the checkpoint" if odd[0] in loaded else "the model"
            raise RunError(f"{who} has no {odd[0]}; the run's config.yaml is another model's")
        for name in loaded.keys() & stored.keys():
            load_into(loaded[name], stored[name])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer's state, sharded as its parameters are."""
        for optimizer, stored in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            numbers = chain.from_iterable(group["params"] for group in stored["param_groups"])
            parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            by_number = dict(zip(numbers, parameters, strict=True))
            state = {
                number: {key: _like(by_number[number], value) for key, value in entries.items()}
                for number, entries in stored["state"].items()
            }
            optimizer.load_state_dict({**stored, "state": state})

    def teardown(self) -> None:
        """Wait for unfinished writes."""
        super().teardown()
        self.checkpoint_io.teardown()
