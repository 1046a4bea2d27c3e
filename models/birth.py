"""Birth: every parameter's initial value from one seed and its own name, in any order (definitions §1)."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor, nn

from ..files import save_tensors
from .attention.correlation import initialize_moments
from .config import ModelConfig
from .decoder import Decoder
from .exchange.weight_files import SHARD_BYTES, shard_file_names, split_into_shards, write_index
from .init import Distribution, birth_plan, keyed_generator
from .normals import standard_normals
from .tensor_shards import full_shape, full_tensor, shard_of

# ---------------------------------------------------------------- birth
# Every parameter's initial value from one seed and its own name, on any device, in any order (definitions §1).
#
# Values are drawn with numpy's counter-based Philox in blocks of a fixed number of elements. Each block has a key of
# its own, a hash of (``init_seed``, parameter name, block number), so that a shard draws just the blocks that it
# holds and two configs share every parameter that they have in common.

#: Shards a model on the meta device over ranks, in place.
Sharder = Callable[[Decoder], object]

#: Elements per key. Part of the file format: another number is another birth.
BLOCK = 1 << 16


def _block_normals(init_seed: int, name: str, block: int, n: int, again: int = 0) -> np.ndarray:
    """Draw the first ``n`` standard normals of a block, or of its ``again``-th further stream, float32."""
    stream = (again,) if again else ()
    return standard_normals(keyed_generator(init_seed, name, block, *stream), n)


def draw(
    init_seed: int,
    name: str,
    n_elements: int,
    distribution: Distribution,
    start: int = 0,
    stop: int | None = None,
) -> np.ndarray:
    """Draw elements ``start … stop`` of a parameter's initial values, flattened in C order.

    Args:
        init_seed: the seed of the birth.
        name: the parameter's full name.
        n_elements: number of elements of the whole parameter.
        distribution: distribution of its values.
        start: first element wanted.
        stop: one past the last element wanted; by default ``n_elements``.

    Returns:
        Float32 ``[stop − start]``.
    """
    stop = n_elements if stop is None else stop
    first, last = (0, n_elements) if distribution.whole else (start, stop)
    out = np.empty(last - first, dtype=np.float32)

    def fill(block: int) -> None:
        low, high = max(first, block * BLOCK), min(last, (block + 1) * BLOCK)
        values = distribution.block(partial(_block_normals, init_seed, name, block), high - block * BLOCK)
        out[low - first : high - first] = values[low - block * BLOCK :]

    blocks = range(first // BLOCK, -(-last // BLOCK))
    if len(blocks) < 4:
        for block in blocks:
            fill(block)
    else:
        # numpy releases the interpreter's lock while it draws; keys make the order irrelevant.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(fill, blocks))
    return distribution.finish(out)[start - first : stop - first]


def draw_tensor(
    init_seed: int, name: str, n_elements: int, distribution: Distribution, start: int, stop: int
) -> Tensor:
    """Draw elements as :func:`draw` does, float32 ``[stop − start]``, on the CPU."""
    return torch.from_numpy(draw(init_seed, name, n_elements, distribution, start, stop))


@torch.no_grad()
def initialize_parameters(model: nn.Module, config: ModelConfig, init_seed: int) -> None:
    """Overwrite every parameter of ``model`` with its initial value under ``init_seed``, on its device.

    Each rank of a sharded model draws only its shard.
    """
    plan = birth_plan(model, config.init)
    for name, parameter in model.named_parameters():
        shard = shard_of(parameter)
        shard.fill(partial(draw_tensor, init_seed, name, shard.numel, plan[name]), at_once=plan[name].whole)


def empty_decoder(
    config: ModelConfig,
    device: torch.device | str = "cpu",
    shard: Sharder | None = None,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """Build a decoder whose parameters are not initialised.

    Footgun: modules are built on the meta device. Tensors computed in ``__init__`` have no values there, and buffers
    hold garbage afterwards: compute in ``forward``, or set buffers after birth.

    Args:
        config: the model.
        device: device of this process's shard, or of the whole model.
        shard: function that shards it over ranks, in place, so that no rank ever holds the whole.
        dtype: type of the parameters.
    """
    with torch.device("meta"):
        model = Decoder(config).to(dtype)
    if shard is not None:
        shard(model)
    # Sharding may have allocated parameters already; those stay.
    if any(p.is_meta for p in model.parameters()):
        return model.to_empty(device=device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))
    return model


def born(
    config: ModelConfig, init_seed: int, device: torch.device | str = "cpu", shard: Sharder | None = None
) -> Decoder:
    """Build a newborn decoder: :func:`empty_decoder`, then birth. Neither reads nor changes global random state."""
    model = empty_decoder(config, device, shard)
    initialize_parameters(model, config, init_seed)
    initialize_moments(model, config.vocab_size, config.max_seq_len, init_seed)
    return model


class Digest:
    """SHA-256 over parameters in name order: name, shape, float32 little-endian bytes. Tied tensors count once."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def add(self, name: str, values: np.ndarray) -> None:
        """Add the next parameter, whole."""
        self._sha.update(f"{name}\0{','.join(map(str, values.shape))}\0".encode())
        self._sha.update(np.ascontiguousarray(values, dtype="<f4").data)

    def hexdigest(self) -> str:
        """Return the digest of everything added."""
        return self._sha.hexdigest()


