"""Attention sinks, from rows of weights a block at a time: never from a T×T matrix (definitions §5) [AS, SO]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from .summed_metrics import AdditiveMetric

#: The logarithm of a weight costs as much as the softmax: at most so many queries of a sequence tell its entropy.
_ENTROPY_QUERIES = 64
_TINY = 1e-30

_QUERY_BLOCK = 32  # small enough that a block of weights stays in cache while it is summed


class Weights(Protocol):
    """The attention weights of one layer, rows on demand."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the weights of the queries ``start … stop − 1`` on keys 0, 1, …: float32 or wider ``[B, H, stop −
        start, keys]``, at least ``stop`` keys; the caller may write into it.
        """

    def row_sum(self) -> Tensor | None:
        """Return each query's sum of absolute weights ``[B, H, T]``; None if it is 1 by construction."""


class WeightSums(Protocol):
    """Sums over the weights of a causal attention that were taken without blocks of weights; C kinds: weights as they
    are and, last, divided by their row's sum.
    """

    @property
    def received_CBHT(self) -> Tensor:  # noqa: N802 - a shape suffix
        """``Σ_t a[t, j]`` over the queries t ≥ 1."""

    @property
    def first_CBH(self) -> Tensor:  # noqa: N802
        """``a[0, 0]``."""

    @property
    def squares_CBHT(self) -> Tensor:  # noqa: N802
        """``Σ_j a[t, j]²``."""

    @property
    def entropy_BHT(self) -> Tensor:  # noqa: N802
        """``−Σ_j p ln p``, p the weights over their row's sum."""

    @property
    def largest_BHT(self) -> Tensor:  # noqa: N802
        """Largest score of each query on a key that it sees."""

    @property
    def weights_on(self) -> Callable[[Tensor], Tensor]:
        """Function from one key of each query ``[B, T]`` to the weights on it ``[C, B, H, T]``."""


class KeySums(NamedTuple):
    """Sums of the weights that queries give to keys: raw weights (0) and weights divided by their row's sum (1). A row
    without any weight has 0 for all divided values.
    """

    importance_2BHT: Tensor
    """Mean of ``a[t, j]`` over the queries ``t ≥ j`` [AS]."""
    mass_2BH: Tensor
    """Mean of ``a[t, 0]`` over the queries ``t ≥ 1``."""
    squares_2BHT: Tensor
    """``Σ_j a[t, j]²`` of every query."""
    on_first_2BHT: Tensor | None = None
    """``a[t, s]`` of every query on the first token s of its document; None if documents are not separated."""
    entropy_BH: Tensor | None = None
    """Mean over the queries of :func:`entropy_queries` of ``−Σ_j p ln p``, p the weights over their row's sum."""
    largest_BH: Tensor | None = None
    """Largest score of any query on a key that it sees; None where scores are not shown."""


