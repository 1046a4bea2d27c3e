"""The files of a folder of safetensors as ``transformers`` names them: one, or several and their index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"

#: Largest shard by default, in bytes: what `transformers` and the hubs expect.
SHARD_BYTES = 5 * 10**9


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
    """Names of ``n`` files: ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` …"""
    return [ONE_FILE] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]


def write_index(folder: Path, file_of: Mapping[str, str], total_bytes: int) -> None:
    """Say in ``folder`` which file holds each tensor; one file alone needs no index, and gets none."""
    if len(set(file_of.values())) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(file_of)}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
