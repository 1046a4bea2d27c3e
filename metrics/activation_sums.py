"""Sums over activations, each computed once for all metrics that read it; on a GPU by kernels that read them twice.

Legend: B sequences, T positions, D channels; H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernel_devices import fuses_rows

#: On the CPU: elements that are looked at together, which stay in cache. Smaller blocks are no quicker, and several
#: threads wait for each other at every step.
_CACHED = 1 << 20
#: Elsewhere: for little memory.
_TOGETHER = 1 << 26

# ---------------------------------------------------------------- sizes along an axis
# On a GPU these are norms, which read x once and keep no copy; on the CPU norms are several times slower than the
# explicit forms.


def channel_norms(x_BHTK: Tensor) -> Tensor:
    """Compute Euclidean norms over the last axis, ``[B, H, T]``, float32 or wider."""
    wide = torch.promote_types(x_BHTK.dtype, torch.float32)
    if x_BHTK.device.type != "cpu":
        return torch.linalg.vector_norm(x_BHTK, dim=-1, dtype=wide)
    # As heads lie in memory, and of the type that is wanted: the other ways are several times slower.
    return torch.linalg.vector_norm(x_BHTK.transpose(1, 2).to(wide), dim=-1).transpose(1, 2)


def total_size(x_BTD: Tensor) -> Tensor:
    """Compute ``Σ_t |x|``, ``[B, D]``, float32 or wider."""
    wide = torch.promote_types(x_BTD.dtype, torch.float32)
    if x_BTD.device.type != "cpu":
        return torch.linalg.vector_norm(x_BTD, 1, dim=1, dtype=wide)
    at_once = max(_CACHED // max(x_BTD[:, :1].numel(), 1), 1)
    parts = [part_BTD.abs().sum(1, dtype=wide) for part_BTD in x_BTD.split(at_once, dim=1)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def inverse_norms(norm: Tensor) -> Tensor:
    """Compute ``1/‖x‖``. Below the norm from which squares underflow, 2·10⁻¹⁸ in float32, it is that of this norm: a
    smaller vector gives less than a unit vector, down to 0.
    """
    return norm.clamp_min(16 * float(torch.finfo(norm.dtype).tiny) ** 0.5).reciprocal_()


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


# ---------------------------------------------------------------- moments of sequences


class SequenceMoments(NamedTuple):
    """Moments of each sequence's activations ``[T, D]``, taken as one sample of T·D numbers; float64, extremes in
    float32 or wider.
    """

    std_B: Tensor
    """Standard deviation, over T·D − 1 as in the published code."""
    fourth_BT: Tensor
    """Mean of ``(x − μ)⁴`` over the channels of each position, μ that of the sequence."""
    largest_BT: Tensor
    """``max |x|`` over channels."""
    away_BD: Tensor
    """``max |x − μ|`` over positions."""


class SequenceSums(NamedTuple):
    """Sums and extremes about each sequence's mean, as a pass over its activations gives them; float32 or wider.
    Dimensions may precede B.
    """

    second_BT: Tensor
    """``Σ (x − μ)²`` over the channels of each position."""
    fourth_root_BT: Tensor
    """``√Σ (x − μ)⁴`` over the channels of each position, in float32 for sizes from 10⁻⁹ to 10⁹."""
    largest_BT: Tensor
    """``max |x|`` over channels, in the inputs' type or float32."""
    away_squared_BD: Tensor
    """``max (x − μ)²`` over positions."""

    def moments(self) -> SequenceMoments:
        """Compute the moments."""
        length, width = self.second_BT.shape[-1], self.away_squared_BD.shape[-1]
        variance_B = self.second_BT.sum(-1, dtype=torch.float64) / (length * width - 1)
        fourth_BT = self.fourth_root_BT.double().square() / width
        largest_BT = self.largest_BT.to(self.second_BT.dtype)
        return SequenceMoments(variance_B.sqrt(), fourth_BT, largest_BT, self.away_squared_BD.sqrt())


