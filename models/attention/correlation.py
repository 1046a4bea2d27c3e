"""ρ, the correlation of a head's values across positions, which correlated variance calibration needs.

Values of one sequence share a part, which averaging does not shrink: the variance of a mean of values is
``σ_v² (ρ + (1−ρ)/n_eff)`` (definitions §9).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from ...kernel_devices import fuses_rows
from ..config import InitConfig, ModelConfig
from ..init import Constant, Distribution, ParameterRole, keyed_generator
from ..tensor_shards import gathered_in_passes, reshard
from .document_mask import Documents

#: Share of the newest batch in the running moments.
_MOMENTUM = 0.1
#: Sequences and tokens of the random probe that a newborn model settles on.
_N_SEQUENCES, _LONGEST = 32, 128
#: ρ = 1 would say that positions do not differ at all.
_LARGEST = 0.999
_SMALLEST = 1e-30


# ---------------------------------------------------------------- the kernels as operators
# Registered, so that a plan runs them on tensors without values.


@torch.library.custom_op("birthmark::value_moments", mutates_args=())
def _average(v: torch.Tensor, n_heads: int) -> torch.Tensor:
    from .correlation_kernel import average

    return average(v, n_heads)


@_average.register_fake
def _(v: torch.Tensor, n_heads: int) -> torch.Tensor:
    return v.new_empty(n_heads * (v.shape[-1] + 2) + 1, dtype=torch.float32)


@torch.library.custom_op(
    "birthmark::settle_moments", mutates_args=("mean", "square", "square_of_mean", "n_batches", "length")
)
def _settle(
    batch: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, square_of_mean: torch.Tensor,
    n_batches: torch.Tensor, length: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    from .correlation_kernel import settle

    return settle(batch, mean, square, square_of_mean, n_batches, length, _MOMENTUM, _SMALLEST, _LARGEST)


@_settle.register_fake
def _(
    batch: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, square_of_mean: torch.Tensor,
    n_batches: torch.Tensor, length: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    return torch.empty_like(square)


def moment_kernels(v_BGSK: Tensor, dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor]] | None:
    """Return the operators that average the moments of a batch, and that add them to running ones of a type and give
    ρ; None if kernels do not take such values.
    """
    return (_average, _settle) if dtype == torch.float32 and fuses_rows(v_BGSK) else None


# ---------------------------------------------------------------- kinds of ρ


class Uncorrelated(nn.Module):
    """Correlation ρ = 0; also the base of the other kinds."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def forward(self, v_BGSK: Tensor, documents: Documents | None = None) -> Tensor | None:
        """Return ρ, broadcastable to ``[B, H, T]``, float32 or wider, given the values ``[B, G or H, S, K]``; None:
        0.
        """
        return None


