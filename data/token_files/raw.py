"""Files of bare tokens: nanoGPT's ``.bin`` and the ``.npy`` of OLMo and Dolma, which have no header.

nanoGPT: `data/openwebtext/prepare.py` writes uint16, each document followed by its end-of-text token. OLMo-core:
`olmo_core.data` maps its ``.npy`` files as plain arrays of the dtype that its config names (uint16, uint32); documents
end with the tokenizer's EOS. A ``.npy`` that numpy itself wrote has a header, which is read.
"""

from __future__ import annotations

import ast
import struct
from pathlib import Path

import numpy as np

from ...errors import UsageError
from .layout import DTYPES, TokenFile, file_bytes, known_dtype

_NUMPY_MAGIC = b"\x93NUMPY"
_MOST_HEADER = 1 << 16


def is_numpy(path: Path) -> bool:
    """Return True if numpy wrote this file, with its header."""
    with path.open("rb") as file:
        return file.read(len(_NUMPY_MAGIC)) == _NUMPY_MAGIC


def read_raw(key: str, path: Path, token_dtype: str) -> list[TokenFile]:
    """Read a file without a header.

    Raises:
        UsageError: ``token_dtype`` is missing, or the file ends within a token.
    """
    dtype = known_dtype(path, None, token_dtype)
    size = np.dtype(dtype).itemsize
    if left := file_bytes(path) % size:
        raise UsageError(f"{path}: cut short, or no {token_dtype}: {left} bytes are left behind its last token")
    return [TokenFile(key, path, dtype, file_bytes(path) // size)]


def read_numpy(key: str, path: Path, token_dtype: str) -> list[TokenFile]:
    """Read a file that ``numpy.save`` wrote; layout: numpy's NEP 1.

    Raises:
        UsageError: the file is not a flat array of whole numbers, or is cut short.
    """
    with path.open("rb") as file:
        start = file.read(12)
        wide = len(start) > 6 and start[6] >= 2
        length = struct.unpack("<I" if wide else "<H", start[8 : 12 if wide else 10].ljust(4 if wide else 2, b"\0"))[0]
        offset = (12 if wide else 10) + length
        file.seek(offset - length)
        header = file.read(min(length, _MOST_HEADER))
    try:
        said = ast.literal_eval(header.decode("latin-1").strip())
        dtype, shape = np.dtype(said["descr"]), tuple(said["shape"])
    except (SyntaxError, ValueError, KeyError, TypeError, MemoryError, RecursionError):
        raise UsageError(f"{path}: damaged (its numpy header cannot be read)") from None
    if len(shape) != 1 or dtype.name not in DTYPES or dtype.str not in (DTYPES[dtype.name], "|u1"):
        raise UsageError(f"{path}: holds {dtype.str} {list(shape)}, not a flat array of whole numbers")
    n_tokens = int(shape[0])
    if file_bytes(path) != offset + n_tokens * dtype.itemsize:
        raise UsageError(f"{path}: cut short: its header promises {n_tokens} tokens; copy it again")
    return [TokenFile(key, path, known_dtype(path, dtype.name, token_dtype), n_tokens, offset)]