def entropy_queries(n_positions: int) -> range:
    """Return the queries whose entropy is taken: all, or at most 64 evenly spaced ones, the last among them."""
    step = -(-n_positions // _ENTROPY_QUERIES)
    return range((n_positions - 1) % step, n_positions, step)


@lru_cache(maxsize=4)
def _queries_of_keys(n_positions: int, device: torch.device) -> Tensor:
    """Count the queries from each key on, int64 ``[T]``; once for all blocks of a pass."""
    return torch.arange(n_positions, 0, -1, device=device)


class KeySummer:
    """The sums over a layer's weights, from blocks of them or from sums.

    Args:
        shape_BHT: sequences, heads and positions of the layer.
        rows_sum_to_one: if the weights need not be divided by their row's sum.
        causal: if no query gives weight to a later key; in a prefix, some do.
        first_BT: first position of each position's document, if documents are separated.
    """

    def __init__(
        self, shape_BHT: tuple[int, int, int], rows_sum_to_one: bool, causal: bool, first_BT: Tensor | None = None
    ) -> None:
        self.shape_BHT, self.causal, self.first_BT = shape_BHT, causal, first_BT
        self.n_kinds = 1 if rows_sum_to_one else 2
        self.total_CBHT: Tensor | None = None
        self.largest: list[tuple[tuple[slice, slice], Tensor]] = []
        self.entropy_queries = entropy_queries(shape_BHT[2])
        self.found: KeySums | None = None

    def read_scores(self, part: tuple[slice, slice], scores_BHRS: Tensor) -> None:
        """See the scores of a block of queries of some sequences and heads, −inf where a key is not seen."""
        self.largest.append((part, scores_BHRS.amax((2, 3))))

    def read(self, part: tuple[slice, slice], start: int, weights_BHRS: Tensor) -> None:
        """Add the weights of the queries from ``start`` on, of some sequences and heads, on keys 0, 1, …; the queries
        of a part come in order. Overwrites the weights and keeps no reference to them.
        """
        if self.total_CBHT is None:
            # C: the kinds, as they are and normalised.
            self.total_CBHT = weights_BHRS.new_zeros(self.n_kinds, *self.shape_BHT)
            self.norm_CBHT = torch.empty_like(self.total_CBHT)
            self.first_CBH = self.total_CBHT.new_empty(self.total_CBHT.shape[:-1])
            self.negative_entropy_BH = self.total_CBHT.new_empty(self.shape_BHT[:2])
            self.on_first_CBHT = None if self.first_BT is None else torch.zeros_like(self.total_CBHT)
        kinds = [weights_BHRS]
        if self.n_kinds == 2:
            size_BHRS = weights_BHRS.abs()
            level_BHR1 = size_BHRS.sum(-1, keepdim=True)
            # A row without any weight has none to share out.
            kinds.append(size_BHRS.div_(level_BHR1).masked_fill_(level_BHR1 == 0, 0.0))
        stop = start + weights_BHRS.shape[2]
        self._add_entropy(part, start, kinds[-1])
        for kind, block in enumerate(kinds):
            # Here, while the block is in cache: from log-sum-exps they would cost a second attention.
            torch.linalg.vector_norm(block, dim=-1, out=self.norm_CBHT[kind][part][..., start:stop])
            if self.on_first_CBHT is not None and self.first_BT is not None:
                key_BHR1 = self.first_BT[part[0], None, start:stop, None].expand(*block.shape[:3], 1)
                self.on_first_CBHT[kind][part][..., start:stop] = block.gather(-1, key_BHR1)[..., 0]
            if not self.causal:
                block[..., start:].tril_()
            if start == 0:
                self.first_CBH[kind][part] = block[:, :, 0, 0]
            self.total_CBHT[kind][part][..., :stop].add_(block[..., :stop].sum(2))

    def read_sums(self, sums: WeightSums) -> None:
        """Take the sums over all weights, in place of :meth:`read_scores` and :meth:`read`."""
        received_CBHT, queries = sums.received_CBHT, self.entropy_queries
        mass_CBH = received_CBHT[..., 0] / max(self.shape_BHT[2] - 1, 1)
        received_CBHT[..., 0] += sums.first_CBH
        on_first_CBHT = None if self.first_BT is None else sums.weights_on(self.first_BT)
        entropy_BH = sums.entropy_BHT[..., queries.start :: queries.step].mean(-1)
        largest_BH = sums.largest_BHT.amax(-1)
        self.found = self._key_sums(received_CBHT, mass_CBH, sums.squares_CBHT, on_first_CBHT, entropy_BH, largest_BH)

    def _add_entropy(self, part: tuple[slice, slice], start: int, share_BHRS: Tensor) -> None:
        # Few large steps for each part: many small ones cost more than their arithmetic.
        queries = self.entropy_queries
        if start == 0:
            self.kept: list[Tensor] = []
        is_last = start + share_BHRS.shape[2] == self.shape_BHT[2]
        rows_BHRS = share_BHRS[:, :, (queries.start - start) % queries.step :: queries.step]
        # A copy: the reader's weights lie in a buffer that the next block of queries overwrites.
        self.kept.append(rows_BHRS.flatten(2) if is_last else rows_BHRS.clone().flatten(2))
        if is_last:
            # N: the weights of all these queries. 0 · ln 0 is 0.
            kept_BHN = self.kept[0] if len(self.kept) == 1 else torch.cat(self.kept, dim=-1)
            self.kept = []
            self.negative_entropy_BH[part] = kept_BHN.clamp_min(_TINY).log_().mul_(kept_BHN).sum(-1)

    def _largest(self) -> Tensor | None:
        if len(self.largest) < 2:  # none, or one block that is all
            return self.largest[0][1] if self.largest else None
        of_parts = [
            (part, torch.stack([block_BH for _, block_BH in blocks]).amax(0))
            for part, blocks in groupby(self.largest, key=lambda entry: entry[0])
        ]
        if len(of_parts) == 1:
            return of_parts[0][1]
        largest_BH = of_parts[0][1].new_full(self.shape_BHT[:2], -torch.inf)
        for part, of_part in of_parts:
            largest_BH[part] = of_part
        return largest_BH

    def sums(self) -> KeySums:
        """Return the sums, after all queries were read."""
        if self.found is not None:
            return self.found
        assert self.total_CBHT is not None
        mass_CBH = (self.total_CBHT[..., 0] - self.first_CBH) / max(self.shape_BHT[2] - 1, 1)
        entropy_BH = self.negative_entropy_BH / -len(self.entropy_queries)
        squares_CBHT = self.norm_CBHT.square()
        return self._key_sums(self.total_CBHT, mass_CBH, squares_CBHT, self.on_first_CBHT, entropy_BH, self._largest())

    def _key_sums(
        self, total_CBHT: Tensor, mass_CBH: Tensor, squares_CBHT: Tensor, on_first_CBHT: Tensor | None,
        entropy_BH: Tensor, largest_BH: Tensor | None,
    ) -> KeySums:  # fmt: skip
        importance_CBHT = total_CBHT / _queries_of_keys(self.shape_BHT[2], total_CBHT.device)
        importance, mass, squares = (x.expand(2, *x.shape[1:]) for x in (importance_CBHT, mass_CBH, squares_CBHT))
        on_first = None if on_first_CBHT is None else on_first_CBHT.expand_as(importance)
        return KeySums(importance, mass, squares, on_first, entropy_BH, largest_BH)


def key_sums(weights: Weights, n_positions: int, first_BT: Tensor | None = None) -> KeySums:
    """Compute all sums over a layer's weights: from a :class:`KeySummer` in ``weights.reader`` if the layer has one,
    else in one pass over blocks of queries.
    """
    if isinstance(reader := getattr(weights, "reader", None), KeySummer):
        return reader.sums()
    first = weights.rows(0, min(_QUERY_BLOCK, n_positions))
    summer = KeySummer((*first.shape[:2], n_positions), weights.row_sum() is None, causal=False, first_BT=first_BT)
    summer.read((slice(None), slice(None)), 0, first)
    for start in range(_QUERY_BLOCK, n_positions, _QUERY_BLOCK):
        rows = weights.rows(start, min(start + _QUERY_BLOCK, n_positions))
        summer.read((slice(None), slice(None)), start, rows)
    return summer.sums()


class SinkResult(NamedTuple):
    """Float64; ``L`` layers, ``H`` heads, ``T`` positions. The normalised ones are of ``|a|`` over its row's sum."""

    mass: np.ndarray
    """``[L, H]`` mean weight on key 0 over the queries t ≥ 1."""
    uniform: float
    """The mass that uniform attention would give, ``mean 1/(t+1)`` over t ≥ 1."""
    importance: np.ndarray
    """``[L, H, T]`` mean importance of every key."""
    rate: np.ndarray
    """``[L, H, T]`` percentage of samples whose importance of the key exceeds ε."""
    position: np.ndarray
    """``[L, H]`` the key of largest mean importance (int64)."""
    mass_normalised: np.ndarray
    importance_normalised: np.ndarray
    rate_normalised: np.ndarray
    position_normalised: np.ndarray
    rate_grid: np.ndarray
    """``[E, L, H, T]`` the rate at every ε of the grid instead."""
    rate_grid_normalised: np.ndarray


class AttentionSinks(AdditiveMetric):
    """Sink mass, importance, sink rate and sink position per layer and head. States are sums: additive.

    Args:
        n_layers: layers that will be updated.
        n_heads: query heads per layer.
        seq_len: T, the length of every probe sequence, at least 2.
        epsilon: importance above which a key counts as a sink (0.3 at T = 64 is the published setting [AS]).
        grid: further values of ε; each costs one comparison per key, and L·H·T counts.
        rows_sum_to_one: if normalised weights equal the weights, and need not be kept beside them.
    """

    mass_sum: Tensor
    importance_sum: Tensor
    sink_count: Tensor
    n_sequences: Tensor
    epsilons: Tensor

    def __init__(
        self,
        n_layers: int,
        n_heads: int,
        seq_len: int,
        epsilon: float = 0.3,
        grid: Sequence[float] = (),
        *,
        rows_sum_to_one: bool = False,
    ) -> None:
        super().__init__()
        if seq_len < 2:
            raise UsageError(f"the probe has {seq_len} positions: give at least 2")
        self.epsilon, self.grid, self.seq_len = epsilon, tuple(grid), seq_len
        # On the device once, not for every batch.
        epsilons = torch.tensor((epsilon, *self.grid), dtype=torch.float64)
        self.register_buffer("epsilons", epsilons[:, None, None, None, None, None], persistent=False)
        self.n_kinds = 1 if rows_sum_to_one else 2
        self.add_sums(
            mass_sum=(n_layers, self.n_kinds, n_heads),
            importance_sum=(n_layers, self.n_kinds, n_heads, seq_len),
            n_sequences=(n_layers,),
        )
        self.add_sums(torch.int32, sink_count=(1 + len(self.grid), n_layers, self.n_kinds, n_heads, seq_len))

    def update(self, layer: int, weights: Weights | KeySums) -> None:
        """Add a batch of sequences of ``seq_len`` tokens: a layer's weights, or :func:`key_sums` of them."""
        sums = weights if isinstance(weights, KeySums) else key_sums(weights, self.seq_len)
        self.keep(layer, sums.importance_2BHT[: self.n_kinds], sums.mass_2BH[: self.n_kinds])

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        importance_PCBHT, mass_PCBH = tensors_P
        self.mass_sum[places].add_(mass_PCBH.sum(2, dtype=torch.float64))
        self.importance_sum[places].add_(importance_PCBHT.sum(2, dtype=torch.float64))
        is_sink_EPCBHT = importance_PCBHT > self.epsilons.to(importance_PCBHT.dtype)
        self.sink_count[:, places].add_(is_sink_EPCBHT.sum(3, dtype=torch.int32))
        self.n_sequences[places].add_(importance_PCBHT.shape[2])

    def compute(self) -> SinkResult:
        """Return all sink quantities per layer and head."""
        n = self.n_sequences[:, None, None]
        mass = (self.mass_sum / n).cpu().numpy()
        importance = (self.importance_sum / n[..., None]).cpu().numpy()
        rate = (self.sink_count / n[..., None]).mul_(100).cpu().numpy()
        position = importance.argmax(-1)
        normalised = self.n_kinds - 1
        return SinkResult(
            mass[:, 0],
            float(np.mean(1 / np.arange(2, self.seq_len + 1))),
            importance[:, 0],
            rate[0, :, 0],
            position[:, 0],
            mass[:, normalised],
            importance[:, normalised],
            rate[0, :, normalised],
            position[:, normalised],
            rate[1:, :, 0],
            rate[1:, :, normalised],
        )


# ---------------------------------------------------------------- sinks of documents (definitions §5)


class DocumentSinkResult(NamedTuple):
    """Float64; ``L`` layers, ``H`` heads. The normalised one is of ``|a|`` over its row's sum."""

    mass: np.ndarray
    """``[L, H]`` mean weight on the first token of a query's own document."""
    mass_normalised: np.ndarray
    uniform: float
    """Weight under attention that is uniform over the query's own document."""
    n_documents: int
    """Number of these documents that have queries behind their first token."""


class DocumentSinks(AdditiveMetric):
    """Mean of ``a[t, s]`` over the queries t behind the first token s of their document, of documents that begin behind
    position 0: that one is the sequence's, and has a sink mass of its own.

    Args:
        n_layers: layers that will be updated.
        n_heads: query heads per layer.
    """

    mass_sum: Tensor
    uniform_sum: Tensor
    n_queries: Tensor
    n_documents: Tensor

    def __init__(self, n_layers: int, n_heads: int) -> None:
        super().__init__()
        self.add_sums(
            mass_sum=(n_layers, 2, n_heads), uniform_sum=(n_layers,), n_queries=(n_layers,), n_documents=(n_layers,)
        )

    def update(self, layer: int, on_first_2BHT: Tensor, first_BT: Tensor) -> None:
        """Add a batch.

        Args:
            layer: index of the layer, from 0.
            on_first_2BHT: weight of every query on the first token of its document, as it is and over its row's sum.
            first_BT: position of that token.
        """
        place_T = torch.arange(first_BT.shape[1], device=first_BT.device)
        counts_BT = (first_BT > 0) & (place_T > first_BT)
        self.mass_sum[layer].add_((on_first_2BHT.double() * counts_BT[:, None]).sum((1, 3)))
        self.uniform_sum[layer].add_((counts_BT.double() / (place_T - first_BT + 1)).sum())
        self.n_queries[layer].add_(counts_BT.sum())
        self.n_documents[layer].add_((counts_BT & (place_T == first_BT + 1)).sum())

    def compute(self) -> DocumentSinkResult | None:
        """Return means over queries; None without any query."""
        if not self.n_queries.all():
            return None
        mass_L2H = (self.mass_sum / self.n_queries[:, None, None]).cpu().numpy()
        uniform = float(self.uniform_sum[0] / self.n_queries[0])
        return DocumentSinkResult(mass_L2H[:, 0], mass_L2H[:, 1], uniform, int(self.n_documents[0]))
