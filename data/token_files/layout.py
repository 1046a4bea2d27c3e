"""Layout of a file of tokens, independent of its format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...errors import UsageError
from ..encode import Split

#: Types of stored tokens, by their names in ``data.token_dtype``: little-endian numpy dtypes.
DTYPES = {
    "uint8": "<u1",
    "uint16": "<u2",
    "int16": "<i2",
    "uint32": "<u4",
    "int32": "<i4",
    "uint64": "<u8",
    "int64": "<i8",
}


@dataclass(frozen=True)
class TokenFile:
    """Location and layout of a file's tokens."""

    key: str
    """Path below the named folder; decides the splits of its documents."""

    path: Path
    dtype: str
    """A value of `DTYPES`."""

    n_tokens: int
    offset: int = 0
    """Bytes before the first token."""

    document_ends: Callable[[], np.ndarray] | None = None
    """Ends of documents, if the format has them: int64 ``[documents]``, ascending, the last is ``n_tokens``."""

    split: Split | None = None
    """The split that the whole file belongs to; None: its documents have one each."""

    others: tuple[Path, ...] = ()
    """Files that describe this one."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Files that the tokens depend on."""
        return (self.path, *self.others)

    def tokens(self) -> np.ndarray:
        """Map the tokens into memory; ``[n_tokens]``."""
        if not self.n_tokens:  # numpy refuses to map nothing
            return np.empty(0, dtype=self.dtype)
        shape = (self.n_tokens,)
        return np.asarray(np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset, shape=shape))

    def of(self, split: Split) -> TokenFile:
        """Return the same file, all of one split."""
        return replace(self, split=split)


def file_bytes(path: Path) -> int:
    """Return the size of a file."""
    return path.stat().st_size


def known_dtype(path: Path, dtype: str | None, told: str) -> str:
    """Return the numpy dtype of a file's tokens, from the file (None: it does not say) and ``data.token_dtype``.

    Raises:
        UsageError: neither gives it, or they contradict each other.
    """
    if dtype is None and not told:
        raise UsageError(
            f"data.token_dtype: {path} does not say how its tokens are stored; give uint16 (nanoGPT, most vocabularies "
            "below 65536) or what it was written with"
        )
    if dtype is not None and told and told != dtype:
        raise UsageError(f"data.token_dtype: {told} is given, but {path} says {dtype}; leave the field out")
    return DTYPES[dtype or told]
