"""From documents to sequences of one length: the cuts that ``data.packing`` and ``data.bos`` choose among."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import override

from ..errors import UsageError
from .batches import Cut, PlainCut, Tokens
from .cache import build_once, facts_of_files, fingerprint
from .config import DataConfig
from .tokenizer import TextTokenizer

if TYPE_CHECKING:
    from torch import Tensor


# ---------------------------------------------------------------- beginnings of documents in sequences of token ids

PADDING = -100
"""Value in samples at places without a token; as a target it counts nowhere."""


@dataclass(frozen=True)
class DocumentBorders:
    """Rule by which ids mark the beginnings of documents: an end-of-text token closes each."""

    end: int
    """The end-of-text token."""
    start: int | None = None
    """BOS, if it comes before every document. If the end-of-text token is also BOS, the two alternate: after text it
    ends a document, before text it begins one.
    """
    behind_bos: bool = False
    """True if every sequence begins with a BOS that belongs to no document; it counts to the first document there."""

    def documents(self, tokens_BT: Tensor) -> Tensor:
        """Return the number of each position's document in its sequence, from 0, rising: int64 ``[B, T]``; −1 for
        padding.

        A sequence may begin inside a document.
        """
        ends_BT = tokens_BT == self.end
        opens_BT = self._opens(tokens_BT, ends_BT)
        begins_BT = tokens_BT.new_zeros(tokens_BT.shape)
        begins_BT[:, 1:] = (ends_BT & ~opens_BT)[:, :-1] | opens_BT[:, 1:]
        if self.behind_bos:
            begins_BT[:, 1:2] = 0
        return begins_BT.cumsum(1).masked_fill(tokens_BT < 0, -1)

    def _opens(self, tokens_BT: Tensor, ends_BT: Tensor) -> Tensor:
        """Mark the positions of BOS tokens of documents."""
        if self.start is None:
            return ends_BT & False
        if self.start != self.end:
            return tokens_BT == self.start
        place_BT = ends_BT.new_ones(ends_BT.shape).cumsum(1)
        # Start of the run of such tokens: the position behind the last other token.
        before_BT = (place_BT * ~ends_BT).cummax(1).values
        # A run that a sequence begins with may have begun before it, but its last is known where text follows.
        leading_BT = before_BT == 0
        n_leading_B1 = leading_BT.sum(1, keepdim=True)
        follows_B1 = tokens_BT.gather(1, n_leading_B1.clamp(max=tokens_BT.shape[1] - 1))
        last_B1 = n_leading_B1.where((follows_B1 >= 0) & (follows_B1 != self.end), 1)
        in_run_BT = place_BT - last_B1.where(leading_BT, before_BT)
        return ends_BT & (in_run_BT % 2 == 0)


# ---------------------------------------------------------------- pieces of text that share a sequence
# Assignment of pieces of text to sequences of one length.


def in_order(sizes_P: np.ndarray, capacity: int) -> np.ndarray:
    """Put each piece into the sequence of the one before it if it fits, else into a new one.

    Args:
        sizes_P: tokens of each piece, 1 to ``capacity``.
        capacity: tokens that a sequence holds.

    Returns:
        The sequence of each piece, int64 ``[P]``, rising.
    """
    ends_P = np.cumsum(sizes_P, dtype=np.int64)
    bin_P = np.empty(len(sizes_P), dtype=np.int64)
    first, before, number = 0, 0, 0
    while first < len(sizes_P):
        past = int(np.searchsorted(ends_P, before + capacity, side="right"))
        bin_P[first:past] = number
        first, before, number = past, int(ends_P[past - 1]), number + 1
    return bin_P


def best_fit(sizes_P: np.ndarray, capacity: int) -> np.ndarray:
    """Pack by best-fit decreasing (arXiv 2404.10830): pieces from the largest to the smallest, each into the sequence
    in which it leaves the least room, or into a new one if it fits nowhere.

    Pieces of one size go in together, so that the time grows with the number of different sizes and rooms, not with
    pieces.

    Args:
        sizes_P: tokens of each piece, 1 to ``capacity``.
        capacity: tokens that a sequence holds.

    Returns:
        The sequence of each piece, int64 ``[P]``.
    """
    bin_P = np.empty(len(sizes_P), dtype=np.int64)
    order_P = np.argsort(-sizes_P, kind="stable")
    values, firsts = np.unique(-sizes_P[order_P], return_index=True)
    lasts = [*firsts.tolist(), len(order_P)][1:]
    # Sequences by the room that is left in them, and the rooms that there are, rising.
    by_room: dict[int, deque[np.ndarray]] = {}
    rooms: list[int] = []
    n_bins = 0

    def put_back(room: int, bins: np.ndarray) -> None:
        if room and len(bins):
            if room not in by_room:
                by_room[room] = deque()
                insort(rooms, room)
            by_room[room].append(bins)

    for size, first, last in zip((-values).tolist(), firsts.tolist(), lasts, strict=True):
        while first < last:
            at = bisect_left(rooms, size)
            # A sequence that took one piece has the least room of all that take another: it goes on until it is full.
            if at == len(rooms):
                room = capacity
                bins = np.arange(n_bins, n_bins + -(-(last - first) // (room // size)))
                n_bins += len(bins)
            else:
                room = rooms[at]
                waiting = by_room[room]
                bins, wanted = waiting.popleft(), -(-(last - first) // (room // size))
                if len(bins) > wanted:
                    waiting.appendleft(bins[wanted:])
                    bins = bins[:wanted]
                if not waiting:
                    del by_room[room], rooms[at]
            each = room // size
            taken = min(last - first, each * len(bins))
            bin_P[order_P[first : first + taken]] = np.repeat(bins, each)[:taken]
            n_full, left_over = divmod(taken, each)
            put_back(room - each * size, bins[:n_full])
            put_back(room - left_over * size, bins[n_full : n_full + (left_over > 0)])
            first += taken
    return bin_P


# ---------------------------------------------------------------- pieces of documents in each sequence
# Index of the pieces of documents in each sequence, built once for a corpus and kept beside its shards.

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


def document_starts(tokens: Tokens, end: int | None) -> np.ndarray:
    """Find the first token of each document, int64 ``[D]``, rising: the corpus' first, those of its index, and each
    behind an ``end``.
    """
    ends = [
        np.flatnonzero(tokens.read(np.array([first]), min(_SCANNED, len(tokens) - first))[0] == end) + first
        for first in range(0, len(tokens) if end is not None else 0, _SCANNED)
    ]
    behind = np.concatenate([np.empty(0, dtype=np.int64), *ends]) + 1
    starts = np.concatenate([np.zeros(min(1, len(tokens)), dtype=np.int64), behind[behind < len(tokens)]])
    indexed = tokens.indexed_starts()
    return starts if indexed is None else np.union1d(starts, indexed)


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
    tokens: Tokens, identity: str, cache_dir: Path, *, packing: str, bos: str, seq_len: int, end: int | None
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
        end: the end-of-text token; None: the tokens hold none.
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
    starts_D: np.ndarray, tokens: Tokens, packing: str, bos: str, seq_len: int, end: int | None
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


# ---------------------------------------------------------------- cuts of a corpus into sequences
# Cuts of a corpus' tokens into sequences, among which ``data.packing`` and ``data.bos`` choose.
#
# A cut numbers its sequences; `birthmark.data.batches.FixedWindows` decides their order.


class CutBehindBos(PlainCut):
    """The corpus as one text, each sequence of ``seq_len`` of its tokens behind a BOS."""

    def __init__(self, tokens: Tokens, seq_len: int, bos: int) -> None:
        super().__init__(tokens, seq_len)
        self.bos = bos

    @property
    def n_samples(self) -> int:
        """See `Cut`: every token is a target once."""
        return len(self.tokens) // self.seq_len

    @override
    def read(self, numbers: np.ndarray) -> np.ndarray:
        text = self.tokens.read(numbers * self.seq_len, self.seq_len)
        return np.concatenate([np.full((len(text), 1), self.bos, dtype=np.int64), text], axis=1)


class CutWithBos(PlainCut):
    """The corpus as one text with a BOS before every document."""

    def __init__(self, tokens: Tokens, seq_len: int, bos: int, index: StoredArrays) -> None:
        super().__init__(tokens, seq_len)
        self.bos, self.index = bos, index

    @property
    @override
    def n_samples(self) -> int:
        return max(len(self.tokens) + len(self.index["documents"]) - 1, 0) // self.seq_len

    @override
    def read(self, numbers: np.ndarray) -> np.ndarray:
        starts_D, length = self.index["documents"], self.seq_len + 1
        out = np.full((len(numbers), length), self.bos, dtype=np.int64)
        for row, first in zip(out, (numbers * self.seq_len).tolist(), strict=True):
            # Document d begins at starts[d] + d, behind as many BOS as there are documents before it.
            before = _first_from(starts_D, first)
            behind = _first_from(starts_D, first + length)
            bos = starts_D[before:behind] + np.arange(before, behind) - first
            text = np.ones(length, dtype=bool)
            text[bos] = False
            row[text] = self.tokens.read(np.array([first - before]), int(text.sum()))[0]
        return out


def _first_from(starts_D: np.ndarray, place: int) -> int:
    """Return the first document whose BOS is at ``place`` or behind it."""
    return bisect_left(range(len(starts_D)), place, key=lambda number: int(starts_D[number]) + number)


class PackedCut(Cut):
    """Sequences of whole documents, and of parts of those that are too long, padded at the end.

    Args:
        tokens: tokens of one split.
        seq_len: positions of a sequence.
        index: index of the packing.
        bos: token before every document, or every sequence; None for none.
        at: ``document`` or ``sequence``.
    """

    def __init__(self, tokens: Tokens, seq_len: int, index: StoredArrays, bos: int | None, at: str) -> None:
        super().__init__(tokens, seq_len)
        self.index, self.bos, self.at = index, bos, at

    @property
    @override
    def n_samples(self) -> int:
        return len(self.index["filled"])

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """See `Cut`: padding is `PADDING`."""
        index = self.index
        out = np.full((len(numbers), self.seq_len + 1), PADDING, dtype=np.int64)
        for row, number in zip(out, numbers.tolist(), strict=True):
            at = 0
            if self.bos is not None and self.at == "sequence":
                row[0], at = self.bos, 1
            pieces = slice(int(index["first"][number]), int(index["first"][number + 1]))
            for start, length, begins in zip(
                index["start"][pieces].tolist(),
                index["length"][pieces].tolist(),
                index["begins"][pieces].tolist(),
                strict=True,
            ):
                if begins and self.bos is not None and self.at == "document":
                    row[at] = self.bos
                    at += 1
                row[at : at + length] = self.tokens.read(np.array([start]), length)[0]
                at += length
        return out

    @override
    def n_targets(self, numbers: np.ndarray) -> np.ndarray:
        return np.asarray(self.index["filled"][numbers]) - 1

    @property
    @override
    def padding(self) -> float:
        places = self.n_samples * (self.seq_len + 1)
        return 1 - float(self.index["filled"].sum()) / places if places else 0.0


@dataclass(frozen=True)
class Layout:
    """Cutting of a run's sequences, with its consequences for documents."""

    packing: str
    bos: str
    """``document``, ``sequence`` or ``none``."""
    end_token: int | None
    bos_token: int | None
    indexed: bool = False
    """True if the tokens' files say where documents begin."""

    def __post_init__(self) -> None:
        needs_end = (self.packing != "concat" or self.bos == "document") and not self.indexed
        if needs_end and self.end_token is None:
            what = f"packing {self.packing}" if self.packing != "concat" else "bos document"
            raise UsageError(
                f"data.{what}: data.tokenizer has no end-of-text token, which would say where documents end; give one "
                "that has, data.end_token of token files, or packing concat without bos document"
            )
        if self.bos != "none" and self.bos_token is None:
            raise UsageError(
                f"data.bos {self.bos}: data.tokenizer has neither BOS nor an end-of-text token; give one that "
                "has, data.end_token of token files, or bos none"
            )

    @classmethod
    def of(cls, config: DataConfig, tokenizer: TextTokenizer | None, tokens: Tokens | None = None) -> Layout:
        """Return the layout for the config of one source. Documents end at ``data.end_token``, or else at the
        tokenizer's end-of-text token, and where the files of ``tokens`` say it; BOS is the token that the tokenizer
        puts before texts, or else the same token.
        """
        end_of_text, before = (None, []) if tokenizer is None else (tokenizer.end_of_text, tokenizer.before_text)
        end = end_of_text if config.end_token is None else config.end_token
        bos = before[-1] if before else end
        marked = None if tokens is None else tokens.end_indexed(end)
        if marked is False:
            end = None  # the ids do not show the documents that the files' index knows
        return cls(config.packing, config.bos_at, end, bos, indexed=marked is not None)

    @property
    def borders(self) -> DocumentBorders | None:
        """Rule by which ids mark the beginnings of documents; None without one."""
        if self.end_token is None:
            return None
        start = self.bos_token if self.bos == "document" else None
        return DocumentBorders(self.end_token, start, self.bos == "sequence")

    def facts(self, of_tokens: dict[str, Any], cut: Cut) -> dict[str, Any]:
        """Return the facts about the tokens for a run's record, with those about its training sequences unless they are
        cut in the default way.
        """
        if self.packing == "concat" and self.bos == "none":
            return of_tokens
        found = {"packing": self.packing, "bos": self.bos, "sequences": cut.n_samples, "padding": cut.padding}
        if self.bos == "document" and of_tokens["bytes_per_token"] is not None:
            # Validation counts each BOS as a token too.
            n_tokens, n_bos = of_tokens["tokens"]["val"], of_tokens["documents"]["val"]
            found["bytes_per_token"] = of_tokens["bytes_per_token"] * n_tokens / (n_tokens + n_bos)
        return {**of_tokens, **found}

    def cut(self, tokens: Tokens, split: str, *, seq_len: int, of: dict[str, Any], cache_dir: Path) -> Cut:
        """Cut one split into sequences.

        Args:
            tokens: tokens of the split.
            split: name of the split.
            seq_len: positions of a sequence.
            of: values that, with ``split``, identify these tokens.
            cache_dir: folder for an index.
        """

        def index() -> StoredArrays:
            by_index = {"indexed": True} if self.indexed else {}
            identity, how = fingerprint(of=of, split=split, **by_index), {"packing": self.packing, "bos": self.bos}
            return packed(tokens, identity, cache_dir, seq_len=seq_len, end=self.end_token, **how)

        if self.packing != "concat":
            return PackedCut(tokens, seq_len, index(), self.bos_token if self.bos != "none" else None, self.bos)
        return _CONCAT[self.bos](tokens, seq_len, self.bos_token, index)


def common_borders(layouts: Iterable[Layout]) -> DocumentBorders | None:
    """Return the rule for beginnings of documents that all sources share; None if they have none or differ."""
    found = {layout.borders for layout in layouts}
    return found.pop() if len(found) == 1 else None


_CONCAT: dict[str, Callable[[Tokens, int, int | None, Callable[[], StoredArrays]], Cut]] = {
    "none": lambda tokens, seq_len, bos, index: PlainCut(tokens, seq_len),
    "sequence": lambda tokens, seq_len, bos, index: CutBehindBos(tokens, seq_len, bos or 0),
    "document": lambda tokens, seq_len, bos, index: CutWithBos(tokens, seq_len, bos or 0, index()),
}