def _about(x_BTD: Tensor, mean_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the sums about a mean with torch's operators, a block at a time."""
    _, length, width = x_BTD.shape
    n_tokens = max((_CACHED if x_BTD.device.type == "cpu" else _TOGETHER) // width, 1)
    n_together, n_rows = max(n_tokens // length, 1), min(n_tokens, length)
    of_sequences = []
    for some_BTD, mean in zip(x_BTD.split(n_together), mean_B[:, None, None].split(n_together), strict=True):
        of_rows = []
        for x in some_BTD.split(n_rows, dim=1):
            # (x − μ)² in one operator, which keeps no difference.
            square = F.mse_loss(x.to(mean.dtype), mean.expand_as(x), reduction="none")
            of_rows.append((square.sum(-1), torch.linalg.vector_norm(square, dim=-1), square.amax(1, keepdim=True)))
        of_sequences.append([_joined(parts, 1) for parts in zip(*of_rows, strict=True)])
    second_BT, root_BT, away_BRD = (_joined(parts, 0) for parts in zip(*of_sequences, strict=True))
    return second_BT, root_BT, away_BRD.amax(1) if away_BRD.shape[1] > 1 else away_BRD[:, 0]


# ---------------------------------------------------------------- the kernels as operators
# Both are registered, so that a pass over tensors without values runs them.


@torch.library.custom_op("birthmark::activation_sums", mutates_args=())
def _sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from .activation_sums_kernel import sum_rows

    return sum_rows(x)


@_sums.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n_sequences, length, width = x.shape
    return (
        x.new_empty(4, n_sequences, length, dtype=torch.float32),
        x.new_empty(n_sequences, width, dtype=torch.float32),
    )


@torch.library.custom_op("birthmark::activation_sums_about", mutates_args=())
def _sums_about(x: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from .activation_sums_kernel import sum_about

    return sum_about(x, mean)


@_sums_about.register_fake
def _(x: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n_sequences, length, width = x.shape
    second, fourth_root = (x.new_empty(n_sequences, length, dtype=torch.float32) for _ in range(2))
    return second, fourth_root, x.new_empty(n_sequences, width, dtype=torch.float32)


# ---------------------------------------------------------------- sums of one place


class _Rows(NamedTuple):
    """Results of the kernel that reads the activations first."""

    total_BT: Tensor
    size_BT: Tensor
    square_BT: Tensor
    largest_BT: Tensor
    unit_sum_BD: Tensor


class ActivationSums:
    """Sums over the activations of one place and batch, float32 or wider.

    Args:
        x_BTD: activations ``[B, T, D]``, in any type.
    """

    def __init__(self, x_BTD: Tensor) -> None:
        self.x_BTD = x_BTD
        self._wide = torch.promote_types(x_BTD.dtype, torch.float32)

    @staticmethod
    def of(x_BTD: Tensor | ActivationSums) -> ActivationSums:
        """Return the sums of a tensor, or the sums that are given."""
        return ActivationSums(x_BTD) if isinstance(x_BTD, Tensor) else x_BTD

    @cached_property
    def _rows(self) -> _Rows | None:
        """Sums from one read by a kernel; None where it does not run."""
        if not fuses_rows(self.x_BTD):
            return None
        of_rows_4BT, unit_sum_BD = _sums(self.x_BTD)
        total_BT, size_BT, square_BT, largest_BT = of_rows_4BT.unbind()
        return _Rows(total_BT, size_BT, square_BT, largest_BT, unit_sum_BD)

    @cached_property
    def _size(self) -> Tensor:
        """``|x|``, where no kernel runs."""
        return self.x_BTD.abs()

    @cached_property
    def total(self) -> Tensor:
        """``Σ x`` of each sequence ``[B]``."""
        return self.x_BTD.sum((1, 2), dtype=self._wide) if self._rows is None else self._rows.total_BT.sum(1)

    @cached_property
    def norm(self) -> Tensor:
        """Euclidean norms over channels ``[B, T]``."""
        if self._rows is None:
            return torch.linalg.vector_norm(self.x_BTD.to(self._wide), dim=-1)
        return self._rows.square_BT.sqrt()

    @cached_property
    def inverse_norm(self) -> Tensor:
        """``1/‖x‖`` ``[B, T]``; finite where a vector is 0, so that its unit vector is 0."""
        return inverse_norms(self.norm)

    @cached_property
    def largest(self) -> Tensor:
        """``max |x|`` over channels ``[B, T]``, in the type of x or float32."""
        return self._size.amax(-1) if self._rows is None else self._rows.largest_BT

    @property
    def largest_of_sequences(self) -> Tensor:
        """``max |x|`` over sequences ``[T, D]``, in the type of x."""
        return self._size.amax(0) if self._rows is None else torch.linalg.vector_norm(self.x_BTD, torch.inf, dim=0)

    @cached_property
    def mean_size(self) -> Tensor:
        """Mean of ``|x|`` over channels ``[B, T]``."""
        if self._rows is None:
            return self._size.mean(-1, dtype=self._wide)
        return self._rows.size_BT / self.x_BTD.shape[-1]

    @cached_property
    def unit_sum(self) -> Tensor:
        """Sum over positions of ``x/‖x‖`` ``[B, D]``; a vector of zeros adds nothing."""
        if self._rows is not None:
            return self._rows.unit_sum_BD
        with torch.autocast(self.x_BTD.device.type, enabled=False):
            return torch.bmm(self.inverse_norm[:, None], self.x_BTD.to(self._wide))[:, 0]

    @cached_property
    def first_size(self) -> Tensor:
        """``|x|`` at position 0 ``[B, D]``, in the type of x."""
        return self.x_BTD[:, 0].abs()

    @cached_property
    def later_size(self) -> Tensor:
        """``Σ |x|`` over the positions from 1 on ``[B, D]``. It is not a total less ``|x_0|``, which would lose a small
        rest beside a large first.
        """
        return total_size(self.x_BTD[:, 1:])

    def about_mean(self) -> SequenceSums:
        """Compute sums about each sequence's mean."""
        mean_B = self.total / (self.x_BTD.shape[1] * self.x_BTD.shape[2])
        about = _about if self._rows is None else _sums_about
        second_BT, fourth_root_BT, away_squared_BD = about(self.x_BTD, mean_B)
        return SequenceSums(second_BT, fourth_root_BT, self.largest, away_squared_BD)
