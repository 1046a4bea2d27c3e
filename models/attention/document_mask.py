"""Several documents in one sequence: each attends to itself alone, and its positions begin anew.

On the fused kernels, documents of similar length run together, as separate sequences with padding at the end, where
causal attention does not look. A compiled pass cannot read their lengths, so its weights are explicit. A planned pass
assumes the padding `PLANNED_PADDING`.

Legend: B sequences, H query heads, G key/value heads, T positions, K head width; N documents of a group, L its length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_SHORTEST = 16
#: Share of padding in groups that a plan counts: documents of text, of one or two sequences to many, had .01 to
#: .14 in the mean, and .17 at most.
PLANNED_PADDING = 1 / 6


class Group(NamedTuple):
    """Documents of similar length."""

    token_NL: Tensor
    """Index of each position among all ``B·T``; arbitrary past a document's end."""
    real_R: Tensor
    """Positions, among the ``N·L`` of the group, that are not past the end."""


@dataclass(frozen=True)
class Documents:
    """Documents that the positions of a pass belong to."""

    number_BT: Tensor
    """Number of the document in its sequence, rising; −1 for padding. With keys in a cache it covers these too: ``[B,
    S]``.
    """
    position_BT: Tensor
    """The position in its document, from 0."""

    @classmethod
    def of(cls, number_BT: Tensor) -> Documents:
        """Build from the numbers of documents, int64 ``[B, T]``."""
        place_T = torch.arange(number_BT.shape[1], device=number_BT.device)
        begins_BT = torch.ones_like(number_BT, dtype=torch.bool)
        begins_BT[:, 1:] = number_BT[:, 1:] != number_BT[:, :-1]
        first_BT = (place_T * begins_BT).cummax(1).values
        return cls(number_BT, place_T - first_BT)

    def first_positions(self) -> Tensor:
        """Return the first position of each position's document, int64 ``[B, T]``."""
        return torch.arange(self.number_BT.shape[1], device=self.number_BT.device) - self.position_BT

    def part(self, sequences: slice) -> Documents:
        """Select the documents of some sequences."""
        return Documents(self.number_BT[sequences], self.position_BT[sequences])

    def until(self, stop: int) -> Documents:
        """Select the documents of the positions before ``stop``; the same object each time."""
        if stop not in self._until:
            self._until[stop] = Documents(self.number_BT[:, :stop], self.position_BT[:, :stop])
        return self._until[stop]

    @cached_property
    def _until(self) -> dict[int, Documents]:
        return {}

    @cached_property
    def _behind(self) -> dict[int, tuple[Documents, list[tuple[int, int, int]]]]:
        return {}

    def behind(self, first: int) -> tuple[Documents, list[tuple[int, int, int]]]:
        """Return the documents of the positions from ``first`` on, cut there; and the cut ones: sequence, positions
        before the cut, and behind it.
        """
        if first not in self._behind:
            cut = Documents.of(self.number_BT[:, first:])
            if isinstance(self.number_BT, FakeTensor):  # a plan: documents end where parts do
                return cut, []
            # Waits for the device once per pass, as the groups do.
            n_behind_B = (cut.number_BT == cut.number_BT[:, :1]).sum(1)
            sizes = torch.stack([self.position_BT[:, first], n_behind_B]).tolist()
            self._behind[first] = cut, [(b, n, m) for b, (n, m) in enumerate(zip(*sizes, strict=True)) if n]
        return self._behind[first]

    @property
    def known(self) -> bool:
        """True if attention can use the lengths: not while a graph is made."""
        return not torch.compiler.is_compiling()

    @cached_property
    def _grouped(self) -> tuple[list[Group], Tensor]:
        """Groups, and the index of each of the ``B·T`` positions among the real ones of all groups."""
        device, (n_sequences, length) = self.number_BT.device, self.number_BT.shape
        if isinstance(self.number_BT, FakeTensor):
            return self._planned()
        # The one place that waits for a device: once per pass, for all blocks.
        start_D = (self.position_BT.cpu().flatten() == 0).nonzero()[:, 0]
        length_D = torch.diff(start_D, append=torch.tensor([n_sequences * length]))
        class_D = torch.bucketize(length_D, torch.tensor(_classes(length)))
        groups, order = [], []
        for i in class_D.unique().tolist():
            start_N, length_N = start_D[class_D == i], length_D[class_D == i]
            place_L = torch.arange(int(length_N.max()))
            token_NL = (start_N[:, None] + place_L).clamp_max(n_sequences * length - 1)
            real_R = (place_L < length_N[:, None]).flatten().nonzero()[:, 0]
            order.append(token_NL.flatten()[real_R])
            groups.append(Group(token_NL.to(device), real_R.to(device)))
        return groups, torch.cat(order).argsort().to(device)

    def _planned(self) -> tuple[list[Group], Tensor]:
        """Return groups with as many positions as typical text needs, for tensors without values."""
        n_sequences, length = self.number_BT.shape
        padded = length + round(length * PLANNED_PADDING)
        token_NL = self.position_BT.new_empty(n_sequences, padded)
        real_R, order = (self.position_BT.new_empty(n_sequences * length) for _ in range(2))
        return [Group(token_NL, real_R)], order

    def attend(
        self, attention: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], *qkv_BHTK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run a causal attention within each document; return output ``[B, H, T, K]`` and log-sum-exp ``[B, H, T]``.

        Args:
            attention: function that does this for queries, keys and values of whole sequences, or for the last queries
                of them.
            qkv_BHTK: queries, keys and values; grouped keys and values without repeats. The queries may be the last
                ones alone.
        """
        q_BHTK, k_BGSK, v_BGSK = qkv_BHTK
        if n_before := k_BGSK.shape[2] - q_BHTK.shape[2]:
            return self._attend_behind(n_before, attention, q_BHTK, k_BGSK, v_BGSK)
        groups, order = self._grouped
        flat = [x.transpose(1, 2).flatten(0, 1) for x in qkv_BHTK]
        outputs, sums = [], []
        for group in groups:
            shape = group.token_NL.shape
            q, k, v = (x.index_select(0, group.token_NL.flatten()).unflatten(0, shape).transpose(1, 2) for x in flat)
            out, lse = attention(q, k, v)
            outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, group.real_R))
            sums.append(lse.transpose(1, 2).flatten(0, 1).index_select(0, group.real_R))
        n_sequences, n_positions = self.number_BT.shape
        out, lse = (
            torch.cat(parts).index_select(0, order).unflatten(0, (n_sequences, n_positions)).transpose(1, 2)
            for parts in (outputs, sums)
        )
        return out, lse

    def _attend_behind(
        self,
        n_before: int,
        attention: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
        q_BHTK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Do the same for the queries from ``n_before`` on; documents that begin before them run one by one."""
        cut, continued = self.behind(n_before)
        found = cut.attend(attention, q_BHTK, k_BGSK[:, :, n_before:], v_BGSK[:, :, n_before:])
        of_sequences = [list(x.split(1)) for x in found]
        for b, n, m in continued:
            keys = slice(n_before - n, n_before + m)
            late = attention(q_BHTK[b : b + 1, :, :m], k_BGSK[b : b + 1, :, keys], v_BGSK[b : b + 1, :, keys])
            for of_sequence, x in zip(of_sequences, late, strict=True):
                of_sequence[b] = torch.cat([x, of_sequence[b][:, :, m:]], dim=2)
        out, lse = map(torch.cat, of_sequences)
        return out, lse


def _classes(longest: int) -> list[int]:
    """Return the greatest lengths of the groups: powers of two, and one and a half times them."""
    found, size = [], _SHORTEST
    while size < longest:
        found += [size, size * 3 // 2]
        size *= 2
    return found
