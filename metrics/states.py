"""How unequal the channels and directions of hidden states are: dominance, massive activations, rank (definitions §7).

Sources: dominance ratio and effective rank [SO]; effective rank is that of Roy & Vetterli (EUSIPCO 2007).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric


class DominanceResult(NamedTuple):
    """Float64; ``S`` places, ``T`` positions."""

    by_position: np.ndarray
    """``[S, T]`` mean over sequences of ``max_j |h_j| / mean_j |h_j|``."""
    first: np.ndarray
    """``[S]`` that of position 0."""
    median: np.ndarray
    """``[S]`` the median over all T positions (position 0 among them) of ``by_position``."""


class DominanceRatio(Metric):
    """``max_j |h_j| / mean_j |h_j|`` per place and position: 1 (all channels alike) to d (one channel alone).

    A vector of zeros, in which no channel dominates, counts as 1. States are sums: additive over batches and ranks.
    """

    full_state_update = False
    ratio_sum: Tensor
    n_sequences: Tensor

    def __init__(self, n_places: int, seq_len: int) -> None:
        super().__init__()
        self.add_state("ratio_sum", torch.zeros(n_places, seq_len, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("n_sequences", torch.zeros(n_places, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, place: int, h_BTD: Tensor) -> None:
        """Add a batch of hidden states ``[B, T, d]`` seen at one place."""
        size_BTD = h_BTD.abs()
        largest_BT = size_BTD.amax(-1)
        mean_BT = size_BTD.mean(-1, dtype=torch.promote_types(h_BTD.dtype, torch.float32))
        ratio_BT = (largest_BT / mean_BT).masked_fill(largest_BT == 0, 1.0)
        self.ratio_sum[place].add_(ratio_BT.sum(0, dtype=torch.float64))
        self.n_sequences[place].add_(len(h_BTD))

    def compute(self) -> DominanceResult:
        """Mean ratios of every position, and of position 0 and the median one."""
        by_position = (self.ratio_sum / self.n_sequences[:, None]).cpu().numpy()
        return DominanceResult(by_position, by_position[:, 0], np.median(by_position, axis=-1))


class MassiveResult(NamedTuple):
    """``S`` places, ``k`` entries by falling value."""

    value: np.ndarray
    """``[S, k]`` float64: largest ``|h|`` over the sequences."""
    position: np.ndarray
    """``[S, k]`` int64."""
    channel: np.ndarray
    """``[S, k]`` int64."""


def _merge_two(a_SK3: Tensor, b_SK3: Tensor) -> Tensor:
    """The k largest of both lists; a (position, channel) that is in both counts once, with its larger value."""
    k = a_SK3.shape[1]
    both = torch.cat([a_SK3, b_SK3], dim=1)
    order_SN = both[..., 0].argsort(dim=-1, descending=True, stable=True)
    both = both.gather(1, order_SN[..., None].expand_as(both))
    same_SNN = (both[:, :, None, 1:] == both[:, None, :, 1:]).all(-1)
    both[..., 0].masked_fill_(same_SNN.tril(-1).any(-1), -torch.inf)
    keep_SK = both[..., 0].argsort(dim=-1, descending=True, stable=True)[:, :k]
    return both.gather(1, keep_SK[..., None].expand(-1, -1, 3))


def _merge_lists(lists_WSK3: Tensor) -> Tensor:
    return reduce(_merge_two, lists_WSK3)


class MassiveActivations(Metric):
    """The k (position, channel) pairs of largest ``|h|`` over the sequences, per place.

    The state is the list itself, ``[S, k, 3]`` (value, position, channel). Merging two lists keeps the k largest, which
    is exact: a pair among the k largest of all is among the k largest of the batch in which it took its value.

    Args:
        n_places: places that will be updated.
        seq_len: T, the length of every probe sequence.
        d_model: channels.
        k: length of the list, cut to T·d.
    """

    full_state_update = False
    top: Tensor

    def __init__(self, n_places: int, seq_len: int, d_model: int, k: int = 10) -> None:
        super().__init__()
        empty = torch.full((n_places, min(k, seq_len * d_model), 3), -1.0, dtype=torch.float64)
        empty[..., 0] = -torch.inf
        self.add_state("top", empty, dist_reduce_fx=_merge_lists)

    def update(self, place: int, h_BTD: Tensor) -> None:
        """Add a batch of hidden states ``[B, T, d]`` seen at one place."""
        if len(h_BTD) == 0:
            return
        d_model, k = h_BTD.shape[-1], self.top.shape[1]
        largest_TD = h_BTD.abs().amax(0)
        # The k largest entries are in the k rows of largest maximum.
        rows = largest_TD.amax(-1).topk(min(k, len(largest_TD))).indices
        value, index = largest_TD[rows].flatten().topk(k)
        found = torch.stack([value.double(), rows[index // d_model].double(), (index % d_model).double()], dim=-1)
        self.top[place] = _merge_two(self.top[[place]], found[None])[0]

    def compute(self) -> MassiveResult:
        """The lists."""
        value, position, channel = self.top.cpu().numpy().transpose(2, 0, 1)
        return MassiveResult(value, position.astype(np.int64), channel.astype(np.int64))


class RankResult(NamedTuple):
    """Float64; ``S`` places, ``d`` width."""

    effective_rank: np.ndarray
    """``[S]`` exponential of the entropy of the singular values over their sum: 1 … d; NaN where all are 0."""
    singular_values: np.ndarray
    """``[S, d]`` falling, of the hidden states over the root of their number: their squares add up to ``E‖h‖²``."""


#: Rows of the second moment that are computed together: few enough to skip most of the half that mirrors the other.
_MOMENT_ROWS = 128


class EffectiveRank(Metric):
    """Effective rank of the hidden states of all sequences and positions, per place, from their second moment.

    Singular values of the ``[N·T, d]`` hidden states, not centred, are roots of the eigenvalues of ``Σ h hᵀ``. Of this
    symmetric matrix the state holds the upper half, in blocks of rows: products of a batch in float32 (or the inputs'
    wider type), sums across batches in float64. Rounding leaves singular values below about 10⁻³ of the largest (those
    of few, or collinear, hidden states) uncertain by as much; the others are good to 10⁻⁴. A sum of matrices: additive
    over batches and ranks.

    Args:
        n_places: places that will be updated.
        d_model: width of the hidden states.
    """

    full_state_update = False
    moment: Tensor
    n_vectors: Tensor

    def __init__(self, n_places: int, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model
        size = sum(rows * (d_model - start) for start, rows, _ in self._blocks())
        self.add_state("moment", torch.zeros(n_places, size, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("n_vectors", torch.zeros(n_places, dtype=torch.float64), dist_reduce_fx="sum")

    def _blocks(self) -> Iterator[tuple[int, int, int]]:
        """First row, number of rows and place in the state of every block of rows; columns go from the first row on."""
        offset = 0
        for start in range(0, self.d_model, _MOMENT_ROWS):
            rows = min(_MOMENT_ROWS, self.d_model - start)
            yield start, rows, offset
            offset += rows * (self.d_model - start)

    def _block(self, place: int, start: int, rows: int, offset: int) -> Tensor:
        return self.moment[place, offset : offset + rows * (self.d_model - start)].view(rows, -1)

    def update(self, place: int, h_BTD: Tensor) -> None:
        """Add a batch of hidden states ``[B, T, d]`` seen at one place."""
        h_ND = h_BTD.flatten(0, 1).to(torch.promote_types(h_BTD.dtype, torch.float32))
        with torch.autocast(h_ND.device.type, enabled=False):
            for start, rows, offset in self._blocks():
                self._block(place, start, rows, offset).add_(h_ND[:, start : start + rows].T @ h_ND[:, start:])
        self.n_vectors[place].add_(len(h_ND))

    def compute(self) -> RankResult:
        """Effective rank and singular values of every place, one matrix at a time."""
        values = []
        for place, n in enumerate(self.n_vectors):
            upper_DD = self.moment.new_zeros(self.d_model, self.d_model)
            for start, rows, offset in self._blocks():
                upper_DD[start : start + rows, start:] = self._block(place, start, rows, offset)
            values.append((torch.linalg.eigvalsh(upper_DD, UPLO="U").clamp_min(0) / n).sqrt().flip(0))
        singular_SD = torch.stack(values)
        share_SD = singular_SD / singular_SD.sum(-1, keepdim=True)
        rank_S = torch.special.entr(share_SD).sum(-1).exp()
        return RankResult(rank_S.cpu().numpy(), singular_SD.cpu().numpy())
