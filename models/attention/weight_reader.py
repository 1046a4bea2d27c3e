"""Reader of all weights of an attention while it runs: a block at a time, while the block is in cache, or by their sums
alone, which kernels of a GPU give.

Legend: B sequences, H heads, T queries, S keys, K head width; N = B·H of a part, R queries of a block; C kinds of
weights (``fused/weight_sums.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ... import kernel_devices
from .fused import weight_sums
from .fused.backends import over_heads
from .fused.blockwise import softmax_with_lse_
from .fused.native import by_positions
from .scores import Scores

#: Slices of sequences and of heads.
Part = tuple[slice, slice]
#: The part with all sequences and heads.
EVERYTHING: Part = (slice(None), slice(None))


def _second_cache_bytes() -> int:
    """Return the size of a core's second-level cache, at least 512 KiB, which is also taken where no system says it."""
    try:
        said = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text()
        return max(int(said.strip().removesuffix("K")) << 10, 1 << 19)
    except (OSError, ValueError):
        return 1 << 19


#: On the CPU: float32 weights of one block, twice the second-level cache, and heads that are worth more than a block
#: in cache. With 2 MiB of it a snapshot takes 6 % less by blocks of 4 MiB than of 1 MiB; larger ones gain no more.
_CACHED, _HEADS = _second_cache_bytes() // 2, 4
#: Elsewhere: queries and weights of one block. A GPU has read a block of 256 MiB (float32) before the next one is
#: launched; smaller ones leave it waiting.
_ROWS, _WEIGHTS = 256, 1 << 26


@dataclass(frozen=True)
class SoftmaxSums:
    """Sums over the weights of a causal softmax; float32."""

    received_CBHT: Tensor
    """``Σ_t a[t, j]`` over the queries t ≥ 1, of weights as they are and, last, divided by their row's sum."""
    first_CBH: Tensor
    """``a[0, 0]``."""
    squares_CBHT: Tensor
    """``Σ_j a[t, j]²``."""
    entropy_BHT: Tensor
    """``−Σ_j p ln p`` of the weights over their row's sum."""
    largest_BHT: Tensor
    """Largest score of each query on a key that it sees."""
    weights_on: Callable[[Tensor], Tensor]
    """Function from one key of each query, int64 ``[B, T]``, to the weights on it, ``[C, B, H, T]``."""


class WeightReader(Protocol):
    """Reader that is shown the weights of one attention: a block at a time, or their sums."""

    def read_scores(self, part: Part, scores_BHRS: Tensor) -> None:
        """Read the scores of a block of queries of these sequences and heads, before they become weights; −inf where a
        key is not seen. Must not write into them or keep them: the next block overwrites them.
        """

    def read(self, part: Part, start: int, weights_BHRS: Tensor) -> None:
        """Read the weights of the queries from ``start`` on, on keys 0, 1, …, of these sequences and heads: float32 or
        wider. May write into them; must not keep them: the next block overwrites them.
        """

    def read_sums(self, sums: SoftmaxSums) -> None:
        """Read the sums over all weights at once, in place of the weights. May write into them and keep them."""


#: (B, H and T of an attention, whether its rows sum to 1, whether no query gives weight to a later key) → its reader.
MakeReader = Callable[[tuple[int, int, int], bool, bool], WeightReader]


class _Reading(NamedTuple):
    """Readers within a context, and their way."""

    make: MakeReader
    by_walk: bool


_reading: ContextVar[_Reading | None] = ContextVar("reading", default=None)


@contextmanager
def read_weights(make: MakeReader, by_walk: bool | None = None) -> Iterator[None]:
    """Show the weights of each observed attention, within the context, to a new reader, then found at
    ``attended.weights``.

    Sums over all weights cost little more than the fused attention this way: its output comes from the same blocks.
    It differs from the fused kernel's by float32 rounding. With gradients on, nothing is read.

    Args:
        make: function that makes a reader.
        by_walk: show sums from kernels of a GPU where :func:`walks`; None: as in the surrounding context, else False.
    """
    around = _reading.get()
    if by_walk is None:
        by_walk = around is not None and around.by_walk
    token = _reading.set(_Reading(make, by_walk))
    try:
        yield
    finally:
        _reading.reset(token)


