"""Loading of any run's checkpoint: whole, or an adapter on top of the frozen model that the run started from."""

from __future__ import annotations

from pathlib import Path

import torch

from ...errors import RunError
from ...models.adapters import base_digest, is_adapter
from ...models.decoder import Decoder
from ..checkpoints.folder_io import CheckpointWeights, load_model
from ..checkpoints.state_file import BASE
from ..checkpoints.stored_tensors import CheckpointFolder, load_into
from ..config import RunConfig
from ..initial_model import initialize_model


def load_trained(config: RunConfig, checkpoint: Path, device: torch.device | str = "cpu") -> Decoder:
    """Load the model of a run's checkpoint, without the optimizer's state.

    Args:
        config: the run.
        checkpoint: folder of the checkpoint.
        device: device of the model.

    Raises:
        RunError: a file is missing or damaged; or the model that the run started from has changed.
    """
    if not config.adapter.is_on:
        return load_model(config.model, checkpoint, device)
    weights = CheckpointWeights(checkpoint)
    model = initialize_model(config, config.init_seed, device)
    _check_base(config, checkpoint, base_digest(model))
    for name, tensor in model.state_dict().items():
        if is_adapter(name):
            load_into(tensor, weights.required(name))
    return model.eval()


def _check_base(config: RunConfig, checkpoint: Path, now: str) -> None:
    was = CheckpointFolder(checkpoint).tree(lambda tensor: None).get(BASE)
    if now != was:
        raise RunError(
            f"{checkpoint}: its adapter is for {config.init_from} with digest {str(was)[:12]}…, which now has "
            f"{now[:12]}…; restore that model, or adapt the new one"
        )
