"""Inequality of the channels and directions of hidden states: dominance, massive activations, rank (definitions §7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, reduce
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from threadpoolctl import threadpool_limits
from torch import Tensor

from .activation_sums import ActivationSums
from .summed_metrics import AdditiveMetric, PlaceMetric, sum_over_ranks

# ---------------------------------------------------------------- work on many matrices at once

#: Matrices that a GPU works on at once, at most.
_STREAMS = 8


def symmetric_eigenvalues(upper_DD: Tensor) -> Tensor:
    """Return the eigenvalues ``[D]``, rising, of the symmetric matrix whose upper half is given; the part below the
    diagonal is not read. NaN if the matrix is not finite.
    """
    # The solvers raise over inf and NaN. A GPU is not waited for.
    finite = upper_DD.triu().isfinite().all()
    upper_DD = upper_DD.masked_fill(~finite, 0.0)
    if upper_DD.device.type != "cpu":
        return torch.linalg.eigvalsh(upper_DD, UPLO="U").masked_fill(~finite, torch.nan)
    # numpy's OpenBLAS takes .55 of the time of torch's MKL on an AMD processor. In the order of Fortran, the upper half
    # is the lower one.
    return torch.from_numpy(np.linalg.eigvalsh(upper_DD.numpy().T, UPLO="L")).masked_fill(~finite, torch.nan)


def each_at_once(function: Callable[[Tensor], Tensor], matrices: Iterable[Tensor], at_most: int) -> list[Tensor]:
    """Apply ``function`` to every matrix, several at a time. Eigenvalues of matrices of this size gain little from
    several cores, and lose much if the cores are busy; on a GPU a single matrix leaves most of it idle.

    Args:
        function: returns a new tensor; called in threads.
        matrices: all on one device.
        at_most: limit of matrices at once on a GPU, for memory; the CPU takes one per core.
    """
    matrices, n_threads = list(matrices), torch.get_num_threads()
    device_type = matrices[0].device.type if matrices else "cpu"
    if device_type == "cuda" and len(matrices) > 1 and at_most > 1:
        streams = MatrixStreams(matrices[0].device, min(at_most, len(matrices)))
        return streams.results([streams.submit(function, matrix) for matrix in matrices])
    if device_type != "cpu":
        return [function(matrix) for matrix in matrices]
    # numpy's threads do not know of torch's.
    with threadpool_limits(1, user_api="blas"):
        if n_threads == 1 or len(matrices) < 2:
            return [function(matrix) for matrix in matrices]
        try:
            with ThreadPoolExecutor(n_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return list(pool.map(function, matrices))
        finally:
            torch.set_num_threads(n_threads)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Return the same streams at every call: torch keeps memory that was freed on a stream for that stream."""
    return tuple(torch.cuda.Stream(device) for _ in range(_STREAMS))


class MatrixStreams:
    """Streams of a GPU, each with a thread, that apply a function to matrices while the caller's stream goes on.
    Solvers make their thread wait for the device.

    Args:
        device: the GPU.
        at_most: limit of matrices at once.
    """

    def __init__(self, device: torch.device, at_most: int) -> None:
        # Torch loads its solvers at the first call, which fails where that comes from several threads
        # (github.com/pytorch/pytorch/issues/90613).
        torch.linalg.eigvalsh(torch.ones(1, 1, device=device))
        self.device, self.streams = device, _streams(device)[:at_most]
        self._idle: SimpleQueue[torch.cuda.Stream] = SimpleQueue()
        for stream in self.streams:
            self._idle.put(stream)
        self._pool = ThreadPoolExecutor(len(self.streams))

    def submit(self, function: Callable[[Tensor], Tensor], matrix: Tensor) -> Future[Tensor]:
        """Apply ``function``, which returns a new tensor, to a matrix as the caller's stream has it now; it must not
        change afterwards.
        """
        caller = torch.cuda.current_stream(self.device)
        return self._pool.submit(self._apply, function, matrix, caller, caller.record_event())

    def _apply(
        self, function: Callable[[Tensor], Tensor], matrix: Tensor, caller: torch.cuda.Stream, ready: torch.cuda.Event
    ) -> Tensor:
        stream = self._idle.get()
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                stream.wait_event(ready)
                found = function(matrix)
                # Its memory is the stream's, and the caller reads it.
                found.record_stream(caller)
                return found
        finally:
            self._idle.put(stream)

    def results(self, submitted: Iterable[Future[Tensor]]) -> list[Tensor]:
        """Return the results for the caller's stream, and end the threads."""
        self._pool.shutdown(wait=True)
        caller = torch.cuda.current_stream(self.device)
        for stream in self.streams:
            caller.wait_stream(stream)
        return [future.result() for future in submitted]


