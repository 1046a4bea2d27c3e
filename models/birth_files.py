"""A birth straight into files, one shard at a time: no machine needs to hold the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from ..files import save_tensors
from .birth import certificate_of
from .config import ModelConfig
from .decoder import Decoder
from .exchange.weight_files import SHARD_BYTES, shard_file_names, split_into_shards, write_index


def write_birth(
    config: ModelConfig,
    init_seed: int,
    folder: Path,
    max_shard_bytes: int = SHARD_BYTES,
    each: Callable[[str, np.ndarray], object] = lambda name, values: None,
) -> dict[str, Any]:
    """Write the weights of a birth as float32 safetensors, one shard in memory at a time.

    ``model.safetensors`` if they fit into one shard, else ``model-00001-of-0000N.safetensors`` … and
    ``model.safetensors.index.json``, which says where each parameter lies.

    Args:
        config: the model.
        init_seed: the seed of the birth.
        folder: folder for the files; it exists and holds none of them.
        max_shard_bytes: largest sum of the parameters of one shard, in bytes.
        each: called with every parameter's name and initial values, in name order, before it is written.

    Returns:
        The birth's certificate, as :func:`~birthmark.models.birth.certificate_of` gives it.
    """
    with torch.device("meta"):
        sizes = {name: 4 * parameter.numel() for name, parameter in sorted(Decoder(config).named_parameters())}
    parts = split_into_shards(sizes, max_shard_bytes)
    file_of = {name: file for file, part in zip(shard_file_names(len(parts)), parts, strict=True) for name in part}
    last = {part[-1] for part in parts}
    shard: dict[str, np.ndarray] = {}

    def keep(name: str, values: np.ndarray) -> None:
        each(name, values)
        shard[name] = values
        if name in last:
            save_tensors(save_file, shard, folder / file_of[name], metadata={"format": "pt"})
            shard.clear()

    certificate = certificate_of(config, init_seed, keep)
    write_index(folder, file_of, sum(sizes.values()))
    return certificate
