"""Files of a folder of safetensors with the names of ``transformers``: one, or several and their index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"

#: Largest shard by default, in bytes, as `transformers` and the hubs expect.
SHARD_BYTES = 5 * 10**9

#: Alignment in bytes: a line of a processor's cache, to which torch's own memory is aligned too.
ALIGNMENT = 64
#: Dtypes of a ``config.json`` → their names in the files.
FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_CODES = FLOATS | {"int64": "I64", "int32": "I32", "bool": "BOOL"}


def split_into_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Cut names, in their order, into runs of at most ``max_bytes``; a larger parameter gets a shard of its own."""
    found: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room:
            found.append([])
            room = max_bytes
        found[-1].append(name)
        room -= size
    return found


def shard_file_names(n: int) -> list[str]:
    """Return names of ``n`` files: ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` …"""
    return [ONE_FILE] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]


def aligning_metadata(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Build metadata that pads the header so that the first tensor begins at a multiple of `ALIGNMENT` bytes.

    Readers map tensors in place, and products of misaligned rows take a fifth longer. The header precedes them: 8
    bytes, and JSON of a length that padding decides.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", "padding": ""}}
    start = 0
    # Wide types come first in the file, then names in their order.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        end = start + tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        header[name] = {"dtype": _CODES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    taken = 8 + len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return {"format": "pt", "padding": " " * (-taken % ALIGNMENT)}


def write_index(folder: Path, file_of: Mapping[str, str], total_bytes: int) -> None:
    """Write to ``folder`` the index of each tensor's file; a single file needs no index, and gets none."""
    if len(set(file_of.values())) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(file_of)}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
