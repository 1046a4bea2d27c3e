"""Cuts of a corpus' tokens into sequences, among which ``data.packing`` and ``data.bos`` choose.

A cut numbers its sequences; `birthmark.data.batches.FixedWindows` decides their order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UsageError
from ..batches import Cut, PlainCut, Tokens
from ..cache import fingerprint
from ..config import DataConfig
from ..tokenizer import TextTokenizer
from .borders import PADDING, DocumentBorders
from .index import StoredArrays, packed


class CutBehindBos(PlainCut):
    """The corpus as one text, each sequence of ``seq_len`` of its tokens behind a BOS."""

    def __init__(self, tokens: Tokens, seq_len: int, bos: int) -> None:
        super().__init__(tokens, seq_len)
        self.bos = bos

    @property
    def n_samples(self) -> int:
        """See `Cut`: every token is a target once."""
        return len(self.tokens) // self.seq_len

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """See `Cut`."""
        text = self.tokens.read(numbers * self.seq_len, self.seq_len)
        return np.concatenate([np.full((len(text), 1), self.bos, dtype=np.int64), text], axis=1)


class CutWithBos(PlainCut):
    """The corpus as one text with a BOS before every document."""

    def __init__(self, tokens: Tokens, seq_len: int, bos: int, index: StoredArrays) -> None:
        super().__init__(tokens, seq_len)
        self.bos, self.index = bos, index

    @property
    def n_samples(self) -> int:
        """See `Cut`."""
        return max(len(self.tokens) + len(self.index["documents"]) - 1, 0) // self.seq_len

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """See `Cut`."""
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
    def n_samples(self) -> int:
        """See `Cut`."""
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

    def n_targets(self, numbers: np.ndarray) -> np.ndarray:
        """See `Cut`."""
        return np.asarray(self.index["filled"][numbers]) - 1

    @property
    def padding(self) -> float:
        """See `Cut`."""
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

    def __post_init__(self) -> None:
        needs_end = self.packing != "concat" or self.bos == "document"
        if needs_end and self.end_token is None:
            what = f"packing {self.packing}" if self.packing != "concat" else "bos document"
            raise UsageError(
                f"data.{what}: data.tokenizer has no end-of-text token, which would say where documents end; give one "
                "that has, data.end_token of token files, or packing concat without bos document"
            )
        if self.bos != "none" and self.bos_token is None:
            raise UsageError(
                f"data.bos {self.bos}: data.tokenizer has neither BOS nor an end-of-text token; give one, or bos none"
            )

    @classmethod
    def of(cls, config: DataConfig, tokenizer: TextTokenizer | None) -> Layout:
        """Return the layout for the config of one source. Documents end at ``data.end_token``, or else at the
        tokenizer's end-of-text token; BOS is the token that the tokenizer puts before texts, or else the same token.
        """
        theirs, before = (None, []) if tokenizer is None else (tokenizer.end_of_text, tokenizer.before_text)
        end = theirs if config.end_token is None else config.end_token
        return cls(config.packing, config.bos_at, end, before[-1] if before else end)

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
            assert self.end_token is not None
            identity, how = fingerprint(of=of, split=split), {"packing": self.packing, "bos": self.bos}
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