def digest_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """Compute the :class:`Digest` of tensors with their names, in name order.

    Collective: call on every rank if the model is sharded. Gathers one tensor at a time.
    """
    sha = Digest()
    for name, tensor in named:
        sha.add(name, full_tensor(tensor).to("cpu", torch.float32).numpy())
    return sha.hexdigest()


def digest(model: nn.Module) -> str:
    """Compute the digest (:func:`digest_of`) of a model's present parameters."""
    return digest_of(sorted(model.named_parameters()))


def _certificate(model: nn.Module, config: ModelConfig, init_seed: int, digest: str) -> dict[str, Any]:
    plan = birth_plan(model, config.init)
    return {
        "digest": digest,
        "init_seed": init_seed,
        "n_params": sum(math.prod(full_shape(p)) for p in model.parameters()),
        "parameters": {
            name: {"shape": list(full_shape(parameter)), "distribution": repr(plan[name])}
            for name, parameter in model.named_parameters()
        },
    }


def certificate(model: nn.Module, config: ModelConfig, init_seed: int, known: str | None = None) -> dict[str, Any]:
    """Write the certificate of a birth: digest, seed, size and the distribution of every parameter.

    Args:
        model: the newborn.
        config: config of the model.
        init_seed: the seed of the birth.
        known: the digest, if already computed.
    """
    return _certificate(model, config, init_seed, known or digest(model))


def certificate_of(
    config: ModelConfig, init_seed: int, each: Callable[[str, np.ndarray], object] = lambda name, values: None
) -> dict[str, Any]:
    """Write the certificate of a birth, drawn parameter by parameter: no model is allocated.

    Args:
        config: the model.
        init_seed: the seed of the birth.
        each: called with every parameter's name and initial values ``[its shape]``, float32, in name order.

    Returns:
        The same as :func:`certificate` of ``born(config, init_seed)``.
    """
    with torch.device("meta"):
        model = Decoder(config)
    plan, sha = birth_plan(model, config.init), Digest()
    for name, parameter in sorted(model.named_parameters()):
        values = draw(init_seed, name, parameter.numel(), plan[name]).reshape(parameter.shape)
        sha.add(name, values)
        each(name, values)
        del values  # what `each` did not keep goes before the next is drawn
    return _certificate(model, config, init_seed, sha.hexdigest())


# ---------------------------------------------------------------- a birth straight into files, one shard at a time
# No machine needs to hold the whole model.


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