# ---------------------------------------------------------------- states
# Inequality of the channels and directions of hidden states: dominance, massive activations, rank (definitions §7).
#
# Sources: dominance ratio and effective rank [SO]; effective rank is that of Roy & Vetterli (EUSIPCO 2007).


class DominanceResult(NamedTuple):
    """Float64; ``S`` places, ``T`` positions."""

    by_position: np.ndarray
    """``[S, T]`` mean over sequences of ``max_j |h_j| / mean_j |h_j|``."""
    first: np.ndarray
    """``[S]`` that of position 0."""
    median: np.ndarray
    """``[S]`` the median over all T positions (position 0 among them) of ``by_position``."""


class DominanceRatio(AdditiveMetric):
    """``max_j |h_j| / mean_j |h_j|`` per place and position: 1 (all channels alike) to d (one channel alone).

    A vector of zeros, in which no channel dominates, counts as 1. States are sums: additive over batches and ranks.
    """

    ratio_sum: Tensor
    n_sequences: Tensor

    def __init__(self, n_places: int, seq_len: int) -> None:
        super().__init__()
        self.add_sums(ratio_sum=(n_places, seq_len), n_sequences=(n_places,))

    def update(self, place: int, h_BTD: Tensor | ActivationSums) -> None:
        """Add a batch of hidden states ``[B, T, d]`` seen at one place."""
        sums = ActivationSums.of(h_BTD)
        self.keep(place, sums.largest, sums.mean_size)

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        largest_PBT, mean_PBT = tensors_P
        ratio_PBT = (largest_PBT / mean_PBT).masked_fill_(largest_PBT == 0, 1.0)
        self.ratio_sum[places].add_(ratio_PBT.sum(1, dtype=torch.float64))
        self.n_sequences[places].add_(largest_PBT.shape[1])

    def compute(self) -> DominanceResult:
        """Return the mean ratios of every position, and those of position 0 and of the median position."""
        by_position = (self.ratio_sum / self.n_sequences[:, None]).cpu().numpy()
        return DominanceResult(by_position, by_position[:, 0], np.median(by_position, axis=-1))


class MassiveResult(NamedTuple):
    """Result with ``S`` places and ``k`` entries by falling value, ties by rising position, then by rising channel."""

    value: np.ndarray
    """``[S, k]`` float64: largest ``|h|`` over the sequences."""
    position: np.ndarray
    """``[S, k]`` int64."""
    channel: np.ndarray
    """``[S, k]`` int64."""


def _ordered(list_SN3: Tensor) -> Tensor:
    """Sort entries by falling value, rising position and rising channel."""
    for column, falling in ((2, False), (1, False), (0, True)):
        order_SN = list_SN3[..., column].sort(dim=1, descending=falling, stable=True).indices
        list_SN3 = list_SN3.gather(1, order_SN[..., None].expand(-1, -1, 3))
    return list_SN3


def _merge_two(a_SK3: Tensor, b_SK3: Tensor) -> Tensor:
    """Merge two lists and keep the first k; a (position, channel) in both counts once, with its larger value."""
    k = a_SK3.shape[1]
    same_SKK = (a_SK3[:, :, None, 1:] == b_SK3[:, None, :, 1:]).all(-1)
    in_b_SK = a_SK3[..., 0].maximum(b_SK3[:, None, :, 0].where(same_SKK, -torch.inf).amax(-1))
    only_b_SK = b_SK3[..., 0].masked_fill(same_SKK.any(1), -torch.inf)
    value_SN, place_SN2 = torch.cat([in_b_SK, only_b_SK], dim=1), torch.cat([a_SK3[..., 1:], b_SK3[..., 1:]], dim=1)
    return _ordered(torch.cat([value_SN[..., None], place_SN2], dim=-1))[:, :k]


