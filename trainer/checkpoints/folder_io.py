"""Checkpoints as folders of JSON and safetensors: atomic, checked when loaded, nothing pickled in either direction.

What one run saves any other loads, on whatever number of processes and under whatever strategy (state_file.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from ...errors import RunError
from ...models.config import ModelConfig
from ...models.decoder import Decoder
from .stored_tensors import CheckpointFolder, StoredTensor, load_into, open_checkpoint
from .writer import BackgroundWriter

_MODEL = "state_dict/model."
_IN_PIECES = ("state_dict/", "optimizer_states/")


class CheckpointWeights(Mapping[str, torch.Tensor]):
    """Parameters and buffers of a checkpoint's model by name, each read when it is asked for, on the CPU.

    Raises:
        RunError: a file is missing or damaged; it is named.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, opened = folder, CheckpointFolder(folder)
        opened.verify()
        self.stored: dict[str, StoredTensor] = {
            name.removeprefix(_MODEL): stored for name, stored in opened.tensors.items() if name.startswith(_MODEL)
        }
        """The same, not yet read."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.stored[name].whole()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def required(self, name: str) -> StoredTensor:
        """One that the model has. RunError if the checkpoint does not."""
        if name not in self.stored:
            raise RunError(f"{self.folder}: has no {name}; the run's config.yaml is another model's")
        return self.stored[name]

    def check(self, names: Iterable[str]) -> None:
        """See that all of these are there, as who reads them one by one expects. RunError if one is not."""
        for name in names:
            self.required(name)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by name (`models/by_block/block_weights.py`)."""
        return ((name, self.required(name).whole()) for name in names)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start … stop`` of a table."""
        stored = self.required(name)
        width = stored.shape[-1]
        return stored.read(start * width, stop * width).view(stop - start, width)


def load_model(config: ModelConfig, folder: Path, device: torch.device | str = "cpu") -> Decoder:
    """The model of a checkpoint, allocated once, without the optimizer's state."""
    weights = CheckpointWeights(folder)
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device=device)
    for name, tensor in model.state_dict().items():
        load_into(tensor, weights.required(name))
    return model.eval()


class FolderCheckpointIO(BackgroundWriter, CheckpointIO):
    """Lightning's checkpoint dictionary in a folder: tensors in safetensors, the rest in JSON with their checksums."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write the folder, all of it from this process; it appears whole or not at all. See :meth:`save`."""
        self.save(checkpoint, Path(path), shared=False)

    def save_sharded(self, checkpoint: dict[str, Any], path: Any) -> None:
        """Write the folder, each rank what it holds; it appears whole or not at all. See :meth:`save`."""
        self.save(checkpoint, Path(path), shared=True)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a folder, all of it. In a group every rank must call.

        Raises:
            RunError: a file is missing or damaged; it is named, on all ranks.
        """
        return open_checkpoint(Path(path)).tree(StoredTensor.whole)

    def load_sharded(self, path: Any) -> dict[str, Any]:
        """Read a folder, but of weights and optimizer state only where they are, as :class:`StoredTensor`.

        In a group every rank must call.

        Raises:
            RunError: a file is missing or damaged; it is named, on all ranks.
        """
        return open_checkpoint(Path(path)).tree(lambda t: t if t.name.startswith(_IN_PIECES) else t.whole())

    def remove_checkpoint(self, path: Any) -> None:
        """Which checkpoints are kept is the callback's business (callbacks/checkpoint.py)."""
        raise NotImplementedError
