"""Samples as a pure function of (data_seed, sample index), so that a resumed run needs no loader state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from ..errors import UsageError
from .stored_files import StoredArray, file_bytes, map_tokens, read_together

# ---------------------------------------------------------------- random numbers as functions

_PER_BLOCK = 4  # 64-bit words per step of Philox's counter


def stream_key(*words: str | int) -> bytes:
    """Return 64 bytes that depend on every word and their order, and on nothing else."""
    name = "\x1f".join(str(word) for word in words)
    return hashlib.blake2b(name.encode(), digest_size=64, person=b"birthmark-data").digest()


def uniforms(*words: str | int, first: int, shape: tuple[int, int]) -> np.ndarray:
    """Return rows ``first`` to ``first + shape[0]`` of the stream that ``words`` name: float64 in [0, 1).

    ``shape`` is ``(rows, columns)``; a row depends on the words, its own number and ``columns``, so that any rows can
    be drawn alone. Read from Philox's raw words, whose values numpy keeps fixed across its versions.
    """
    rows, columns = shape
    blocks = -(-columns // _PER_BLOCK)
    key = int.from_bytes(stream_key(*words)[:16], "little")
    raw = np.random.Philox(key=key, counter=first * blocks).random_raw(rows * blocks * _PER_BLOCK)
    return (raw.reshape(rows, blocks * _PER_BLOCK)[:, :columns] >> np.uint64(11)) * 2.0**-53


# ---------------------------------------------------------------- a pseudo-random order that needs no memory

_ROUNDS = 8
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def permuted(positions: np.ndarray, size: int, *words: str | int) -> np.ndarray:
    """Map ``positions`` through a keyed permutation of ``range(size)``.

    Args:
        positions: integers in ``[0, size)``, any shape.
        size: number of things permuted, at least 1.
        words: the key; another key gives an unrelated permutation.

    Returns:
        int64, the shape of ``positions``.

    A Feistel network permutes the smallest square power of two that holds ``size``; a value that lands outside
    ``range(size)`` is sent on until it lands inside (cycle-walking), which keeps the whole a bijection. Time and
    memory do not grow with ``size``.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    round_keys = np.frombuffer(stream_key("permutation", *words), dtype="<u8")[:_ROUNDS]
    walking = positions.reshape(-1).astype(np.uint64)
    result = np.empty(walking.shape, dtype=np.int64)
    where = np.arange(walking.size)
    while where.size:
        walking = _feistel(walking, half, mask, round_keys)
        inside = walking < np.uint64(size)
        result[where[inside]] = walking[inside].astype(np.int64)
        where, walking = where[~inside], walking[~inside]
    return result.reshape(positions.shape)


def _feistel(values: np.ndarray, half: np.uint64, mask: np.uint64, round_keys: np.ndarray) -> np.ndarray:
    left, right = values >> half, values & mask
    for key in round_keys:
        mixed = (right ^ key) * _MULTIPLIER
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MULTIPLIER
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << half) | right


# ---------------------------------------------------------------- arrays kept for the samples that follow

NEAR = 1 << 14
"""Samples that are looked at together: to find eight costs as much as to find a thousand."""


class Nearby:
    """Arrays of samples by their number, computed `NEAR` at a time; the last two lots are kept."""

    def __init__(self) -> None:
        self._lots: dict[int, tuple[np.ndarray, ...]] = {}

    def between(
        self, first: int, last: int, find: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    ) -> tuple[np.ndarray, ...]:
        """Return the arrays of samples ``first`` to ``last``, exclusive: each ``[last - first, ...]``.

        Args:
            first: first sample.
            last: one past them, above ``first``.
            find: function from sample numbers, int64 ``[n]``, to arrays; always the same function.
        """
        found = []
        for number in range(first // NEAR, -(-last // NEAR)):
            lots = self._lots
            if number not in lots:
                # Another dict, so that one that another thread reads stays as it is.
                new = find(np.arange(number * NEAR, (number + 1) * NEAR, dtype=np.int64))
                lots = self._lots = {**(lots if len(lots) < 2 else {}), number: new}
            here = slice(max(first - number * NEAR, 0), last - number * NEAR)
            found.append([array[here] for array in lots[number]])
        return tuple(parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*found, strict=True))


# ---------------------------------------------------------------- batches
# Samples as a pure function of (data_seed, sample index), so that a resumed run needs no loader state.
#
# The global sample index is the number of sequences in all steps before (``step * global_batch_size`` without a ramp)
# and the position in the global batch. An index always gives the same tokens: at any step, on any rank, under any
# micro-batch size and any number of workers.


class BatchSource(Protocol):
    """Source of samples; see the module for the meaning of an index."""

    seq_len: int
    vocab_size: int

    @property
    def n_tokens(self) -> int | None:
        """Tokens in the source; None: endless."""

    @property
    def n_samples(self) -> int | None:
        """Different samples in the source (per epoch); None: endless."""

    def batch(self, first_sample: int, n: int) -> np.ndarray:
        """Return samples ``first_sample`` to ``first_sample + n``: int64 ``[n, seq_len + 1]``; inputs and targets
        overlap. Places without a token hold −100 (`birthmark.data.packing.PADDING`).
        """


