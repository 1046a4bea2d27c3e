"""Parts of token files, read as one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import RunError
from ..batches import JoinedTokens
from .layout import TokenFile


class SpanTokens(JoinedTokens):
    """Spans of files, one after another; see `birthmark.data.batches.Tokens`.

    Args:
        files: that hold the spans.
        spans: int64 ``[spans, 3]``: number of the file, first token in it, tokens.
        vocab_size: a token that is not below it ends the reading.
    """

    def __init__(self, files: Sequence[TokenFile], spans: np.ndarray, vocab_size: int) -> None:
        self.files = list(files)
        self.spans = spans[spans[:, 2] > 0]
        self.limit = vocab_size
        self._map()

    def _map(self) -> None:
        self._join([file.tokens() for file in self.files], *self.spans.T)

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "spans": self.spans, "limit": self.limit}

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read ``length`` tokens from each of ``starts``, across spans if needed; int64 ``[n, length]``.

        Raises:
            RunError: a token that the vocabulary does not have; names the file.
        """
        out = super().read(starts, length)
        if self.may_hold_too_large(out):
            self._refuse(starts, out)
        return out

    def _refuse(self, starts: np.ndarray, out: np.ndarray) -> None:
        assert self.limit is not None
        row, column = np.unravel_index(int((out.view(np.uint64) >= self.limit).argmax()), out.shape)
        span = int(np.searchsorted(self._ends_P, starts[row] + column, side="right"))
        file = self.files[int(self.spans[span, 0])]
        raise token_too_large(file, int(out[row, column]), self.limit)


def token_too_large(file: TokenFile, token: int, vocab_size: int) -> RunError:
    """Make the error for a file with a token outside the vocabulary."""
    bits = 8 * np.dtype(file.dtype).itemsize
    if "i" in file.dtype and token >= 1 << (bits - 1):
        token -= 1 << bits  # of a negative one only its bits are known
    return RunError(
        f"{file.path}: holds token {token}, the vocabulary has {vocab_size}; give the tokenizer that made it, its "
        "data.token_dtype, or a larger model.vocab_size"
    )
