"""A run's checkpoint as what another run starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch

from ..errors import RunError, UsageError
from ..measure.records import RunDir, step_of
from ..models.birth import Sharder, empty_decoder
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.dotted import dotted
from .checkpoints.folder_io import CheckpointWeights
from .checkpoints.format import fill
from .stored_config import stored_fields


@dataclass(frozen=True)
class Origin:
    """A checkpoint that has been found; no tensor has been read."""

    name: str
    """``RUN@STEP``."""
    config: ModelConfig
    """The model."""
    tokenizer_file: Path | None
    """The run's ``tokenizers`` JSON, if its data is text."""
    checkpoint: Path
    """Its folder."""


def open_origin(name: str) -> Origin | None:
    """Find what ``RUN`` (its last checkpoint), ``RUN@STEP`` or a checkpoint's folder names; None if that is no run.

    Raises:
        UsageError: a run without this checkpoint.
        RunError: a run whose config this version cannot read.
    """
    whole = Path(name).expanduser()
    head, _, tail = name.rpartition("@")
    if RunDir.is_run(whole):
        run, step = RunDir(whole), None
    elif head and RunDir.is_run(Path(head).expanduser()):
        run, step = RunDir(Path(head).expanduser()), tail
    elif RunDir.is_run(whole.parent.parent) and whole in RunDir(whole.parent.parent).checkpoints():
        run, step = RunDir(whole.parent.parent), str(step_of(whole))
    else:
        return None
    there = run.checkpoints_by_step()
    if not there:
        raise UsageError(f"--init_from {name}: {run.path} has no checkpoint yet")
    if step is not None and (not step.isdecimal() or int(step) not in there):
        raise UsageError(f"--init_from {name}: {run.path} has checkpoints of steps {', '.join(map(str, there))}")
    found = max(there) if step is None else int(step)
    tokenizer = run.tokenizer if run.tokenizer.is_file() else None
    return Origin(f"{run.path}@{found}", _model_of(run), tokenizer, there[found])


def _model_of(run: RunDir) -> ModelConfig:
    fields = {name: value for name, value in stored_fields(run).items() if name.startswith("model.")}
    unknown = sorted(fields.keys() - dotted(asdict(ModelConfig()), "model.").keys())
    if unknown:
        raise RunError(f"{run.config}: {unknown[0]} is unknown to this version; it was written by another")
    return _built(ModelConfig, fields, "model.")


def _built(kind: Any, fields: Mapping[str, Any], prefix: str) -> Any:
    hints = get_type_hints(kind)
    values = {}
    for name in (field.name for field in dataclasses.fields(kind)):
        nested = dataclasses.is_dataclass(hints[name])
        values[name] = _built(hints[name], fields, f"{prefix}{name}.") if nested else fields[prefix + name]
    return kind(**values)


def load_origin(origin: Origin, device: torch.device | str = "cpu", shard: Sharder | None = None) -> Decoder:
    """The model of a checkpoint with its buffers, ready to be trained, without the optimizer's state.

    Args:
        origin: the checkpoint, and the config that the model is to have.
        device: where this process holds its part.
        shard: cuts the model over processes; each reads its part of every tensor.

    Raises:
        RunError: a file is missing or damaged, or not this model's; it is named.
    """
    weights = CheckpointWeights(origin.checkpoint)
    model = empty_decoder(origin.config, device, shard)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in weights:
            raise RunError(f"{origin.checkpoint}: has no {name}; the run's config.yaml is another model's")
        fill(tensor, weights.stored[name])
    return model
