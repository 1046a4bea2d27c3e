"""From the metrics of one pass to the scalars and arrays of a snapshot (docs/run-directory.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..metrics.neurons import UnitWeights, super_neurons, unit_weights
from ..metrics.preference import TokenPreference, coverage, kl_to_uniform, normalised_entropy, preference_ratio
from ..metrics.rankings import kendall_tau, rank_biased_overlap, spearman, top_overlap
from ..models.decoder import Block, Decoder
from ..models.tensor_shards import whole
from .foreign import ForeignModel
from .observer import N_NEURONS, BiasObserver


@dataclass(frozen=True)
class BirthReference:
    """What later checkpoints are compared with: the mean directions and the preference of a newborn model."""

    direction: np.ndarray
    """``[L+1, d]`` float64 unit vectors: the seed direction."""
    mean_prob: np.ndarray
    """``[V]`` float64: p̄."""


@dataclass(frozen=True)
class Measurement:
    """All that one pass tells. Names, shapes and units: docs/run-directory.md."""

    scalars: dict[str, float]
    arrays: dict[str, np.ndarray]


Scalars = dict[str, float | np.floating | np.integer]
Arrays = dict[str, np.ndarray]


def summarise(
    model: Decoder | ForeignModel,
    observer: BiasObserver,
    preference: TokenPreference,
    birth: BirthReference | None,
    strangers: list[BirthReference],
) -> Measurement:
    """Scalars and arrays of one pass of ``model``, compared with births; without one, what needs it is left out."""
    scalars: Scalars = {}
    arrays: Arrays = {}
    for more_scalars, more_arrays in (
        _bias(observer, preference, birth, strangers),
        _sinks(observer),
        _aggregation(observer),
        _neurons(observer, model),
        _states(observer),
        _lock(observer),
    ):
        scalars |= more_scalars
        arrays |= more_arrays
    return Measurement({name: float(value) for name, value in scalars.items()}, arrays)


def _bias(
    observer: BiasObserver, preference: TokenPreference, birth: BirthReference | None, strangers: list[BirthReference]
) -> tuple[Scalars, Arrays]:
    """Contraction, alignment and token preference (definitions §3, §4)."""
    alignment = observer.alignment.compute()
    mlp, attention = observer.after_mlp.compute(), observer.after_attention.compute()
    p, w = preference.compute()
    arrays = {
        "mean_prob": p,
        "argmax_share": w,
        "mean_direction": alignment.mean_direction,
        "inter_mlp": mlp.inter,
        "intra_mlp": mlp.intra,
        "inter_attention": attention.inter,
        "intra_attention": attention.intra,
    }
    scalars: Scalars = {
        "inter": mlp.inter[-1],
        "intra": mlp.intra[-1],
        "kl_uniform": kl_to_uniform(p),
        "preference_ratio": preference_ratio(p),
        "top1_share": w.max(),
        "coverage_80": coverage(w),
        "entropy": normalised_entropy(p),
        "entropy_argmax": normalised_entropy(w),
    }
    if birth is not None:
        q = birth.mean_prob
        by_layer = {name: getattr(alignment, name)[0] for name in ("alignment", "drift", "energy_share")}
        arrays |= by_layer
        scalars |= {name: of_layers[-1] for name, of_layers in by_layer.items()}
        scalars |= {
            "energy_share_chance": 1 / birth.direction.shape[-1],
            "rank_persistence": spearman(p, q),
            "kendall_tau": kendall_tau(p, q),
            **{f"overlap_{k}": top_overlap(p, q, k) for k in (10, 100, 1000) if k <= len(p)},
            "rbo": rank_biased_overlap(p, q),
        }
    if birth is not None or strangers:
        arrays["alignment_stranger"] = alignment.alignment[len(alignment.alignment) - len(strangers) :]
        arrays["rank_persistence_stranger"] = np.array([spearman(p, s.mean_prob) for s in strangers])
    if strangers:
        scalars["alignment_stranger"] = np.abs(arrays["alignment_stranger"][:, -1]).max()
        scalars["rank_persistence_stranger"] = np.abs(arrays["rank_persistence_stranger"]).max()
    return scalars, arrays


def _sinks(observer: BiasObserver) -> tuple[Scalars, Arrays]:
    """Attention sinks (definitions §5)."""
    sinks = observer.sinks.compute()
    scalars: Scalars = {"sink_uniform": sinks.uniform, "sink_epsilon": observer.sinks.epsilon}
    arrays: Arrays = {"sink_epsilons": np.array(observer.sinks.grid)}
    for suffix in ("",) if observer.rows_sum_to_one else ("", "_normalised"):
        mass, rate = getattr(sinks, f"mass{suffix}"), getattr(sinks, f"rate{suffix}")[..., 0]
        grid_ELHT = getattr(sinks, f"rate_grid{suffix}")
        arrays |= {
            f"sink_mass{suffix}": mass,
            f"sink_rate{suffix}": rate,
            f"sink_rate_grid{suffix}": np.ascontiguousarray(grid_ELHT[..., 0]),
            f"sink_rate_by_key{suffix}": grid_ELHT.mean((1, 2)),
            f"sink_position{suffix}": getattr(sinks, f"position{suffix}"),
            f"importance{suffix}": getattr(sinks, f"importance{suffix}"),
        }
        scalars |= {
            f"sink_mass{suffix}": mass.mean(),
            f"sink_mass{suffix}_max": mass.max(),
            f"sink_rate{suffix}": rate.mean(),
        }
    return scalars, arrays


def _aggregation(observer: BiasObserver) -> tuple[Scalars, Arrays]:
    """Positional variance and effective number of tokens (definitions §6)."""
    variance, variance_out = observer.variance.compute(), observer.variance_out.compute()
    tokens = observer.tokens.compute()
    arrays = {
        "positional_variance": variance.variance,
        "positional_variance_out": variance_out.variance,
        "variance_discrepancy": variance.discrepancy,
        "variance_discrepancy_out": variance_out.discrepancy,
        "n_eff": tokens.n_eff,
    }
    if not observer.rows_sum_to_one:
        arrays["n_eff_normalised"] = tokens.n_eff_normalised
    scalars: Scalars = {
        "variance_discrepancy": variance.discrepancy.mean(),
        "variance_discrepancy_out": variance_out.discrepancy.mean(),
        "n_eff": tokens.n_eff_normalised[..., -1].mean(),
    }
    return scalars, arrays


def _mlp_weights(model: Decoder | ForeignModel) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Each block's up ``[F, d]``, down ``[d, F]`` and gate ``[F, d]`` maps."""
    if isinstance(model, ForeignModel):
        yield from model.mlp_weights()
        return
    for block in model.blocks:
        assert isinstance(block, Block)
        # A block at a time is whole.
        gate = block.mlp.gate
        yield whole(block.mlp.up.weight), whole(block.mlp.down.weight), None if gate is None else whole(gate.weight)