class LearnedCorrelation(Uncorrelated):
    """The sigmoid of one scalar per query head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        rho = config.attention.calibration.rho
        self.start = math.log(rho / (1 - rho))
        self.logit = nn.Parameter(torch.full((config.n_heads,), self.start))
        self.parameter_roles = {"logit": ParameterRole.BIAS}

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """Start every head at ``calibration.rho``."""
        return {"logit": Constant(self.start)}

    def forward(self, v_BGSK: Tensor, documents: Documents | None = None) -> Tensor:
        """Return the correlation of each head, ``[H, 1]``."""
        return self.logit.sigmoid()[:, None]


class EstimatedCorrelation(Uncorrelated):
    """Running moments of the values in training, frozen in evaluation.

    With ``m`` the mean of a head's values over sequences and positions, ``ρ = (S·C − A)/((S−1)·A)``, where
    ``A = E‖v − m‖²`` and ``C = E‖mean_s (v_s − m)‖²``: the mean inner product of different positions over that of a
    position with itself. The moments are averaged over ranks. Positions of one sequence that are of different documents
    are no pair: C and S are then those that give the mean over pairs within documents (`_moments_of_documents`).
    """

    mean_HK: Tensor
    square_H: Tensor
    square_of_mean_H: Tensor
    n_batches: Tensor
    length: Tensor
    frozen = False
    """True if the moments stay fixed in training too, because only an adapter is trained."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.register_buffer("mean_HK", torch.zeros(config.n_heads, config.d_value))
        self.register_buffer("square_H", torch.zeros(config.n_heads))
        self.register_buffer("square_of_mean_H", torch.zeros(config.n_heads))
        self.register_buffer("n_batches", torch.zeros(()))
        self.register_buffer("length", torch.zeros(()))

    @override
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> EstimatedCorrelation:
        """Convert the moments as any module does, but never below float32: ρ is a small difference of large ones."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, moment in self.named_buffers(recurse=False):
            if torch.finfo(moment.dtype).bits < 32:
                kept = before[name]
                assert kept is not None
                self._buffers[name] = kept.to(moment.device)
        return self

    def reset(self) -> None:
        """Forget all batches."""
        for moment in self.buffers():
            moment.zero_()

    @torch.no_grad()
    def update(self, v_BGSK: Tensor, documents: Documents | None = None) -> Tensor | None:
        """Add a batch: the first one sets the moments, later ones count a tenth. Return ρ ``[H]`` if a kernel does."""
        kernels = None if documents is not None else moment_kernels(v_BGSK, self.square_H.dtype)
        if kernels is None:
            flat = torch.cat([moment.flatten() for moment in self._batch(v_BGSK, documents)])
        else:
            average, settle = kernels
            flat = average(v_BGSK, len(self.square_H))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(flat)
            flat = flat / torch.distributed.get_world_size()
        if kernels is not None:
            return settle(flat, self.mean_HK, self.square_H, self.square_of_mean_H, self.n_batches, self.length)
        moments = (self.mean_HK, self.square_H, self.square_of_mean_H, self.length)
        share = torch.where(self.n_batches == 0, 1.0, _MOMENTUM)
        for moment, new in zip(moments, flat.split([x.numel() for x in moments]), strict=True):
            moment.lerp_(new.view_as(moment), share)
        self.n_batches += 1
        return None

    def _batch(self, v_BGSK: Tensor, documents: Documents | None) -> list[Tensor]:
        """Compute the moments of a batch, in the order of the buffers, and its length."""
        with torch.autocast(v_BGSK.device.type, enabled=False):
            v = v_BGSK.to(self.square_H.dtype)
            if documents is None:
                over_positions_BGK = v.mean(2)
                # Made on the device: a number from the host would make the stream wait.
                length = torch.full_like(self.length, v.shape[2])
                of_sequences_G = over_positions_BGK.square().sum(-1).mean(0)
                of_groups = [over_positions_BGK.mean(0), v.square().sum(-1).mean((0, 2)), of_sequences_G]
            else:
                *of_groups, length = _moments_of_documents(v, documents)
            n_shared = len(self.square_H) // v.shape[1]
            return [*(moment.repeat_interleave(n_shared, dim=0) for moment in of_groups), length]

    def forward(self, v_BGSK: Tensor, documents: Documents | None = None) -> Tensor:
        """Return the correlation of each head, ``[H, 1]``; 0 before the first batch."""
        if self.training and not self.frozen and v_BGSK.shape[2] > 1:
            rho_H = self.update(v_BGSK, documents)
            if rho_H is not None:
                return rho_H[:, None]
        centre_H = self.mean_HK.square().sum(-1)
        apart_H = (self.square_H - centre_H).clamp_min(_SMALLEST)
        together_H = self.square_of_mean_H - centre_H
        n = self.length.clamp_min(2)
        found_H = (n * together_H - apart_H) / ((n - 1) * apart_H)
        return (found_H.clamp(0, _LARGEST) * (self.n_batches > 0))[:, None]


def _moments_of_documents(v_BGSK: Tensor, documents: Documents) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the moments of values whose sequences hold several documents, padding left out: mean ``[G, K]``, mean
    square and mean square of the mean ``[G]``, and length ``[]``.

    The length is the average over tokens of the length of the token's document, ``S = Σn²/Σn``. The square of the mean
    is that of sequences of this length, if their pairs of positions have the mean product ``R`` of all pairs within
    documents: ``((S − 1)·R + A)/S``, with A the mean square.
    """
    real_BT = documents.number_BT >= 0
    # A number for each document of the batch, and one for padding, which is added up and left out.
    begins_BT = documents.position_BT == 0
    document_N = torch.where(real_BT, begins_BT.flatten().cumsum(0).view_as(real_BT), 0).flatten()
    real_N = real_BT.flatten()
    v_NGK = v_BGSK.transpose(1, 2).flatten(0, 1) * real_N[:, None, None]
    n_D = v_BGSK.new_zeros(len(document_N) + 1).index_add_(0, document_N, real_N.to(v_BGSK.dtype))
    sum_DGK = v_BGSK.new_zeros(len(document_N) + 1, *v_NGK.shape[1:]).index_add_(0, document_N, v_NGK)
    n, squares = n_D.sum(), n_D.square().sum()
    sum_of_squares_G = v_NGK.square().sum((0, 2))
    product_G = (sum_DGK.square().sum((0, 2)) - sum_of_squares_G) / (squares - n).clamp_min(1)
    length, square_G = squares / n, sum_of_squares_G / n
    return v_NGK.sum(0) / n, square_G, ((length - 1) * product_G + square_G) / length, length


#: Kinds of ρ by name.
CORRELATIONS: dict[str, type[Uncorrelated]] = {
    "none": Uncorrelated,
    "estimated": EstimatedCorrelation,
    "learned": LearnedCorrelation,
}


def estimated_correlations(model: nn.Module) -> list[EstimatedCorrelation]:
    """List every part of a model that has running moments."""
    return [part for part in model.modules() if isinstance(part, EstimatedCorrelation)]


def first_moment_tokens(vocab_size: int, max_seq_len: int, init_seed: int) -> Tensor:
    """Draw int64 ``[N, T]``: the random tokens that give a newborn model its first moments."""
    shape = (_N_SEQUENCES, min(max_seq_len, _LONGEST))
    drawn = keyed_generator(init_seed, "correlation").integers(0, vocab_size, shape, dtype=np.int64)
    return torch.from_numpy(drawn)


@torch.no_grad()
def initialize_moments(model: nn.Module, vocab_size: int, max_seq_len: int, init_seed: int) -> None:
    """Give a newborn model's estimated correlations their first moments, from random tokens that its seed decides.

    Without them it would start as the exact form, and its birth would be measured as another architecture's.
    """
    parts = estimated_correlations(model)
    if not parts:
        return
    tokens_BT = first_moment_tokens(vocab_size, max_seq_len, init_seed)
    modes = [part.training for part in parts]
    for part in parts:
        part.reset()
        part.train()
    with gathered_in_passes(model):
        model(tokens_BT.to(parts[0].square_H.device), last_only=True)
    reshard(model)
    for part, mode in zip(parts, modes, strict=True):
        part.train(mode)
