"""llm.c's ``.bin``: a header of 256 int32 (magic, version, number of tokens), then the tokens.

`dev/data/data_common.py` of karpathy/llm.c writes two kinds: GPT-2 (uint16) and Llama 3 (uint32). The count is
an int32, so a file holds fewer than 2³¹ tokens. The end-of-text token comes *before* each document there.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from ...errors import UsageError
from .layout import TokenFile, file_bytes, known_dtype

_HEADER_BYTES = 256 * 4
#: Magic number → version and dtype.
_KINDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}


def _header(path: Path) -> tuple[int, int, int]:
    with path.open("rb") as file:
        return struct.unpack("<3i", file.read(12).ljust(12, b"\0"))


def is_llm_c(path: Path) -> bool:
    """Return True if a file begins with one of llm.c's magic numbers."""
    return _header(path)[0] in _KINDS


def read_llm_c(key: str, path: Path, token_dtype: str) -> list[TokenFile]:
    """Read the tokens behind the header.

    Raises:
        UsageError: another version, or more or fewer tokens than the header says.
    """
    magic, version, n_tokens = _header(path)
    known, dtype = _KINDS[magic]
    if version != known:
        raise UsageError(f"{path}: is of version {version} of llm.c's format, and version {known} is known; rewrite it")
    stored = known_dtype(path, dtype, token_dtype)
    size = file_bytes(path) - _HEADER_BYTES
    if n_tokens < 0 or size != n_tokens * np.dtype(stored).itemsize:
        raise UsageError(
            f"{path}: cut short: {n_tokens} tokens are promised, {max(0, size)} bytes follow; copy it again"
        )
    return [TokenFile(key, path, stored, n_tokens, _HEADER_BYTES)]
