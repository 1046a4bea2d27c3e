"""The bigram-backcopy task (definitions §11, arXiv 2410.13835): a language in which an attention sink is useful."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError
from .batches import stream_key, uniforms

if TYPE_CHECKING:
    from torch import Tensor

BOS = 0
TRIGGERS = (1, 2, 3)
_FIRST_ORDINARY = 4
_MIN_VOCAB_SIZE = 8
_TRIGGER_PROBABILITY = 1 / 7  # after an ordinary token; with the copy behind it, 1 position in 8 is a trigger
_MAX_SUCCESSORS = 64  # keeps the table linear in the vocabulary
_LOGIT_STD = 2.0  # a favourite successor holds about a quarter of its row: quick to learn, far from uniform


class BackCopy:
    """An endless source of samples of the task, a pure function of (data_seed, split, sample index).

    Token 0 is BOS, tokens 1 to 3 are triggers, the rest are ordinary. After an ordinary token the next follows a fixed
    table: a trigger with probability 1/7, else one of up to 64 ordinary successors, weighted by a softmax of normal
    logits. After a trigger the token before it is repeated, so that token is always ordinary: a trigger follows
    neither BOS nor a trigger, and the first ordinary token is uniform. ``data_seed`` decides table and samples; the
    splits share the table and no sample.

    Raises:
        UsageError: fewer than 8 tokens in the vocabulary, or fewer than 2 in a sequence.
    """

    n_tokens: int | None = None
    n_samples: int | None = None

    def __init__(self, vocab_size: int, seq_len: int, data_seed: int, split: str = "train", bos: bool = True) -> None:
        if vocab_size < _MIN_VOCAB_SIZE:
            raise UsageError(
                f"model.vocab_size: {vocab_size} is too small for data.path 'backcopy'; give at least "
                f"{_MIN_VOCAB_SIZE} (BOS, 3 triggers, 4 ordinary tokens)"
            )
        if seq_len < 2:
            raise UsageError(f"model.max_seq_len: {seq_len} is too short for data.path 'backcopy'; give 2 or more")
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.data_seed = data_seed
        self.split = split
        self.bos = bos
        self._draw_table()

    def _draw_table(self) -> None:
        n_ordinary = self.vocab_size - _FIRST_ORDINARY
        n_successors = min(n_ordinary, _MAX_SUCCESSORS)
        seed = int.from_bytes(stream_key("backcopy table", self.data_seed)[:16], "little")
        rng = np.random.Generator(np.random.Philox(key=seed))
        logits = rng.standard_normal((n_ordinary, n_successors)) * _LOGIT_STD
        weights = np.exp(logits - logits.max(1, keepdims=True))
        successors = (
            np.broadcast_to(np.arange(n_ordinary), (n_ordinary, n_ordinary))
            if n_ordinary == n_successors
            else _distinct(rng, n_ordinary, n_successors)
        )
        trigger_weights = np.exp(rng.standard_normal((n_ordinary, len(TRIGGERS))))
        self._successors = np.concatenate(
            [np.broadcast_to(TRIGGERS, trigger_weights.shape), successors + _FIRST_ORDINARY], axis=1
        ).astype(np.int64)
        self._probabilities = np.concatenate(
            [
                _TRIGGER_PROBABILITY * trigger_weights / trigger_weights.sum(1, keepdims=True),
                (1 - _TRIGGER_PROBABILITY) * weights / weights.sum(1, keepdims=True),
            ],
            axis=1,
        )
        # Row r's cumulative weights lie in (r, r + 1]: one search then serves samples of all rows at once.
        cumulative = self._probabilities.cumsum(1)
        self._search = (cumulative / cumulative[:, -1:] + np.arange(n_ordinary)[:, None]).ravel()

    def next_token_probabilities(self, previous: int) -> np.ndarray:
        """Return the distribution of the token after ``previous`` (BOS or ordinary), float64 ``[vocab_size]``.

        Raises:
            ValueError: ``previous`` is a trigger, after which the token before it decides.
        """
        if previous in TRIGGERS:
            raise ValueError(f"token {previous} is a trigger: what follows is a copy")
        p_V = np.zeros(self.vocab_size)
        if previous == BOS:
            p_V[_FIRST_ORDINARY:] = 1 / (self.vocab_size - _FIRST_ORDINARY)
        else:
            row = previous - _FIRST_ORDINARY
            p_V[self._successors[row]] = self._probabilities[row]
        return p_V

    def next_token_entropy(self) -> np.ndarray:
        """Return the exact entropy of the token after each token, in nats, float64 ``[vocab_size]``; 0 after triggers.

        Its mean over a batch's inputs is the expected loss of a perfect model behind these inputs; :meth:`least_losses`
        are its losses on the tokens that were drawn.
        """
        entropy_V = np.zeros(self.vocab_size)
        entropy_V[BOS] = np.log(self.vocab_size - _FIRST_ORDINARY)
        entropy_V[_FIRST_ORDINARY:] = -(self._probabilities * np.log(self._probabilities)).sum(1)
        return entropy_V

    def least_losses(self, samples_NS: np.ndarray) -> np.ndarray:
        """Return a perfect model's losses on samples: −ln p of each token behind the first, in nats, float64 ``[N, S −
        1]``; 0 after triggers.
        """
        before_NT, after_NT = samples_NS[:, :-1], samples_NS[:, 1:]
        p_NT = np.ones(before_NT.shape)
        p_NT[before_NT == BOS] = 1 / (self.vocab_size - _FIRST_ORDINARY)
        # A sample at a time: rows of the table for every token of a batch take 67 times its memory.
        for p_T, before_T, after_T in zip(p_NT, before_NT, after_NT, strict=True):
            drawn_T = before_T >= _FIRST_ORDINARY
            rows = before_T[drawn_T] - _FIRST_ORDINARY
            p_T[drawn_T] = self._probabilities[rows].sum(1, where=self._successors[rows] == after_T[drawn_T, None])
        return -np.log(p_NT)

    def batch(self, first_sample: int, n: int) -> np.ndarray:
        """Return samples ``first_sample`` to ``first_sample + n``: int64 ``[n, seq_len + 1]``."""
        length = self.seq_len + 1
        u_TN = uniforms(
            "backcopy", self.split, self.data_seed, first=first_sample, shape=(n, length)
        ).T  # one contiguous-in-time row per step reads as the recurrence does
        out_TN = np.empty((length, n), dtype=np.int64)
        start = 0
        if self.bos:
            out_TN[0] = BOS
            start = 1
        out_TN[start] = _FIRST_ORDINARY + (u_TN[start] * (self.vocab_size - _FIRST_ORDINARY)).astype(np.int64)
        row_length = self._successors.shape[1]
        flat_successors = self._successors.ravel()
        for t in range(start + 1, length):
            after_trigger = out_TN[t - 1] < _FIRST_ORDINARY
            # Behind a trigger the search reads the token before it: any ordinary row will do, its draw is unused.
            rows = np.where(after_trigger, out_TN[t - 2], out_TN[t - 1]) - _FIRST_ORDINARY
            found = np.searchsorted(self._search, rows + u_TN[t], side="right")
            # Adding the row rounds the draw, at worst up to the next row's first entry.
            found = np.minimum(found, rows * row_length + row_length - 1)
            out_TN[t] = np.where(after_trigger, out_TN[t - 2], flat_successors[found])
        return np.ascontiguousarray(out_TN.T)


def _distinct(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Draw ``columns`` different numbers below ``rows`` for each row, int64 ``[rows, columns]``."""
    return np.stack([rng.choice(rows, columns, replace=False) for _ in range(rows)])


def trigger_mask(inputs_BT: Tensor) -> Tensor:
    """Return True where the input token is a trigger, whose target is the copy; bool ``[B, T]``."""
    return (inputs_BT >= TRIGGERS[0]) & (inputs_BT <= TRIGGERS[-1])


def token_texts(ids: Sequence[int]) -> list[str]:
    """Name the tokens: ``BOS``, ``T1`` to ``T3``, then ``a1``, ``a2``, …"""
    return ["BOS" if i == BOS else f"T{i}" if i in TRIGGERS else f"a{i - _FIRST_ORDINARY + 1}" for i in ids]
