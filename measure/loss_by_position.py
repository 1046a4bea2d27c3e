"""Loss by position on long sequences, through the key/value cache, with keys dropped (definitions §17).

Legend: N sequences, B of a batch, T positions, C positions of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import nan

import numpy as np
import torch

from ..errors import RunError, UsageError
from ..models.attention.kv_cache import KeyValueCache
from ..models.attention.positions import Eviction
from ..models.decoder import Decoder
from .measurement import evaluation_mode
from .next_tokens import first_prediction, mean_and_error

#: Positions that pass at once; the losses do not depend on it.
_PART = 256
#: First keys that a windowed cache keeps beside its window: as many as the published one.
_KEPT = 4


@dataclass(frozen=True)
class Arm:
    """A way of keeping keys, and its losses."""

    evict: int
    """First keys that are gone after the prefix."""
    losses_NT: np.ndarray
    """Loss of the token after each position, nats, float64; NaN where it is not predicted."""

    @cached_property
    def by_position(self) -> np.ndarray:
        """Mean over sequences, ``[T]``."""
        return self.losses_NT.mean(0)

    def between(self, start: int, stop: int) -> tuple[float, float]:
        """Return the mean over positions ``start … stop − 1``, and its standard error over sequences; NaN where none of
        them predicts a token.
        """
        return _mean_and_error(self.losses_NT[:, start:stop])


@dataclass(frozen=True)
class LengthResult:
    """Losses of a model's arms on the same sequences."""

    model: str
    prefix: int
    """Positions that are read with all keys."""
    window: int | None
    """Keys of a windowed cache; None where all others stay."""
    arms: list[Arm]

    @property
    def length(self) -> int:
        """Positions."""
        return self.arms[0].losses_NT.shape[1]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The prefix, as far as it is read, then up to twice, four times … its length: first position and one past the
        last.
        """
        edges = [0, min(self.prefix, self.length)]
        while edges[-1] < self.length:
            edges.append(min(2 * edges[-1], self.length))
        return list(pairwise(edges))

    def cost(self, arm: Arm) -> tuple[float, float] | None:
        """Return the mean loss behind the prefix minus that of the arm that evicts nothing, and its standard error over
        sequences.

        None without such an arm, or with nothing behind the prefix.
        """
        whole = next((other for other in self.arms if other.evict == 0), None)
        if whole is None or whole is arm or self.length <= self.prefix:
            return None
        # Both arms read the same sequences, so their difficulty cancels.
        return _mean_and_error((arm.losses_NT - whole.losses_NT)[:, self.prefix :])


def _mean_and_error(losses_NT: np.ndarray) -> tuple[float, float]:
    if np.isnan(losses_NT).all():
        return nan, nan
    return mean_and_error(np.nanmean(losses_NT, axis=1))


def check_reach(model: str, positions: str, max_seq_len: int, length: int) -> None:
    """Check that a model can read so many positions.

    Raises:
        UsageError: the model's learned positions end before.
    """
    if positions == "learned" and length > max_seq_len:
        raise UsageError(
            f"{model}: cannot read {length} positions, its learned ones end at {max_seq_len}; give --to {max_seq_len} "
            "with a shorter --prefix, or leave it out"
        )


def evictions(evict: Sequence[int], prefix: int, window: int | None) -> dict[int, Eviction | None]:
    """Return the eviction of each arm's cache, by the number of first keys that are dropped.

    A windowed cache keeps its last ``window`` keys, and the first four, or as many as the largest of ``evict``.
    """
    kept = max(_KEPT, *evict) if window is not None else 0
    return {
        n: None if n == 0 and window is None else Eviction(prefix, first=n, window=window, kept=kept) for n in evict
    }


def loss_by_position(
    model: Decoder,
    tokens_NT: np.ndarray,
    eviction: Eviction | None,
    *,
    batch_size: int = 8,
    part: int = _PART,
    advance: Callable[[int], object] = lambda n_positions: None,
) -> np.ndarray:
    """Compute the loss of every next token, in nats, float64 ``[N, T]``, for T + 1 tokens; the model is left unchanged.

    Args:
        model: the decoder.
        tokens_NT: int64 ``[N, T + 1]``.
        eviction: keys that its cache drops; None: nothing.
        batch_size: sequences at once.
        part: positions at once, from the first position that misses keys.
        advance: called with the number of sequences times positions just finished.

    Raises:
        UsageError: there is nothing to predict behind the prefix of a prefix-LM.
        RunError: a loss is NaN or inf.
        ValueError: more positions than a learned table holds.
    """
    device = model.embed.weight.device
    length, first = tokens_NT.shape[1] - 1, first_prediction(model.config, tokens_NT.shape[1])
    # The positions of a prefix-LM's prefix see one another, so that they pass together.
    together = max(part, first + 1)
    sizes = [min(together, length), *[part] * (max(length - together, 0) // part)]
    sizes += [rest] if (rest := length - sum(sizes)) else []
    found = []
    with evaluation_mode(model):
        for tokens_BT in torch.from_numpy(np.ascontiguousarray(tokens_NT)).split(batch_size):
            tokens_BT = tokens_BT.to(device)
            cache = KeyValueCache(model.config, length, eviction)
            losses = []
            for tokens_BC, targets_BC in zip(
                tokens_BT[:, :-1].split(sizes, 1), tokens_BT[:, 1:].split(sizes, 1), strict=True
            ):
                losses.append(model(tokens_BC, targets_BS=targets_BC, cache=cache).per_token.double())
                advance(tokens_BC.numel())
            found.append(torch.cat(losses, dim=1).cpu().numpy())
    losses_NT = np.concatenate(found)
    losses_NT[:, :first] = np.nan
    if not np.isfinite(losses_NT[:, first:]).all():
        raise RunError("the model gives NaN or inf")
    return losses_NT
