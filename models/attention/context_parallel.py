"""Context parallel: each process of a group holds a part of every sequence.

The parts are zig-zag: process r of C holds the chunks r and 2C − 1 − r of 2C, so that each has as many scores to
compute under a causal mask. All but attention works on positions alone, and so on a part. An attention gathers the keys
and values of its group, in the order of the positions, and each chunk of queries attends to all keys up to its own: the
end of a causal attention, on the kernels of whole sequences. A row of weights is therefore whole in one process, and
windows, documents, sinks, learned keys, sums of squares and norms of heads need no word between processes.

So a process holds the keys and values of whole sequences, and 1/C of all other activations. A ring would hold 2/C of
them and send as many bytes, beside the computing; but each of its steps would be another attention to merge, in every
arm, so it is not built.

torch's own ``context_parallel`` (torch.distributed.tensor.experimental, torch 2.13) exchanges three of
``scaled_dot_product_attention``'s CUDA operators for ring attention. It leaves the CPU's operator alone, which then
attends within a part without an error; it takes neither FlashAttention's window nor documents; and its log-sum-exp,
from which sinks, learned keys and calibrations are computed, has no gradient.

Legend: C processes of a group, B sequences, T positions of whole sequences, G key/value heads, K head width, c
positions of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

#: torch 2.13 has given them other names.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def context_ranks(rank: int, size: int) -> tuple[int, int]:
    """Return the number of a process's group, which is its number among those that read different samples; and its
    number in the group. Neighbours form a group: they exchange the most.
    """
    return divmod(rank, size)


class Chunk(NamedTuple):
    """Queries of a process that are neighbours."""

    rows: slice
    """Their places among the process's positions."""
    first: int
    """Position of the first in its sequence."""
    stop: int
    """One past the last position: the number of keys that they see between them."""


@dataclass(frozen=True)
class ContextGroup:
    """Processes that hold parts of the same sequences."""

    size: int
    rank: int
    """Number of this process in the group."""
    group: Any = None
    """Process group of torch."""

    def chunks(self, n_positions: int) -> tuple[Chunk, Chunk]:
        """Return this process's chunks of sequences of ``n_positions``, which 2C divides."""
        c = n_positions // (2 * self.size)
        early, late = self.rank * c, (2 * self.size - 1 - self.rank) * c
        return Chunk(slice(0, c), early, early + c), Chunk(slice(c, 2 * c), late, late + c)

    def positions(self, n_positions: int, device: torch.device) -> Tensor:
        """Return the positions of this process's part of ``n_positions``, int64 ``[T/C]``."""
        return torch.cat([torch.arange(c.first, c.stop, device=device) for c in self.chunks(n_positions)])

    def part(self, x_BT: Tensor) -> Tensor:
        """Select this process's part of whole sequences, ``[B, T] → [B, T/C]``."""
        return torch.cat([x_BT[:, c.first : c.stop] for c in self.chunks(x_BT.shape[1])], dim=1)

    def gathered(self, k_BGtK: Tensor, v_BGtK: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values of whole sequences, ``[B, G, T/C, K] → [B, G, T, K]``; their gradients are summed
        over the group. Collective in the group.
        """
        width = k_BGtK.shape[-1]
        both_CBGtK = _Gathered.apply(torch.cat([k_BGtK, v_BGtK], dim=-1), self.group, self.size)
        early, late = both_CBGtK.unflatten(3, (2, -1)).unbind(3)
        whole = torch.cat([*early, *late.flip(0)], dim=2)
        return whole[..., :width], whole[..., width:]

    def summed(self, x: Tensor) -> Tensor:
        """Sum a tensor without gradients over the group. Collective in the group."""
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total


class _Gathered(torch.autograd.Function):
    """The tensors of all processes of a group, ``[C, …]``; backwards each gets the sum of the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, size: int) -> Tensor:
        ctx.group = group
        out = x.new_empty(size, *x.shape)
        # Joined along the first axis, as gloo wants it.
        _gather(out.flatten(0, 1), x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (d_out,) = gradients
        d_x = d_out.new_empty(d_out.shape[1:])
        _reduce_scatter(d_x, d_out.contiguous().flatten(0, 1), group=ctx.group)
        return d_x, None, None