def _merge_lists(lists_WSK3: Tensor) -> Tensor:
    return reduce(_merge_two, lists_WSK3)


class MassiveActivations(PlaceMetric):
    """The k (position, channel) pairs of largest ``|h|`` over the sequences, per place.

    Among equal values the pair of the lowest position, then of the lowest channel, counts as larger, so the list does
    not depend on how the sequences are split. The state is the list itself, ``[S, k, 3]`` (value, position, channel).
    Merging two lists keeps the k largest, which is exact: a pair among the k largest of all is among the k largest of
    the batch in which it took its value.

    Args:
        n_places: places that will be updated.
        seq_len: T, the length of every probe sequence.
        d_model: channels.
        k: length of the list, at most T·d.
    """

    full_state_update = False
    top: Tensor

    def __init__(self, n_places: int, seq_len: int, d_model: int, k: int = 10) -> None:
        super().__init__()
        self.d_model = d_model
        empty = torch.full((n_places, min(k, seq_len * d_model), 3), -1.0, dtype=torch.float64)
        empty[..., 0] = -torch.inf
        self.add_state("top", empty, dist_reduce_fx=_merge_lists)

    def update(self, place: int, h_BTD: Tensor | ActivationSums) -> None:
        """Add a batch of hidden states ``[B, T, d]`` seen at one place."""
        sums = ActivationSums.of(h_BTD)
        if len(sums.x_BTD):
            self.keep(place, sums.largest_of_sequences)

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        largest_PTD, k = tensors_P[0], self.top.shape[1]
        # The k largest entries are in the k rows of largest maximum. Stable sorts leave ties to the first.
        rows_PR = largest_PTD.amax(-1).argsort(dim=1, descending=True, stable=True)[:, :k].sort(dim=1).values
        of_rows_PRD = largest_PTD.gather(1, rows_PR[..., None].expand(-1, -1, self.d_model))
        value_PK, index_PK = (x[:, :k] for x in of_rows_PRD.flatten(1).sort(dim=1, descending=True, stable=True))
        position_PK, channel_PK = rows_PR.gather(1, index_PK // self.d_model), index_PK % self.d_model
        found_PK3 = torch.stack([value_PK.double(), position_PK.double(), channel_PK.double()], dim=-1)
        self.top[places] = _merge_two(self.top[places], found_PK3)

    def compute(self) -> MassiveResult:
        """Return the lists of values, positions and channels."""
        value, position, channel = self.top.cpu().numpy().transpose(2, 0, 1)
        return MassiveResult(value, position.astype(np.int64), channel.astype(np.int64))


class RankResult(NamedTuple):
    """Float64; ``S`` places, ``d`` width."""

    effective_rank: np.ndarray
    """``[S]`` exponential of the entropy of the singular values over their sum: 1 … d; NaN where all are 0."""
    singular_values: np.ndarray
    """``[S, d]`` falling, of the hidden states over the root of their number: their squares add up to ``E‖h‖²``."""


#: Rows of the second moment that are computed together on the CPU.
_MOMENT_ROWS = 64
#: On a GPU: memory for eigenvalues of several places at once, and matrices that each of them takes: its own, the
#: solver's copy and its work space.
_SOLVER_BYTES, _SOLVER_MATRICES = 1 << 30, 3


class EffectiveRank(AdditiveMetric):
    """Effective rank of the hidden states of all sequences and positions, per place, from their second moment.

    Singular values of the ``[N·T, d]`` hidden states, not centred, are roots of the eigenvalues of ``Σ h hᵀ``. The
    state holds the upper half of this symmetric matrix, in blocks of rows: products of a batch in float32 (or the
    inputs' wider type), sums across batches in float64. Rounding leaves singular values below about 10⁻³ of the largest
    (those of few, or collinear, hidden states) uncertain by as much; the others are good to 10⁻⁴. A sum of matrices:
    additive over batches and ranks.

    Args:
        n_places: places that will be updated.
        d_model: width of the hidden states.
        n_rows: rows of the second moment that are computed together; by default as few as skip most of the half that
            mirrors the other. More are fewer and larger products, as a GPU wants them.
    """

    moment: Tensor
    n_vectors: Tensor

    def __init__(self, n_places: int, d_model: int, n_rows: int | None = None) -> None:
        super().__init__()
        self.d_model, self.n_rows = d_model, n_rows or _MOMENT_ROWS
        size = sum(rows * (d_model - start) for start, rows, _ in self._blocks())
        self.add_sums(moment=(n_places, size), n_vectors=(n_places,))
        self._group: Any = None

    def _blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield first row, number of rows and place in the state of every block of rows; columns start at the first
        row.
        """
        offset = 0
        for start in range(0, self.d_model, self.n_rows):
            rows = min(self.n_rows, self.d_model - start)
            yield start, rows, offset
            offset += rows * (self.d_model - start)

    def _block(self, moment: Tensor, start: int, rows: int, offset: int) -> Tensor:
        return moment[offset : offset + rows * (self.d_model - start)].view(rows, -1)

    def update(self, place: int, h_BTD: Tensor) -> None:
        """Add a batch of hidden states ``[B, T, d]`` seen at one place."""
        h_ND = h_BTD.flatten(0, 1).to(torch.promote_types(h_BTD.dtype, torch.float32))
        moment = self.moment[place]
        with torch.autocast(h_ND.device.type, enabled=False):
            for start, rows, offset in self._blocks():
                self._block(moment, start, rows, offset).add_(
                    torch.mm(h_ND[:, start : start + rows].T, h_ND[:, start:])
                )
        self.n_vectors[place].add_(len(h_ND))

    def reduce_over(self, group: Any) -> None:
        """See :class:`AdditiveMetric`; the moments, far larger than all other states together, come one at a time."""
        self.n_vectors = sum_over_ranks(self.n_vectors, group)
        self._group = group

    def _held_moments(self) -> dict[int, Tensor]:
        """Reduce over processes the states of the places that this process works on, by place."""
        if not self._is_synced:
            return dict(enumerate(self.moment))
        n_ranks, rank, own = dist.get_world_size(self._group), dist.get_rank(self._group), {}
        for place, moment in enumerate(self.moment):
            total = moment.clone()
            dist.reduce(total, group=self._group, group_dst=place % n_ranks)
            if place % n_ranks == rank:
                own[place] = total
        return own

    def _eigenvalues(self, moment: Tensor) -> Tensor:
        """Return the eigenvalues, falling, of the symmetric matrix whose upper half ``moment`` holds."""
        upper_DD = moment.new_zeros(self.d_model, self.d_model)
        for start, rows, offset in self._blocks():
            upper_DD[start : start + rows, start:] = self._block(moment, start, rows, offset)
        return symmetric_eigenvalues(upper_DD).flip(0)

    @property
    def at_most(self) -> int:
        """Limit of places whose eigenvalues a GPU solves at once, for memory."""
        return _SOLVER_BYTES // (_SOLVER_MATRICES * self.moment.element_size() * self.d_model**2)

    def begin(self, place: int, streams: MatrixStreams) -> Future[Tensor]:
        """Solve a place that will not be updated any more, beside the caller's stream: its eigenvalues, falling."""
        return streams.submit(self._eigenvalues, self.moment[place])

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues of every place's second moment, falling, ``[S, d]``. Collective once synchronised:
        processes share the places.
        """
        own = self._held_moments()
        eigenvalues_SD = self.moment.new_zeros(len(self.moment), self.d_model)
        for place, values_D in zip(own, each_at_once(self._eigenvalues, own.values(), self.at_most), strict=True):
            eigenvalues_SD[place] = values_D
        return sum_over_ranks(eigenvalues_SD, self._group) if self._is_synced else eigenvalues_SD

    def compute(self) -> RankResult:
        """Return effective rank and singular values of every place."""
        return rank_result(self.eigenvalues(), self.n_vectors)


def rank_result(eigenvalues_SD: Tensor, n_vectors_S: Tensor) -> RankResult:
    """Compute effective rank and singular values from the eigenvalues of ``Σ h hᵀ``, falling, and the number of
    vectors.
    """
    singular_SD = (eigenvalues_SD.clamp_min(0) / n_vectors_S[:, None]).sqrt()
    share_SD = singular_SD / singular_SD.sum(-1, keepdim=True)
    rank_S = torch.special.entr(share_SD).sum(-1).exp()
    return RankResult(rank_S.cpu().numpy(), singular_SD.cpu().numpy())


class RankBeside:
    """Effective rank in one process on a GPU, which solves each place beside the rest of the pass, once all sequences
    have shown it.

    Args:
        rank: metric that holds the second moments.
        n_sequences: number of sequences of the probe.
    """

    def __init__(self, rank: EffectiveRank, n_sequences: int) -> None:
        self.rank, self.n_sequences = rank, n_sequences
        n_places = len(rank.moment)
        self.n_shown = [0] * n_places
        self.streams = MatrixStreams(rank.moment.device, min(rank.at_most, n_places))
        self.solving: dict[int, Future[Tensor]] = {}

    def update(self, place: int, h_BTD: Tensor) -> None:
        """Add a batch of hidden states ``[B, T, d]`` seen at one place."""
        self.rank.update(place, h_BTD)
        self.n_shown[place] += len(h_BTD)
        if self.n_shown[place] == self.n_sequences:
            self.solving[place] = self.rank.begin(place, self.streams)

    def compute(self) -> RankResult:
        """Return effective rank and singular values of every place."""
        for place in range(len(self.n_shown)):
            if place not in self.solving:
                self.solving[place] = self.rank.begin(place, self.streams)
        eigenvalues_S = self.streams.results(of_place for _, of_place in sorted(self.solving.items()))
        return rank_result(torch.stack(eigenvalues_S), self.rank.n_vectors)


# ---------------------------------------------------------------- effective rank of places that are passed in turn
# Only one place's state is held at a time (definitions §7).


class RankOfPlaces:
    """:class:`~birthmark.metrics.dominance.EffectiveRank` for places that are complete before the next one begins.

    Holds ``d²/2`` float64 once, not once per place. For fewer vectors than half the width it takes the matrix of their
    inner products, ``X Xᵀ`` in float64, which has the same nonzero eigenvalues: it is smaller, and it keeps zero
    singular values exactly zero.

    Args:
        n_places: places, in the order in which they are passed.
        d_model: width of the hidden states.
    """

    def __init__(self, n_places: int, d_model: int) -> None:
        self.d_model = d_model
        self.few: list[Tensor] = []
        """Vectors ``[n, d]`` of the place that is being passed, while there are few."""
        self.many: EffectiveRank | None = None
        """Second moment of the vectors, once there are many."""
        self.eigenvalues_SD = torch.zeros(n_places, d_model, dtype=torch.float64, device="cpu")
        self.n_vectors_S = torch.zeros(n_places, dtype=torch.float64, device="cpu")

    def update(self, place: int, h_BTD: Tensor) -> None:
        """Add a batch of hidden states ``[B, T, d]`` seen at one place."""
        n_vectors = h_BTD.shape[:-1].numel()
        self.n_vectors_S[place] += n_vectors
        if self.many is None and self.n_vectors_S[place] * 2 <= self.d_model:
            self.few.append(h_BTD.flatten(0, 1).clone())
            return
        if self.many is None:
            self.many = EffectiveRank(1, self.d_model).to(h_BTD.device)
            for x_ND in self.few:
                self.many.update(0, x_ND[None])
            self.few = []
        self.many.update(0, h_BTD)

    def passed(self, place: int) -> None:
        """Take the eigenvalues of a place that is whole, and let go of its vectors."""
        if self.many is not None:
            self.eigenvalues_SD[place] = self.many.eigenvalues()[0].cpu()
        elif self.few:
            x_ND = torch.cat(self.few).double()
            self.eigenvalues_SD[place, : len(x_ND)] = torch.linalg.eigvalsh(x_ND @ x_ND.T).flip(0).cpu()
        self.few, self.many = [], None

    def compute(self) -> RankResult:
        """Return effective rank and singular values of every place that was passed."""
        return rank_result(self.eigenvalues_SD, self.n_vectors_S)