def gives_sums(scores: Scores, v_BGSK: Tensor) -> bool:
    """Return True if kernels (``fused/weight_sums.py``) give the sums of this softmax: causal, of whole sequences, of
    one type that they take. All others are read by blocks of weights.
    """
    dtypes = {scores.q_BHTK.dtype, scores.k_BGSK.dtype, v_BGSK.dtype}
    whole = scores.k_BGSK.shape[2] == scores.q_BHTK.shape[2] and not scores.place.is_chunk
    takes = scores.fusable and scores.prefix is None and whole and len(dtypes) == 1
    planned, device_type = kernel_devices.chosen_for is not None, kernel_devices.runs_on(scores.q_BHTK)
    runs = device_type == "cuda" if planned else not weight_sums.why_not(device_type)
    return takes and dtypes <= {*weight_sums.DTYPES} and runs


def walks(scores: Scores, v_BGSK: Tensor) -> bool:
    """Return True if this softmax is asked to give its sums without its weights, and has a width that the kernels take;
    otherwise they come from blocks of scores.
    """
    reading = _reading.get()
    narrow = max(scores.q_BHTK.shape[-1], v_BGSK.shape[-1]) <= weight_sums.WIDEST
    return reading is not None and reading.by_walk and narrow and gives_sums(scores, v_BGSK)


def new_reader(scores: Scores, rows_sum_to_one: bool) -> WeightReader | None:
    """Make the reader for an attention with these scores; None outside :func:`read_weights` and with gradients on."""
    reading = _reading.get()
    if reading is None or torch.is_grad_enabled():
        return None
    n_sequences, n_heads, length, _ = scores.q_BHTK.shape
    return reading.make((n_sequences, n_heads, length), rows_sum_to_one, scores.prefix is None)


class ReadSoftmax(NamedTuple):
    """Results of a softmax whose weights were read."""

    o_BHTK: Tensor
    """The weights on tokens times their values."""
    lse_BHT: Tensor | None
    """Log-sum-exp of the scores of tokens, where there are other keys or it came along."""
    squares_BHT: Tensor | None
    """``Σ_j p²`` of the softmax over tokens alone, if wanted."""


def read_softmax(
    scores: Scores, v_BGSK: Tensor, reader: WeightReader, others_BHT: Tensor | None, wants_squares: bool
) -> ReadSoftmax:
    """Compute softmax attention and show its weights to a reader.

    Args:
        scores: scores of a fusable attention.
        v_BGSK: values, those of grouped heads once.
        reader: reader of the weights on tokens.
        others_BHT: log-sum-exp of the scores of keys that are no tokens; None without any.
        wants_squares: sum squares too.
    """
    if gives_sums(scores, v_BGSK):
        return _read_sums(scores, v_BGSK, reader, others_BHT)
    v_BHSK = over_heads(v_BGSK, scores.q_BHTK.shape[1])
    n_sequences, n_heads, length, _ = scores.q_BHTK.shape
    wide = torch.promote_types(v_BHSK.dtype, torch.float32)
    # Laid out as the output projection reads it.
    o_BHTK = v_BHSK.new_empty(n_sequences, length, n_heads, v_BHSK.shape[-1]).transpose(1, 2)
    lse_BHT = None if others_BHT is None else v_BHSK.new_empty(o_BHTK.shape[:3], dtype=wide)
    squares_BHT = v_BHSK.new_empty(o_BHTK.shape[:3], dtype=wide) if wants_squares else None
    n_rows, parts = _blocks(scores.q_BHTK)
    for part in parts:
        scores_of, v_NSK = _scores_of(scores, part, n_rows), v_BHSK[part].flatten(0, 1)
        for start in range(0, length, n_rows):
            stop = min(start + n_rows, length)
            rows = (*part, slice(start, stop))
            weights_NRS = scores_of(start, stop)
            weights_BHRS = weights_NRS.view(*o_BHTK[rows].shape[:3], -1)
            reader.read_scores(part, weights_BHRS)
            # In place: in cache there is room for one of them.
            if lse_BHT is not None:
                lse_BHT[rows] = softmax_with_lse_(weights_NRS).view(lse_BHT[rows].shape)
            else:
                torch.softmax(weights_NRS, -1, out=weights_NRS)
            if squares_BHT is not None:
                squares_BHT[rows] = torch.linalg.vector_norm(weights_BHRS, dim=-1).square_()
            if lse_BHT is not None and others_BHT is not None:
                weights_BHRS.mul_((lse_BHT[rows] - others_BHT[rows]).sigmoid_()[..., None])
            o_BHTK[rows] = _weighted(weights_NRS, v_NSK).view(o_BHTK[rows].shape)
            reader.read(part, start, weights_BHRS)
    return ReadSoftmax(o_BHTK, lse_BHT, squares_BHT)


