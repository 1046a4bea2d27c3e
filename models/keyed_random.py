"""Random generators with separate keys, so that no draw depends on another (definitions §1)."""

from __future__ import annotations

import hashlib

import numpy as np


def keyed_generator(init_seed: int, *parts: object) -> np.random.Generator:
    """Return a Philox generator keyed by a hash of ``init_seed`` and ``parts``. Content and order of the hashed text
    are a file format.
    """
    name = "\0".join(["birthmark/1", str(init_seed), *map(str, parts)])
    words = np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], dtype="<u8")
    return np.random.Generator(np.random.Philox(key=words))
