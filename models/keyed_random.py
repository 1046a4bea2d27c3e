"""Random generators of their own key, so that no draw depends on another (definitions §1)."""

from __future__ import annotations

import hashlib

import numpy as np


def keyed_generator(init_seed: int, *parts: object) -> np.random.Generator:
    """Philox keyed by a hash of ``init_seed`` and ``parts``. What goes in, and in which order, is a file format."""
    name = "\0".join(["birthmark/1", str(init_seed), *map(str, parts)])
    words = np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], dtype="<u8")
    return np.random.Generator(np.random.Philox(key=words))
