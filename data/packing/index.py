"""Index of the pieces of documents in each sequence, built once for a corpus and kept beside its shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..batches import Tokens
from ..cache import build_once, facts_of_files, fingerprint
from .bins import best_fit, in_order

_FORMAT = 2
_SCANNED = 1 << 22
#: Functions that pack pieces, by ``data.packing``.
PACKINGS = {"documents": in_order, "best_fit": best_fit}


class Pieces(NamedTuple):
    """Parts of documents, as long as a sequence at most, in the corpus' order."""

    start: np.ndarray
    """The first token in the corpus, int64 ``[P]``."""
    length: np.ndarray
    """Tokens, int64 ``[P]``."""
    begins: np.ndarray
    """True if a document begins with it, bool ``[P]``."""


class StoredArrays:
    """Arrays of a folder, mapped into memory. Pickles as the folder's name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._arrays: dict[str, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_arrays": {}}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._arrays:
            # numpy refuses to map an empty file.
            path = self.folder / f"{name}.npy"
            self._arrays[name] = np.load(path, mmap_mode="r" if path.stat().st_size > _EMPTY_BYTES else None)
        return self._arrays[name]


_EMPTY_BYTES = 128


def document_starts(tokens: Tokens, end: int) -> np.ndarray:
    """Find the first token of each document, int64 ``[D]``, rising: the corpus' first, and each behind an ``end``."""
    ends = [
        np.flatnonzero(tokens.read(np.array([first]), min(_SCANNED, len(tokens) - first))[0] == end) + first
        for first in range(0, len(tokens), _SCANNED)
    ]
    behind = np.concatenate([np.empty(0, dtype=np.int64), *ends]) + 1
    return np.concatenate([np.zeros(min(1, len(tokens)), dtype=np.int64), behind[behind < len(tokens)]])


def pieces_of(starts_D: np.ndarray, n_tokens: int, seq_len: int, bos: str) -> Pieces:
    """Split documents into pieces that fit a sequence of ``seq_len + 1`` tokens.

    A document's pieces overlap by the token that is the last target of one and the first input of the next. With a BOS
    before every sequence they do not: BOS is that input, and takes the place of a token. A piece with nothing to
    predict is left out.

    Args:
        starts_D: first token of each document.
        n_tokens: tokens of the corpus.
        seq_len: positions of a sequence.
        bos: ``document``, ``sequence`` or ``none``.
    """
    extra = int(bos == "document")
    lengths_D = np.diff(starts_D, append=n_tokens) + extra
    places, stride = (seq_len, seq_len) if bos == "sequence" else (seq_len + 1, seq_len)
    overlap = places - stride
    n_pieces_D = np.maximum(1, -(-(lengths_D - overlap) // stride))
    of_P = np.repeat(np.arange(len(starts_D)), n_pieces_D)
    number_P = np.arange(len(of_P)) - np.repeat(np.cumsum(n_pieces_D) - n_pieces_D, n_pieces_D)
    # Counted from a BOS that the corpus does not hold.
    first_P = number_P * stride
    length_P = np.minimum(places, lengths_D[of_P] - first_P)
    begins_P = number_P == 0
    keeps_P = length_P > overlap
    start_P = starts_D[of_P] + first_P - extra * ~begins_P
    pieces = Pieces(start_P, length_P - extra * begins_P, begins_P)
    return Pieces(*(array[keeps_P] for array in pieces))


def packed(
    tokens: Tokens, identity: str, cache_dir: Path, *, packing: str, bos: str, seq_len: int, end: int
) -> StoredArrays:
    """Build or load the index of a packing: ``start``, ``length`` and ``begins`` of the pieces (`Pieces`), sequence by
    sequence; ``first``, the first piece of each sequence, and one past the last, int64 ``[N + 1]``; ``filled``, tokens
    of each sequence with BOS, int64 ``[N]``. For ``concat`` it has only ``documents`` (`document_starts`).

    Args:
        tokens: tokens of one split.
        identity: text that identifies these tokens.
        cache_dir: ``data.cache_dir``.
        packing: ``data.packing``.
        bos: ``data.bos``, resolved.
        seq_len: positions of a sequence.
        end: the end-of-text token.
    """
    how = {"packing": packing, "bos": bos, "seq_len": seq_len} if packing != "concat" else {"packing": packing}
    key = fingerprint(format=_FORMAT, tokens=identity, n_tokens=len(tokens), end=end, **how)

    def build(scratch: Path) -> dict[str, Any]:
        starts_D = document_starts(tokens, end)
        arrays = {"documents": starts_D}
        if packing != "concat":
            arrays = _packed(starts_D, tokens, packing, bos, seq_len, end)
        for name, array in arrays.items():
            np.save(scratch / f"{name}.npy", array)
        return {"files": facts_of_files(scratch)}

    folder = cache_dir / f"packing-{key[:16]}"
    build_once(folder, build)
    return StoredArrays(folder)


def _as_they_come(bin_P: np.ndarray) -> np.ndarray:
    """Number the bins in the order of their first pieces in the corpus: validation reads the first bins, and a packing
    that begins with the longest pieces would give it those alone.
    """
    _, first_N, of_P = np.unique(bin_P, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first_N))[of_P]


def _packed(
    starts_D: np.ndarray, tokens: Tokens, packing: str, bos: str, seq_len: int, end: int
) -> dict[str, np.ndarray]:
    pieces = pieces_of(starts_D, len(tokens), seq_len, bos)
    capacity = seq_len if bos == "sequence" else seq_len + 1
    filled_P = pieces.length + pieces.begins * (bos == "document")
    size_P = filled_P.copy()
    if len(size_P) and tokens.read(np.array([len(tokens) - 1]), 1)[0, 0] != end:
        # Nothing would say where the corpus' last document ends: it has its sequence to itself.
        size_P[-1] = capacity
    bin_P = _as_they_come(PACKINGS[packing](size_P, capacity))
    order_P = np.argsort(bin_P, kind="stable")
    n_bins = int(bin_P.max(initial=-1)) + 1
    first = np.searchsorted(bin_P[order_P], np.arange(n_bins + 1))
    filled = np.bincount(bin_P, weights=filled_P, minlength=n_bins).astype(np.int64) + (bos == "sequence")
    found = {name: array[order_P] for name, array in pieces._asdict().items()}
    return {**found, "first": first, "filled": filled}
