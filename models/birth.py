"""Birth: every parameter's initial value from one seed and its own name, on any device, in any order (definitions §1).

Values are drawn with numpy's counter-based Philox in blocks of a fixed number of elements. Each block has a key of its
own, a hash of (``init_seed``, parameter name, block number), so that a shard draws just the blocks that it holds and
two configs share every parameter that they have in common.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .config import ModelConfig
from .decoder import Decoder
from .init import Constant, Distribution, Normal, birth_plan

#: Elements per key. Part of the file format: another number is another birth.
BLOCK = 1 << 16


def _block_normals(init_seed: int, name: str, block: int, n: int) -> np.ndarray:
    """The first ``n`` standard normals of one block, float32."""
    digest = hashlib.sha256(f"birthmark/1\0{init_seed}\0{name}\0{block}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8")
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(n, dtype=np.float32)


def draw(
    init_seed: int,
    name: str,
    n_elements: int,
    distribution: Distribution,
    start: int = 0,
    stop: int | None = None,
) -> np.ndarray:
    """Elements ``start … stop`` of a parameter's initial values, flattened in C order.

    Args:
        init_seed: the seed of the birth.
        name: the parameter's full name.
        n_elements: how many elements the whole parameter has.
        distribution: what it is drawn from.
        start: first element wanted.
        stop: one past the last element wanted; by default ``n_elements``.

    Returns:
        Float32 ``[stop − start]``.
    """
    stop = n_elements if stop is None else stop
    if isinstance(distribution, Constant):
        return np.full(stop - start, distribution.value, dtype=np.float32)
    assert isinstance(distribution, Normal)
    out = np.empty(stop - start, dtype=np.float32)
    std = np.float32(distribution.std)

    def fill(block: int) -> None:
        low, high = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK)
        values = _block_normals(init_seed, name, block, high - block * BLOCK)
        np.multiply(values[low - block * BLOCK :], std, out=out[low - start : high - start])

    blocks = range(start // BLOCK, -(-stop // BLOCK))
    if len(blocks) < 4:
        for block in blocks:
            fill(block)
    else:
        # numpy releases the interpreter's lock while it draws; keys make the order irrelevant.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(fill, blocks))
    return out


@torch.no_grad()
def give_birth(model: nn.Module, config: ModelConfig, init_seed: int) -> None:
    """Overwrite every parameter of ``model`` with its initial value under ``init_seed``, on whatever device it lies."""
    plan = birth_plan(model, config.init)
    for name, parameter in model.named_parameters():
        values = draw(init_seed, name, parameter.numel(), plan[name])
        parameter.copy_(torch.from_numpy(values).view(parameter.shape))


def born(config: ModelConfig, init_seed: int, device: torch.device | str = "cpu") -> Decoder:
    """A newborn decoder. No global random state is read or changed."""
    with torch.device("meta"):
        model = Decoder(config)
    model.to_empty(device=device)
    give_birth(model, config, init_seed)
    return model


def digest(model: nn.Module) -> str:
    """SHA-256 over the parameters in name order: name, shape, float32 little-endian bytes. Tied tensors count once."""
    sha = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        sha.update(f"{name}\0{','.join(map(str, parameter.shape))}\0".encode())
        values: Tensor = parameter.detach().to("cpu", torch.float32).contiguous()
        sha.update(values.numpy().astype("<f4", copy=False).tobytes())
    return sha.hexdigest()


def certificate(model: nn.Module, config: ModelConfig, init_seed: int) -> dict[str, Any]:
    """What identifies a birth: digest, seed, size and the distribution of every parameter."""
    plan = birth_plan(model, config.init)
    return {
        "digest": digest(model),
        "init_seed": init_seed,
        "n_params": sum(p.numel() for p in model.parameters()),
        "parameters": {
            name: {"shape": list(parameter.shape), "distribution": repr(plan[name])}
            for name, parameter in model.named_parameters()
        },
    }