class Tokens(Protocol):
    """Tokens as one array, wherever they are stored."""

    def __len__(self) -> int: ...

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read ``length`` tokens from each of ``starts``: int64 ``[n, length]``."""

    def indexed_starts(self) -> np.ndarray | None:
        """Return the first token of each document by the files' indexes, int64 ``[D]``; None if none has one."""

    def end_indexed(self, token: int | None) -> bool | None:
        """Return True if documents of an index end with the token, by some of them; None without an index."""


class JoinedTokens:
    """Parts of arrays, one after another, read as one.

    Subclasses map the arrays, and pickle as the names of these, so that workers map the files themselves.
    """

    limit: int | None = None
    """Upper bound of tokens, exclusive, if known."""

    def _map(self) -> None:
        """Call `_join`."""
        raise NotImplementedError

    def _join(
        self, arrays: Sequence[np.ndarray | StoredArray], array_P: np.ndarray, first_P: np.ndarray, length_P: np.ndarray
    ) -> None:
        """Join parts, each given by the number of its array, its first token there, and its length, at least 1."""
        self._arrays, self._array_P = arrays, array_P
        self._stored = any(isinstance(array, StoredArray) for array in arrays)
        self._ends_P = np.cumsum(length_P, dtype=np.int64)
        # Shift from a place in the whole to the place in its array.
        self._shift_P = first_P - (self._ends_P - length_P)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    def __len__(self) -> int:
        return int(self._ends_P[-1]) if len(self._ends_P) else 0

    def indexed_starts(self) -> np.ndarray | None:
        """Return None: arrays have no index."""
        return None

    def end_indexed(self, token: int | None) -> bool | None:
        """Return None: arrays have no index."""
        return None

    def may_hold_too_large(self, out: np.ndarray) -> bool:
        """Return True if the read tokens hold one that is not below `limit`; negative ones count as large."""
        return self.limit is not None and bool(out.size) and int(out.view(np.uint64).max()) >= self.limit

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read ``length`` tokens from each of ``starts``, across parts if needed; int64 ``[n, length]``."""
        out = np.empty((len(starts), length), dtype=np.int64)
        if self._stored:
            self._read_stored(starts, out)
            return out
        part_N = np.searchsorted(self._ends_P, starts, side="right")
        # Nearly all lie in one part, whose answers are found all at once.
        whole_N = self._ends_P[part_N] - starts >= length
        columns = (starts, part_N, self._array_P[part_N], starts + self._shift_P[part_N], whole_N)
        for row, start, part, array, place, whole in zip(out, *(x.tolist() for x in columns), strict=True):
            if whole:
                row[:] = self._arrays[array][place : place + length]
                continue
            for piece, number, at in self._pieces(row, start, part):
                piece[:] = self._arrays[number][at : at + len(piece)]
        return out

    def _pieces(self, row: np.ndarray, start: int, part: int) -> Iterator[tuple[np.ndarray, int, int]]:
        """Yield the pieces of a row that lies in several parts, from ``part`` on: the piece, the number of its array,
        and its first token there.
        """
        done = 0
        while done < len(row):
            begin = start + done
            n = min(len(row) - done, int(self._ends_P[part]) - begin)
            yield row[done : done + n], int(self._array_P[part]), begin + int(self._shift_P[part])
            done, part = done + n, part + 1

    def _read_stored(self, starts: np.ndarray, out: np.ndarray) -> None:
        """Read all rows together, of which some are in stores."""
        wanted: list[tuple[np.ndarray, StoredArray, int]] = []
        part_N = np.searchsorted(self._ends_P, starts, side="right")
        for row, start, first_part in zip(out, starts.tolist(), part_N.tolist(), strict=True):
            for piece, number, at in self._pieces(row, start, first_part):
                array = self._arrays[number]
                if isinstance(array, StoredArray):
                    wanted.append((piece, array, at))
                else:
                    piece[:] = array[at : at + len(piece)]
        found = read_together([array.place(at, len(to)) for to, array, at in wanted])
        for (to, array, _), content in zip(wanted, found, strict=True):
            to[:] = np.frombuffer(content, array.dtype)


class TokensOfSources(JoinedTokens):
    """Tokens of several sources, one after another. `read` checks nothing: ask `may_hold_too_large`.

    Attributes:
        first_S: int64 ``[sources]``, first token of each source.
    """

    def __init__(self, sources: Sequence[JoinedTokens]) -> None:
        self.sources = list(sources)
        self._map()

    def _map(self) -> None:
        sources = self.sources
        n_arrays = np.cumsum([0, *(len(source._arrays) for source in sources)])
        parts = zip(sources, n_arrays.tolist(), strict=False)
        lengths = [np.diff(source._ends_P, prepend=0) for source in sources]
        firsts = [s._shift_P + s._ends_P - length for s, length in zip(sources, lengths, strict=True)]
        self._join(
            [array for source in sources for array in source._arrays],
            np.concatenate([source._array_P + before for source, before in parts]),
            np.concatenate(firsts),
            np.concatenate(lengths),
        )
        self.first_S = np.cumsum([0, *(len(source) for source in sources)])[:-1]
        self.limit = min((source.limit for source in sources if source.limit is not None), default=None)

    def __getstate__(self) -> dict[str, Any]:
        return {"sources": self.sources}


class ShardedTokens(JoinedTokens):
    """Token shards on disk, read as one array."""

    def __init__(self, paths: Sequence[Path], dtype: str) -> None:
        self.paths = list(paths)
        self.dtype = dtype
        self._map()

    def _map(self) -> None:
        sizes = {path: file_bytes(path) // np.dtype(self.dtype).itemsize for path in self.paths}
        shards = [map_tokens(path, self.dtype, size) for path, size in sizes.items() if size]
        lengths = np.array([len(shard) for shard in shards], dtype=np.int64)
        self._join(shards, np.arange(len(shards)), np.zeros_like(lengths), lengths)

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "dtype": self.dtype}


class Cut:
    """Division of a split's tokens into numbered sequences of ``seq_len + 1``.

    Args:
        tokens: tokens of the split.
        seq_len: positions of a sequence.
    """

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    @property
    def n_samples(self) -> int:
        """Number of sequences."""
        raise NotImplementedError

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Read the sequences with these numbers: int64 ``[n, seq_len + 1]``."""
        raise NotImplementedError

    def n_targets(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of tokens to predict in each of these sequences, at least 1: int64 ``[n]``."""
        return np.full(len(numbers), self.seq_len, dtype=np.int64)

    @property
    def padding(self) -> float:
        """Share of the places of all sequences without a token."""
        return 0.0


class PlainCut(Cut):
    """The corpus as one text: sequences of ``seq_len + 1`` tokens, ``seq_len`` apart."""

    @property
    @override
    def n_samples(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.seq_len

    @override
    def read(self, numbers: np.ndarray) -> np.ndarray:
        return self.tokens.read(numbers * self.seq_len, self.seq_len + 1)


class FixedWindows:
    """Sequences of ``seq_len + 1`` tokens in corpus order: for validation.

    After the last sequence the first follows again.

    Args:
        tokens: tokens of one split.
        seq_len: positions of a sequence.
        vocab_size: vocabulary of the tokens.
        split: name of the split, for errors.
        cut: division of the tokens into sequences; by default they are one text.
        more: what gives the split more tokens, for errors.

    Raises:
        UsageError: the tokens do not fill one window.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        vocab_size: int,
        split: str = "val",
        cut: Cut | None = None,
        more: str = "a larger corpus, a larger data.val_fraction,",
    ) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.cut = cut or PlainCut(tokens, seq_len)
        self.n_tokens = len(tokens)
        self.n_samples = self.cut.n_samples
        if self.n_samples < 1:
            raise UsageError(
                f"data.path: {self.n_tokens} {split} tokens do not fill one window of model.max_seq_len + 1 = "
                f"{seq_len + 1}; give {more} or a smaller model.max_seq_len"
            )

    def windows(self, samples: np.ndarray) -> np.ndarray:
        """Return the window number of each global sample index; int64 ``[n]``."""
        return samples % self.n_samples

    def batch(self, first_sample: int, n: int) -> np.ndarray:
        """See `BatchSource.batch`."""
        return self.samples(np.arange(first_sample, first_sample + n, dtype=np.int64))

    def samples(self, samples: np.ndarray) -> np.ndarray:
        """Read these samples, in any order: int64 ``[n, seq_len + 1]``."""
        return self.cut.read(self.windows(samples))

    def n_targets(self, samples: np.ndarray) -> np.ndarray:
        """Return the number of tokens to predict in each of these samples: int64 ``[n]``."""
        return self.cut.n_targets(self.windows(samples))


class TokenWindows(FixedWindows):
    """Windows like `FixedWindows`, each once per epoch, in an order that ``data_seed`` and the epoch decide: for
    training.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        vocab_size: int,
        data_seed: int,
        split: str = "train",
        cut: Cut | None = None,
    ) -> None:
        super().__init__(tokens, seq_len, vocab_size, split, cut, more="a larger corpus,")
        self.data_seed = data_seed
        self._nearby = Nearby()

    def windows(self, samples: np.ndarray) -> np.ndarray:
        """Return the window number of each global sample index; int64 ``[n]``."""
        # Each epoch has its own order, so lots of neighbours would be too many for short epochs.
        if not len(samples) or self.n_samples < NEAR // 64 or int(samples.max() - samples.min()) > NEAR:
            return self._permuted(samples)
        first = int(samples.min())
        (window_N,) = self._nearby.between(first, int(samples.max()) + 1, lambda near_N: (self._permuted(near_N),))
        return window_N[samples - first]

    def _permuted(self, samples: np.ndarray) -> np.ndarray:
        epochs, positions = np.divmod(samples, self.n_samples)
        out = np.empty_like(samples)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            out[here] = permuted(positions[here], self.n_samples, "order", self.data_seed, epoch)
        return out
