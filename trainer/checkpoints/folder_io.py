"""Checkpoints as folders of JSON and safetensors: atomic, checked when loaded, nothing pickled in either direction.

Any run can load another's checkpoint, on any number of processes and under any strategy (state_file.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from typing_extensions import override

from ...errors import RunError, UsageError
from ...findings.formatting import steps_near
from ...measure.records import RunDir
from ...models.config import ModelConfig
from ...models.decoder import Decoder
from .state_file import AVERAGE
from .stored_tensors import CheckpointFolder, StoredTensor, load_into, open_checkpoint
from .writer import BackgroundWriter


def find_checkpoint(run: RunDir, step: int | None) -> Path:
    """Find the checkpoint after ``step`` steps, by default the last; UsageError names the existing ones."""
    there = run.checkpoints_by_step()
    if not there:
        raise UsageError(f"{run.path}: has no checkpoint yet; train it further, or give RUN@0")
    if step is None:
        return there[max(there)]
    if step not in there:
        raise UsageError(f"--step {step}: {run.path} has checkpoints of steps {steps_near(there, step)}")
    return there[step]


# ---------------------------------------------------------------- checkpoints as folders of JSON and safetensors
# Atomic, checked when loaded, nothing pickled in either direction.
#
# Any run can load another's checkpoint, on any number of processes and under any strategy (state_file.py).

_MODEL = "state_dict/model."
_AVERAGE = f"{AVERAGE}/weights/"
_IN_PIECES = ("state_dict/", "optimizer_states/", _AVERAGE)


@dataclass(frozen=True)
class _Mean(StoredTensor):
    """Mean of a tensor over several checkpoints, of which any part is read on request."""

    others: tuple[StoredTensor, ...]

    @override
    def read(self, start: int, stop: int) -> torch.Tensor:
        total = super().read(start, stop).double()
        for other in self.others:
            total += other.read(start, stop)
        return (total / (1 + len(self.others))).to(self.dtype)


def _mean(tensors: Sequence[StoredTensor]) -> StoredTensor:
    """Return the mean of one tensor over checkpoints; counts and flags are the first one's."""
    first, *others = tensors
    return _Mean(**vars(first), others=tuple(others)) if first.dtype.is_floating_point else first


def _named(tensors: Mapping[str, StoredTensor], prefix: str) -> dict[str, StoredTensor]:
    return {name.removeprefix(prefix): stored for name, stored in tensors.items() if name.startswith(prefix)}


class CheckpointWeights(Mapping[str, torch.Tensor]):
    """Parameters and buffers of a checkpoint's model by name, each read on request, on the CPU.

    Args:
        folder: the checkpoint.
        average: read the moving average of the weights that the run kept (``optim.ema``) in their place.
        others: further checkpoints of the run: each tensor is the mean of all.

    Raises:
        UsageError: the checkpoint has no averaged weights.
        RunError: a file is missing or damaged; it is named.
    """

    def __init__(self, folder: Path, *, average: bool = False, others: Sequence[Path] = ()) -> None:
        self.folder, opened = folder, CheckpointFolder(folder)
        opened.verify()
        self.stored: dict[str, StoredTensor] = _named(opened.tensors, _MODEL)
        """The same, not yet read."""
        if average:
            if not (averages := _named(opened.tensors, _AVERAGE)):
                raise UsageError(f"{folder}: has no averaged weights, which a run with optim.ema keeps; leave @ema out")
            self.stored |= averages
        read = [CheckpointWeights(other) for other in others]
        if read:
            self.stored = {name: _mean([one.required(name) for one in (self, *read)]) for name in self.stored}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.stored[name].whole()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def required(self, name: str) -> StoredTensor:
        """Return a tensor that the model has. RunError if the checkpoint lacks it."""
        if name not in self.stored:
            raise RunError(f"{self.folder}: has no {name}; the run's config.yaml is another model's")
        return self.stored[name]

    def check(self, names: Iterable[str]) -> None:
        """Check that all of these exist, for readers that read them one by one. RunError if one does not."""
        for name in names:
            self.required(name)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors by name (`models/by_block.py`)."""
        return ((name, self.required(name).whole()) for name in names)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows ``start … stop`` of a table."""
        stored = self.required(name)
        width = stored.shape[-1]
        return stored.read(start * width, stop * width).view(stop - start, width)


def load_model(config: ModelConfig, folder: Path | CheckpointWeights, device: torch.device | str = "cpu") -> Decoder:
    """Load the model of a checkpoint, allocated once, without the optimizer's state."""
    weights = CheckpointWeights(folder) if isinstance(folder, Path) else folder
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device=device)
    for name, tensor in model.state_dict().items():
        load_into(tensor, weights.required(name))
    return model.eval()


class FolderCheckpointIO(BackgroundWriter, CheckpointIO):
    """Lightning's checkpoint dictionary in a folder: tensors in safetensors, the rest in JSON with their checksums."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write the whole folder from this process; it appears whole or not at all. See :meth:`save`."""
        self.save(checkpoint, Path(path), shared=False)

    def save_sharded(self, checkpoint: dict[str, Any], path: Any) -> None:
        """Write the folder, each rank its shards; it appears whole or not at all. See :meth:`save`."""
        self.save(checkpoint, Path(path), shared=True)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a whole folder. Collective: call on every rank.

        Raises:
            RunError: a file is missing or damaged; it is named, on all ranks.
        """
        return open_checkpoint(Path(path)).tree(StoredTensor.whole)

    def load_sharded(self, path: Any) -> dict[str, Any]:
        """Read a folder, but weights and optimizer state only as :class:`StoredTensor`. Collective: call on every rank.

        Raises:
            RunError: a file is missing or damaged; it is named, on all ranks.
        """
        return open_checkpoint(Path(path)).tree(lambda t: t if t.name.startswith(_IN_PIECES) else t.whole())

    def remove_checkpoint(self, path: Any) -> None:
        """Refuse: the callback decides which checkpoints are kept (callbacks/checkpoint.py)."""
        raise NotImplementedError