def _neurons(observer: BiasObserver, model: Decoder | ForeignModel) -> tuple[Scalars, Arrays]:
    """Super neurons (definitions §7): every unit's activations, and weights of the units of largest robust z."""
    first_LF, others_LF = observer.units.compute()
    z_LF, ratio_LF, is_super_LF = super_neurons(first_LF, others_LF)
    top_LK = np.argsort(-z_LF, axis=-1, kind="stable")[:, :N_NEURONS]
    weights = [unit_weights(top, *maps) for top, maps in zip(top_LK, _mlp_weights(model), strict=True)]
    arrays = {
        "activation_first": first_LF,
        "activation_others": others_LF,
        "super_neurons": is_super_LF.sum(-1),
        "neuron_index": top_LK,
    }
    for name, of_units in (
        ("first", first_LF),
        ("others", others_LF),
        ("z", z_LF),
        ("ratio", ratio_LF),
        ("is_super", is_super_LF),
    ):
        arrays[f"neuron_{name}"] = np.take_along_axis(of_units, top_LK, axis=-1)
    for name, by_layer in zip(UnitWeights._fields, zip(*weights, strict=True), strict=True):
        arrays[f"neuron_{name}"] = np.stack(by_layer)
    return {"super_neurons": is_super_LF.sum()}, arrays


def _states(observer: BiasObserver) -> tuple[Scalars, Arrays]:
    """Dominance, massive activations and effective rank of the residual stream (definitions §7)."""
    dominance, massive, rank = observer.dominance.compute(), observer.massive.compute(), observer.rank.compute()
    arrays = {
        "dominance": dominance.by_position,
        "massive_value": massive.value,
        "massive_position": massive.position,
        "massive_channel": massive.channel,
        "effective_rank": rank.effective_rank,
        "singular_values": rank.singular_values,
    }
    strongest = dominance.first.argmax()
    scalars: Scalars = {
        "dominance_first": dominance.first[strongest],
        "dominance_median": dominance.median[strongest],
        "massive_max": massive.value.max(),
        "effective_rank": rank.effective_rank[-1],
    }
    return scalars, arrays


def _lock(observer: BiasObserver) -> tuple[Scalars, Arrays]:
    """QK lock (definitions §7)."""
    lock = observer.lock.compute()
    arrays = {"qk_cosine": lock.cosine, "qk_cosine_signed": lock.signed, "qk_positive": lock.positive}
    return {"qk_cosine": lock.cosine.mean(), "qk_positive": lock.positive.mean()}, arrays
