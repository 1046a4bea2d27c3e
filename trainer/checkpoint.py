"""Checkpoints as folders of JSON and safetensors: atomic, checked when loaded, nothing pickled in either direction."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..callbacks.records import atomic_path, read_json, write_json
from ..errors import RunError
from ..models.config import ModelConfig
from ..models.decoder import Decoder

_FORMAT = 1
_TENSORS, _STATE = "tensors.safetensors", "state.json"
_MEND = "delete the folder to go on from the checkpoint before it"
_MODEL = "state_dict/model."


def _pack(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON for ``value``; its tensors go into ``tensors`` under their path."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().cpu().contiguous()
        return {"tensor": path}
    if isinstance(value, dict):
        # As pairs, because keys may be numbers; with a tag, because a dictionary may look like a tag.
        return {"dict": [[k, _pack(v, f"{path}/{k}" if path else str(k), tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_pack(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"checkpoint entry {path!r} is a {type(value).__name__}, which is neither a tensor nor plain data")


def _unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    builders: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda path: tensors[path],
        "dict": lambda pairs: {k: _unpack(v, tensors) for k, v in pairs},
        "list": lambda items: [_unpack(v, tensors) for v in items],
        "tuple": lambda items: tuple(_unpack(v, tensors) for v in items),
    }
    return builders[tag](content)


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _checked_state(folder: Path) -> dict[str, Any]:
    """The JSON of a checkpoint whose tensors are the ones that it was written with."""
    state = read_json(folder / _STATE)
    if state.get("format") != _FORMAT:
        raise RunError(f"{folder / _STATE}: format {state.get('format')!r}, this version reads {_FORMAT}")
    file = folder / _TENSORS
    if not file.is_file():
        raise RunError(f"{file}: missing; {_MEND}")
    if _sha256(file) != state["sha256"]:
        raise RunError(f"{file}: damaged (its SHA-256 is not the one in {_STATE}); {_MEND}")
    return state


class CheckpointWeights(Mapping[str, torch.Tensor]):
    """Parameters and buffers of a checkpoint's model by name, each read when it is asked for, on the CPU.

    Raises:
        RunError: a file is missing or damaged; it is named.
    """

    def __init__(self, folder: Path) -> None:
        _checked_state(folder)
        self._file = folder / _TENSORS
        with safe_open(self._file, "pt") as tensors:
            self._names = [name.removeprefix(_MODEL) for name in tensors.keys() if name.startswith(_MODEL)]  # noqa: SIM118

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        with safe_open(self._file, "pt") as tensors:
            return tensors.get_tensor(_MODEL + name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load_model(config: ModelConfig, folder: Path, device: torch.device | str = "cpu") -> Decoder:
    """The model of a checkpoint, allocated once, without the optimizer's state."""
    weights = CheckpointWeights(folder)
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name not in weights:
                raise RunError(f"{folder / _TENSORS}: has no {name}; the run's config.yaml is another model's")
            tensor.copy_(weights[name])
    return model.eval()


class FolderCheckpointIO(CheckpointIO):
    """Lightning's checkpoint dictionary in a folder: tensors in safetensors, the rest in JSON with their checksum."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write the folder; it appears whole or not at all."""
        tensors: dict[str, torch.Tensor] = {}
        state = _pack(checkpoint, "", tensors)
        with atomic_path(Path(path)) as new:
            new.mkdir()
            save_file(tensors, new / _TENSORS)
            write_json(
                new / _STATE,
                {
                    "format": _FORMAT,
                    "step": checkpoint["global_step"],
                    "sha256": _sha256(new / _TENSORS),
                    "state": state,
                },
            )

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a folder.

        Raises:
            RunError: a file is missing or damaged; it is named.
        """
        folder = Path(path)
        state = _checked_state(folder)
        file = folder / _TENSORS
        try:
            return _unpack(state["state"], load_file(file))
        except SafetensorError as error:
            raise RunError(f"{file}: damaged ({error}); {_MEND}") from None

    def remove_checkpoint(self, path: Any) -> None:
        """Checkpoints are the user's; nothing here deletes them."""
        raise NotImplementedError
