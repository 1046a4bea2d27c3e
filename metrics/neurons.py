"""MLP hidden units that fire at the first position alone: super neurons (definitions §7) [SO]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .activation_sums import ActivationSums
from .summed_metrics import AdditiveMetric

#: Robust z of a unit's mean |activation| at position 0, among its layer's units, from which on it is an outlier.
Z_THRESHOLD = 10.0
#: Least ratio of a super neuron's |activation| at position 0 to its mean |activation| at the other positions.
RATIO_THRESHOLD = 5.0


class ActivationResult(NamedTuple):
    """Float64; ``L`` layers, ``F`` hidden units."""

    first: np.ndarray
    """``[L, F]`` mean |activation| at position 0 over sequences."""
    others: np.ndarray
    """``[L, F]`` mean |activation| over sequences and positions t ≥ 1; NaN where sequences have a single position."""


class SuperNeurons(AdditiveMetric):
    """Mean |activation| of every hidden unit at position 0 and elsewhere. States are sums: additive.

    See :func:`super_neurons` for the decision, and :func:`unit_weights` for the weights of the units.

    Args:
        n_layers: layers that will be updated.
        d_ff: hidden units per layer.
    """

    first_sum: Tensor
    others_sum: Tensor
    n_sequences: Tensor

    def __init__(self, n_layers: int, d_ff: int) -> None:
        super().__init__()
        self.n_others = 0
        self.add_sums(first_sum=(n_layers, d_ff), others_sum=(n_layers, d_ff), n_sequences=(n_layers,))

    def update(self, layer: int, a_BTF: Tensor | ActivationSums) -> None:
        """Add a batch of hidden activations ``[B, T, F]`` of one layer (from 0), as they enter the down projection."""
        sums = ActivationSums.of(a_BTF)
        n_others = sums.x_BTD.shape[1] - 1
        if self.n_others != n_others:
            self.flush()
            self.n_others = n_others
        self.keep(layer, sums.first_size, sums.later_size)

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        first_PBF, others_PBF = tensors_P
        self.first_sum[places].add_(first_PBF.sum(1, dtype=torch.float64))
        self.others_sum[places].add_(others_PBF.sum(1, dtype=torch.float64) / (self.n_others or torch.nan))
        self.n_sequences[places].add_(first_PBF.shape[1])

    def compute(self) -> ActivationResult:
        """Return both means of every unit."""
        n_L1 = self.n_sequences[:, None]
        return ActivationResult((self.first_sum / n_L1).cpu().numpy(), (self.others_sum / n_L1).cpu().numpy())


class SuperNeuronResult(NamedTuple):
    """Float64 or bool, of the shape that was given."""

    z: np.ndarray
    """Robust z of the mean |activation| at position 0 among the layer's units."""
    ratio: np.ndarray
    """Mean |activation| at position 0 over that at the others; inf where a unit is silent elsewhere alone."""
    is_super: np.ndarray
    """True for super neurons."""


def robust_z(x: np.ndarray) -> np.ndarray:
    """Compute ``(x − median) / (1.4826 · MAD)`` over the last axis, a z score that outliers themselves do not shrink.

    If more than half of the values are one number the MAD is 0: that number has z 0 and any other ±inf.
    """
    deviation = x - np.median(x, axis=-1, keepdims=True)
    scale = 1.4826 * np.median(np.abs(deviation), axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(deviation == 0, 0.0, deviation / scale)


def super_neurons(
    first: np.ndarray, others: np.ndarray, z_threshold: float = Z_THRESHOLD, ratio_threshold: float = RATIO_THRESHOLD
) -> SuperNeuronResult:
    """Decide which units are super neurons: an outlier at position 0, and many times louder there than elsewhere.

    Args:
        first: mean |activation| at position 0, ``[…, F]``; z is taken over the last axis.
        others: the same at the other positions.
        z_threshold: smallest robust z at position 0.
        ratio_threshold: smallest ratio of the two.
    """
    z = robust_z(first)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(first == 0, 0.0, first / others)
    return SuperNeuronResult(z, ratio, (z >= z_threshold) & (ratio >= ratio_threshold))


class UnitWeights(NamedTuple):
    """Weights that hidden units read and write with, one value per unit, on the CPU."""

    gate_norm: np.ndarray
    """Float64 norm of the unit's gate column; NaN where the MLP has no gate."""
    up_norm: np.ndarray
    """Float64 norm of the unit's up column."""
    down_sparsity: np.ndarray
    """Float64 max/mean of |down row|: 1 writes into all dimensions alike, d into a single one; 1 for a row of zeros."""
    down_dimension: np.ndarray
    """int64: the residual dimension that the unit writes most into."""


def no_weights(n_units: int) -> UnitWeights:
    """Return NaN weights for ``n_units`` units whose weights are unknown."""
    unknown = np.full(n_units, np.nan)
    return UnitWeights(unknown, unknown, unknown, np.zeros(n_units, dtype=np.int64))


def unit_weights(units: np.ndarray, up_FD: Tensor, down_DF: Tensor, gate_FD: Tensor | None = None) -> UnitWeights:
    """Read the norms, sparsity and outlier dimension of the given hidden units' weights.

    The papers' gate and up *columns* and down *rows* are the rows of ``up.weight`` and ``gate.weight`` ``[F, d]`` and
    the columns of ``down.weight`` ``[d, F]`` as ``torch.nn.Linear`` keeps them.
    """
    index = torch.from_numpy(np.ascontiguousarray(units)).to(up_FD.device)

    def norm(weight_FD: Tensor) -> np.ndarray:
        return torch.linalg.vector_norm(weight_FD.detach()[index].double(), dim=-1).cpu().numpy()

    down_UD = down_DF.detach()[:, index].T.abs().double()
    largest_U, dimension_U = down_UD.max(-1)
    sparsity_U = torch.where(largest_U > 0, largest_U / down_UD.mean(-1), 1.0)
    return UnitWeights(
        np.full(len(units), np.nan) if gate_FD is None else norm(gate_FD),
        norm(up_FD),
        sparsity_U.cpu().numpy(),
        dimension_U.cpu().numpy(),
    )
