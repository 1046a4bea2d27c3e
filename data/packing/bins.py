"""Assignment of pieces of text to sequences of one length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

import numpy as np


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