def _weighted(weights_NRS: Tensor, v_NSK: Tensor) -> Tensor:
    """Sum values by the weights of a block, ``[N, R, K]``."""
    with torch.autocast(v_NSK.device.type, enabled=False):
        return torch.bmm(weights_NRS.to(v_NSK.dtype), v_NSK[:, : weights_NRS.shape[-1]])


def _sums_of_blocks(scores: Scores, v_BGSK: Tensor, others_BHT: Tensor | None) -> weight_sums.WeightSums:
    """Compute attention over tokens and the sums over its weights from blocks of scores."""
    q_BHTK, v_BHSK = scores.q_BHTK, over_heads(v_BGSK, scores.q_BHTK.shape[1])
    length, o_BHTK = q_BHTK.shape[2], by_positions(q_BHTK, v_BHSK.shape[-1])
    lse, squares, entropy, largest = (q_BHTK.new_empty(q_BHTK.shape[:3], dtype=torch.float32) for _ in range(4))
    others, share = (None, None) if others_BHT is None else (others_BHT.float().contiguous(), torch.empty_like(lse))
    received_CBHT = lse.new_zeros(1 if share is None else 2, *lse.shape)
    n_rows, parts = _blocks(q_BHTK)
    for part in parts:
        scores_of, v_NSK = _scores_of(scores, part, n_rows, hides_later=False), v_BHSK[part].flatten(0, 1)
        given, *filled = (
            None if x is None else x[part].view(-1, length) for x in (others, lse, squares, entropy, largest, share)
        )
        received_CNT = received_CBHT[:, *part].view(len(received_CBHT), -1, length)
        for start in range(0, length, n_rows):
            stop = min(start + n_rows, length)
            block_NRS, rows = scores_of(start, stop), (*part, slice(start, stop))
            by_program = weight_sums.softmax_with_sums_(block_NRS, start, given, *filled)
            received_CNT[..., :stop].add_(by_program.sum(2))
            o_BHTK[rows] = _weighted(block_NRS, v_NSK).view(o_BHTK[rows].shape)
    return weight_sums.WeightSums(o_BHTK, lse, squares, entropy, largest, received_CBHT, share)


def _read_sums(scores: Scores, v_BGSK: Tensor, reader: WeightReader, others_BHT: Tensor | None) -> ReadSoftmax:
    q_BHTK, k_BGSK, slopes_H = scores.q_BHTK, scores.k_BGSK, scores.place.slopes_H
    first_BT = scores.first_keys()
    if walks(scores, v_BGSK):
        found = weight_sums.weight_sums(q_BHTK, k_BGSK, v_BGSK, scores.scale, first_BT, others_BHT, slopes_H)
    else:
        found = _sums_of_blocks(scores, v_BGSK, others_BHT)
    share_BHT = found.share_BHT

    def both(x: Tensor, power: int = 1) -> Tensor:
        """Stack weights or their powers as they are in the whole softmax on those of the softmax over tokens alone."""
        return x[None] if share_BHT is None else torch.stack([x * share_BHT**power, x])

    def weights_on(key_BT: Tensor) -> Tensor:
        keys_BGTK = k_BGSK.gather(2, key_BT[:, None, :, None].expand(-1, k_BGSK.shape[1], -1, k_BGSK.shape[3]))
        pairs = q_BHTK.to(found.lse_BHT.dtype) * over_heads(keys_BGTK, q_BHTK.shape[1])
        scores_BHT = pairs.sum(-1) * scores.scale
        if slopes_H is not None:
            distance_BT = torch.arange(key_BT.shape[1], device=key_BT.device) - key_BT
            scores_BHT -= slopes_H[:, None] * distance_BT[:, None]
        weights_BHT = (scores_BHT - found.lse_BHT).exp_()
        return both(weights_BHT if first_BT is None else weights_BHT.masked_fill_((key_BT < first_BT)[:, None], 0.0))

    first_BH = torch.ones_like(found.lse_BHT[..., 0])
    first_CBH = first_BH[None] if share_BHT is None else torch.stack([share_BHT[..., 0], first_BH])
    reader.read_sums(
        SoftmaxSums(
            found.received_CBHT, first_CBH, both(found.squares_BHT, 2), found.entropy_BHT, found.largest_BHT, weights_on
        )
    )
    o_BHTK = found.o_BHTV
    if share_BHT is not None:
        o_BHTK = o_BHTK * share_BHT[..., None].to(o_BHTK.dtype)
    return ReadSoftmax(o_BHTK, found.lse_BHT, found.squares_BHT)


