"""A node's copy of shards from a drive that all nodes share."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from ...errors import RunError
from ..cache import build_once

_BLOCK = 1 << 22


def staged(folder: Path, meta: dict[str, Any], stage_to: Path, verify: str, schema: type) -> Path:
    """Return the copy, below ``stage_to``, of a folder that `build_once` built; copy it now, or find and verify it.

    The first process of a node copies, and compares every byte with the SHA-256 in ``meta``; the others wait for it.

    Args:
        folder: the shards.
        meta: facts about them.
        stage_to: a folder of this node only.
        verify: check of an existing copy.
        schema: schema of the facts.

    Raises:
        UsageError: ``stage_to`` cannot be written to.
        RunError: the copy's drive is full, or a file of the folder, or of the copy, is damaged.
    """

    def copy(scratch: Path) -> dict[str, Any]:
        for name, facts in meta["files"].items():
            if _copied(folder / name, scratch / name) != facts["sha256"]:
                raise RunError(
                    f"{folder / name}: damaged (its SHA-256 differs); delete this folder and start again, it will be "
                    "rebuilt"
                )
        return meta

    build_once(stage_to / folder.name, copy, verify, schema, field="data.stage_to")
    return stage_to / folder.name


def _copied(source: Path, target: Path) -> str:
    """Copy a file; return the SHA-256 of its bytes, in hex."""
    total = hashlib.sha256()
    with source.open("rb") as read, target.open("wb") as written:
        while block := read.read(_BLOCK):
            total.update(block)
            written.write(block)
        written.flush()
        os.fsync(written.fileno())
    return total.hexdigest()
