"""Quantities of [SO] as its released code computes them, where that differs from the definitions (definitions §18).

A snapshot measures them on request.
Legend: B sequences, H heads, T positions, K head width, C channels of all heads together, D width, R singular values.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .quantity import Sizes, unlisted
from .sinks import KeySums
from .summed_metrics import AdditiveMetric

#: Hidden units of a block that are listed for each of the two maps.
_N_UNITS = 10
#: Positions of a sequence whose states make an effective rank.
_RANK_POSITIONS = 128


class OutputsAndSums(Protocol):
    """Head outputs of a batch, and sums of the weights that queries give to keys."""

    @property
    def out_BHTK(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Input of the output projection."""

    @property
    def sums(self) -> KeySums:
        """Sums of the weights that queries give to keys."""


_listed_unit = partial(unlisted, axes=("layer", "rank"), section="neurons", per_block="first")
_UNITS = tuple(
    quantity
    for name in ("gate", "up")
    for quantity in (
        _listed_unit(
            f"released_{name}_unit",
            label="unit",
            definition=f"The hidden units whose rows of the {name} map have the largest norms, largest first "
            "(definitions §18).",
            format=".0f",
        ),
        _listed_unit(
            f"released_{name}_norm",
            label="norm of the row",
            definition=f"Norms of these rows of the {name} map (definitions §18).",
            format=".3g",
        ),
        _listed_unit(
            f"released_{name}_kurtosis",
            label="kurtosis of the down weights",
            definition=f"Excess kurtosis of the weights in the down map of the units of released_{name}_unit "
            "(definitions §18).",
            format=".3g",
        ),
    )
)


class ReleasedForms(AdditiveMetric):
    """Spread by position, effective rank, sink by layer and super neurons, as released. States from the pass are sums:
    additive over batches and ranks.

    Args:
        sizes: sizes of the model and the probe.
    """

    quantities = (
        unlisted(
            "released_spread_channels",
            ("layer", "position"),
            label="deviation over channels",
            definition="Standard deviation over all channels of what enters the output projection at one token, mean "
            "over sequences; the released code takes it on text (definitions §18).",
            format=".3g",
            section="aggregation",
            scale="log",
            per_block="first",
        ),
        unlisted(
            "released_spread_sequences",
            ("layer", "position"),
            label="deviation over sequences",
            definition="Standard deviation over sequences of each channel of what enters the output projection, mean "
            "over channels; the released code takes it on random tokens (definitions §18).",
            format=".3g",
            section="aggregation",
            scale="log",
            per_block="first",
        ),
        unlisted(
            "released_effective_rank",
            ("state",),
            label="rank of one sequence",
            definition="Effective rank of the states of one sequence, its first 128 positions at most, mean over "
            "sequences; as a scalar behind the last block (definitions §18).",
            section="dominance",
            scalar="last",
        ),
        unlisted(
            "released_sink",
            ("layer", "head"),
            label="attention to position 0",
            definition="Mean weight on position 0 over all queries, that of position 0 included; as a scalar the mean "
            "over layers and heads (definitions §18).",
            section="sink",
            scalar="mean",
            per_block="mean",
        ),
        *_UNITS,
    )

    deviation_sum: Tensor
    channel_sum: Tensor
    square_sum: Tensor
    n_sequences: Tensor
    rank_sum: Tensor
    n_ranks: Tensor
    sink_sum: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        n_layers, seq_len = sizes.n_layers, sizes.seq_len
        n_channels = sizes.n_heads * (sizes.d_head if sizes.d_value is None else sizes.d_value)
        self.add_sums(
            deviation_sum=(n_layers, seq_len),
            channel_sum=(n_layers, seq_len, n_channels),
            square_sum=(n_layers, seq_len, n_channels),
            n_sequences=(n_layers,),
            rank_sum=(n_layers + 1,),
            n_ranks=(n_layers + 1,),
            sink_sum=(n_layers, sizes.n_heads),
        )
        # Quantities of weights, which are the same for all batches and ranks.
        self.of_units = {quantity.name: np.full((n_layers, _N_UNITS), np.nan) for quantity in _UNITS}

    def attention(self, layer: int, attended: OutputsAndSums) -> None:
        """See models/observe.py."""
        self.update(layer - 1, attended.out_BHTK, attended.sums.importance_2BHT[0, :, :, 0])

    def residual(self, site: str, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py: the embedding, and the state behind each block."""
        if site != "attention":
            self.add_states(layer, h_BTD)

    def mlp_maps(self, layer: int, up_FD: Tensor, down_DF: Tensor, gate_FD: Tensor | None) -> None:
        """Read the weights of a block (from 1); without a gate map, its units stay NaN."""
        for name, map_FD in (("gate", gate_FD), ("up", up_FD)):
            if map_FD is None:
                continue
            norm_F = torch.linalg.vector_norm(map_FD.detach().float(), dim=-1)
            norm_U, unit_U = norm_F.topk(min(_N_UNITS, len(norm_F)))
            found = {"unit": unit_U, "norm": norm_U, "kurtosis": _excess_kurtosis(down_DF.detach()[:, unit_U].double())}
            for what, values_U in found.items():
                self.of_units[f"released_{name}_{what}"][layer - 1, : len(unit_U)] = values_U.cpu().numpy()

    def update(self, layer: int, out_BHTK: Tensor, on_first_BH: Tensor) -> None:
        """Add a batch of one layer (from 0).

        Args:
            layer: the layer.
            out_BHTK: input of the output projection.
            on_first_BH: mean weight on position 0 over all queries.
        """
        out_BTC = out_BHTK.transpose(1, 2).flatten(2).double()
        self.deviation_sum[layer].add_(out_BTC.std(-1).sum(0))
        self.channel_sum[layer].add_(out_BTC.sum(0))
        self.square_sum[layer].add_(out_BTC.square().sum(0))
        self.sink_sum[layer].add_(on_first_BH.sum(0))
        self.n_sequences[layer].add_(len(out_BTC))

    def add_states(self, place: int, h_BTD: Tensor) -> None:
        """Add a batch of hidden states seen at one place: 0 is the embedding, l is behind block l."""
        singular_BR = torch.linalg.svdvals(h_BTD[:, :_RANK_POSITIONS].double())
        total_B1 = singular_BR.sum(-1, keepdim=True)
        rank_B = torch.special.entr(singular_BR / total_B1).sum(-1).exp()
        # States of zeros have the rank 0, as in the released code.
        self.rank_sum[place].add_(rank_B.where(total_B1[:, 0] > 0, 0.0).sum())
        self.n_ranks[place].add_(len(h_BTD))

    def compute(self) -> dict[str, np.ndarray]:
        """Return all arrays; deviations over sequences are NaN for fewer than two sequences."""
        n_L1 = self.n_sequences[:, None]
        scatter_LTC = (self.square_sum - self.channel_sum.square() / n_L1[..., None]).clamp_min(0)
        found = {
            "released_spread_channels": self.deviation_sum / n_L1,
            "released_spread_sequences": (scatter_LTC / (n_L1[..., None] - 1)).sqrt().mean(-1),
            "released_effective_rank": self.rank_sum / self.n_ranks,
            "released_sink": self.sink_sum / n_L1,
        }
        return {name: value.cpu().numpy() for name, value in found.items()} | self.of_units


def _excess_kurtosis(weights_DU: Tensor) -> Tensor:
    """Compute ``E[(w − w̄)⁴] / E[(w − w̄)²]² − 3`` of every column."""
    squares_DU = (weights_DU - weights_DU.mean(0)).square()
    return squares_DU.square().mean(0) / squares_DU.mean(0).square() - 3