def _blocks(q_BHTK: Tensor) -> tuple[int, list[Part]]:
    """Choose the number of queries per block, and the parts (sequences and heads) to take together."""
    n_sequences, n_heads, length, _ = q_BHTK.shape
    on_cpu = q_BHTK.device.type == "cpu"
    n_rows, most, fewest = (
        (min(max(length // 16, 32), 128), _CACHED, _HEADS) if on_cpu else (min(length, _ROWS), _WEIGHTS, 1)
    )
    n_together = max(most // (n_rows * length), fewest)
    if n_together >= n_heads:
        step = n_together // n_heads
        return n_rows, [(slice(b, b + step), slice(None)) for b in range(0, n_sequences, step)]
    heads = [slice(h, h + n_together) for h in range(0, n_heads, n_together)]
    return n_rows, [(slice(b, b + 1), some) for b in range(n_sequences) for some in heads]


@lru_cache(maxsize=4)
def _later_keys(n_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a square, −inf above its diagonal and 0 elsewhere; once for all blocks of a pass."""
    return torch.full((n_rows, n_rows), -torch.inf, dtype=dtype, device=device).triu_(1)


def _scores_of(scores: Scores, part: Part, n_rows: int, hides_later: bool = True) -> Callable[[int, int], Tensor]:
    """Return a function (first query, one past the last) → scores ``[N, R, keys]`` of a part, −inf where a key is not
    seen; without ``hides_later``, anything behind the query's own position. Each result is valid until the next call.
    """
    slopes_H = scores.place.slopes_H
    wide = torch.promote_types(scores.q_BHTK.dtype, torch.float32)
    q, k = (x[part].to(wide) for x in (scores.q_BHTK, scores.k_BHSK))
    documents = scores.place.documents
    if scores.window is not None or scores.prefix is not None or slopes_H is not None or documents is not None:
        place = scores.place if slopes_H is None else replace(scores.place, slopes_H=slopes_H[part[1]])
        if documents is not None:
            place = replace(place, documents=documents.part(part[0]))
        here = replace(scores, q_BHTK=q, k_BGSK=k, place=place)

        def masked(start: int, stop: int) -> Tensor:
            block, seen = here.block(start, stop)
            return block.masked_fill_(~seen, -torch.inf).flatten(0, 1)

        return masked

    q_NTK, k_NKS = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)
    # Only the last square has keys that are not seen, and adding is quicker than filling.
    unseen_RR = _later_keys(n_rows, q.dtype, q.device) if hides_later else None
    memory = q.new_empty(len(q_NTK) * n_rows * q_NTK.shape[1])

    def causal(start: int, stop: int) -> Tensor:
        block = memory[: len(q_NTK) * (stop - start) * stop].view(len(q_NTK), stop - start, stop)
        with torch.autocast(q.device.type, enabled=False):
            block.baddbmm_(q_NTK[:, start:stop], k_NKS[:, :, :stop], beta=0, alpha=scores.scale)
        if unseen_RR is not None:
            block[..., start:].add_(unseen_RR[: stop - start, : stop - start])
        return block

    return causal
