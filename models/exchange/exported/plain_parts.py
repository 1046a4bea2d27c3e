"""Replacements, in an exported file, of parts for training only, on plain operators of torch.

A fused kernel with a log-sum-exp becomes explicit weights, a block of queries at a time; parts with a fused operator in
torch keep it. Tests compare these with the parts that they replace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...activations import ACTIVATIONS
from ...attention.fused.blockwise import softmax_rows
from ...attention.normalisers import Explicit
from ...attention.rotation import turned
from ...attention.scores import ExtraKey, Scores
from ...attention.weight_reader import WeightReader
from ...config import ModelConfig
from ...linear_cross_entropy import IGNORED, TokenLosses, soft_capped, wide

PartT = TypeVar("PartT", bound=nn.Module)


class FusedSoftmax(Explicit):
    """Softmax: torch's fused attention if only its output is needed, explicit weights otherwise."""

    def __init__(
        self, scores: Scores, v_BGSK: Tensor, extra: list[ExtraKey], needs_weights: bool, needs_squares: bool = False
    ) -> None:
        masked = scores.window is not None or scores.prefix is not None or scores.place.documents is not None
        if masked or scores.place.slopes_H is not None or extra or needs_weights or needs_squares:
            super().__init__(scores, v_BGSK, extra, softmax_rows)
            return
        self.scores, self.extra, self.weigh, self.reader = scores, extra, softmax_rows, None
        grouped = v_BGSK.shape[1] != scores.q_BHTK.shape[1]
        self.o_BHTK = F.scaled_dot_product_attention(
            scores.q_BHTK, scores.k_BGSK, v_BGSK, is_causal=True, scale=scores.scale, enable_gqa=grouped
        )


def build_part(part: str, name: str, table: Mapping[str, type[PartT]], base: type[PartT], config: ModelConfig) -> PartT:
    """Build the part of one block that ``model.attention.PART`` names: a row of its table."""
    return table[name](config)


def new_reader(scores: Scores, rows_sum_to_one: bool) -> WeightReader | None:
    """Return None: no reader sees the weights as they are computed; they can be read afterwards."""
    return None


def rotate(x_BHTK: Tensor, rotation: Tensor | None) -> Tensor:
    """Turn the channel pairs of queries or keys, if the model has rotary positions."""
    return x_BHTK if rotation is None else turned(x_BHTK, rotation)


def normed_difference(sums: list[Tensor], share: Tensor, gain: Tensor, eps: float, times: float) -> Tensor | None:
    """Return None: no kernel takes the difference and its norm together."""
    return None


def moment_kernels(v_BGSK: Tensor, dtype: torch.dtype) -> None:
    """Return None: no kernels move the moments of values."""


def scaled(x_BHTK: Tensor, factor_BHT: Tensor) -> Tensor:
    """Multiply every row by its factor."""
    return x_BHTK * factor_BHT[..., None].to(x_BHTK.dtype)


def rotate_and_multiply(x_BHTK: Tensor, rotation: Tensor | None, v_HNK: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate, and return the products of the result with the vectors of each head too, ``[B, H, T, N]``, in float32."""
    x_BHTK = rotate(x_BHTK, rotation)
    return x_BHTK, x_BHTK.float() @ v_HNK.float().mT


def activated(activation: str, x: Tensor, factor: Tensor | None = None) -> Tensor:
    """Apply the named activation, and multiply with a factor if given."""
    y = ACTIVATIONS[activation](x)
    return y if factor is None else y * factor


def read_rows(table_VD: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of int64 ids, and the table."""
    return F.embedding(ids, table_VD), table_VD


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Apply torch's RMS norm."""
    return F.rms_norm(x, gain.shape, gain, eps)


def fused_experts(
    experts: nn.ModuleList, x_ND: Tensor, weight_NK: Tensor, chosen_NK: Tensor, count_E: Tensor
) -> Tensor | None:
    """Return None: each expert is a module and is called for its rows."""
    return None


def rows_of_experts(count_E: Tensor, n_sequences: int, n_choices: int) -> list[int]:
    """Return the number of rows of each expert."""
    found: list[int] = count_E.tolist()
    return found


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, z_loss: float = 0.0, cap: float | None = None
) -> TokenLosses:
    """Compute the losses of the logits ``x @ weightᵀ``, which are held all at once."""
    logits_NV = soft_capped(F.linear(x_ND, weight_VD.to(x_ND.dtype)), cap)
    logits_NV = logits_NV.to(wide(logits_NV.dtype))
    counts_N = targets_N != IGNORED
    n = counts_N.sum().clamp_min(1)
    losses_N = F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="none")
    squares = torch.where(counts_N, logits_NV.logsumexp(-1).square(), 0).sum() / n
    cross_entropy, penalty = losses_N.sum() / n, z_loss * squares
    return TokenLosses(cross_entropy + penalty, cross_entropy.detach(), penalty.detach(), losses_N.detach())
