"""The metrics of every snapshot: the inputs of each from a pass, and its results by declared names.

Their quantities are declared in ``metrics/quantities.py``. A key there that names a class observes the pass itself; the
others, which need more than the pass or belong together, have their row in `OBSERVED`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import numpy as np
from torch import Tensor
from typing_extensions import override

from .. import metrics as _metrics
from ..metrics.activation_sums import ActivationSums
from ..metrics.directions import Contraction
from ..metrics.dominance import DominanceRatio, EffectiveRank, MassiveActivations, RankBeside, RankOfPlaces
from ..metrics.neurons import SuperNeurons, UnitWeights, no_weights, super_neurons, unit_weights
from ..metrics.preference import coverage, kl_to_uniform, normalised_entropy, preference_ratio
from ..metrics.qk_lock import QKLock
from ..metrics.quantities import METRICS
from ..metrics.quantity import SCALARS
from ..metrics.rankings import Ranked, kendall_tau, rank_biased_overlap, spearman, top_overlap
from ..metrics.sinks import AttentionSinks, DocumentSinks
from ..metrics.variance import EffectiveTokens, PositionalVariance
from ..models.observe import Site
from .observed_metrics import Arrays, AttentionView, MetricSource, Observed, Scalars, SelfObserving, Setting, mlp_maps
from .ranks import world_size

#: The mean of the numbers in an array, which blocks that show nothing do not have.
mean = SCALARS["mean"]
#: Values of ε at which sink rates are measured beside the configured one.
SINK_EPSILONS = tuple(i / 10 for i in range(1, 10))
#: Number of massive activations, and of hidden units per layer, that are listed.
N_MASSIVE, N_NEURONS = 10, 10
#: Rows of a second moment that a GPU computes together.
N_MOMENT_ROWS = 256


class _Builtin(Observed):
    """A built-in metric, under its key in ``metrics/quantities.py``."""

    key: ClassVar[str]

    def __init__(self, setting: Setting) -> None:
        self.name, self.quantities = self.key, METRICS[self.key]


class ObservedContraction(_Builtin):
    """Contraction after attention and after the MLP (definitions §3)."""

    key = "contraction"
    takes_sums = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        n_layers, width = setting.sizes.n_layers, setting.sizes.d_model
        self.after_mlp = Contraction(n_layers + 1, width)
        self.after_attention = Contraction(n_layers, width)
        self.sees_attention = all(unseen.place != "after_attention" for unseen in setting.unseen)

    def residual(self, site: Site, layer: int, sums: ActivationSums) -> None:
        """See models/observe.py."""
        if site == "attention":
            self.after_attention.update(layer - 1, sums)
        else:
            self.after_mlp.update(layer, sums)

    @override
    def result(self) -> tuple[Scalars, Arrays]:
        mlp = self.after_mlp.compute()
        arrays = {"inter_mlp": mlp.inter, "intra_mlp": mlp.intra}
        nothing = np.full(len(mlp.inter) - 1, np.nan)
        attention = self.after_attention.compute() if self.sees_attention else None
        arrays["inter_attention"] = nothing if attention is None else attention.inter
        arrays["intra_attention"] = nothing if attention is None else attention.intra
        return {"inter": mlp.inter[-1], "intra": mlp.intra[-1]}, arrays


class ObservedPreference(_Builtin):
    """Token preference (definitions §4)."""

    key = "preference"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.preference = setting.preference

    def logits(self, logits_BV: Tensor) -> None:
        """See :class:`Observed`."""
        self.preference.update(logits_BV)

    @override
    def result(self) -> tuple[Scalars, Arrays]:
        p, w = self.preference.compute()
        scalars: Scalars = {
            "kl_uniform": kl_to_uniform(p),
            "preference_ratio": preference_ratio(p),
            "top1_share": w.max(),
            "coverage_80": coverage(w),
            "entropy": normalised_entropy(p),
            "entropy_argmax": normalised_entropy(w),
        }
        return scalars, {"mean_prob": p, "argmax_share": w}


class ObservedBirth(_Builtin):
    """Alignment and persistence: the pass compared with births (definitions §3, §4).

    The preference itself is fed by :class:`ObservedPreference`.
    """

    key = "birth"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.alignment, self.preference = setting.alignment, setting.preference
        self.birth, self.strangers = setting.birth, setting.strangers

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        if site != "attention":
            self.alignment.update(layer, h_BTD)

    @override
    def result(self) -> tuple[Scalars, Arrays]:
        alignment, p = self.alignment.compute(), Ranked(self.preference.compute().mean_prob)
        arrays, scalars = {"mean_direction": alignment.mean_direction}, Scalars()
        birth, strangers = self.birth, self.strangers
        if birth is not None:
            q = birth.preference
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
            arrays["rank_persistence_stranger"] = np.array([spearman(p, s.preference) for s in strangers])
        if strangers:
            scalars["alignment_stranger"] = np.abs(arrays["alignment_stranger"][:, -1]).max()
            scalars["rank_persistence_stranger"] = np.abs(arrays["rank_persistence_stranger"]).max()
        return scalars, arrays


class ObservedSinks(_Builtin):
    """Attention sinks (definitions §5)."""

    key = "sinks"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        sizes, self.rows_sum_to_one = setting.sizes, setting.rows_sum_to_one
        missing = setting.missing(self)
        self.shown = [layer for layer in range(sizes.n_layers) if layer + 1 not in missing]
        self.sinks = AttentionSinks(
            sizes.n_layers,
            sizes.n_heads,
            sizes.seq_len,
            setting.sink_epsilon,
            SINK_EPSILONS,
            rows_sum_to_one=self.rows_sum_to_one,
        )

    def attention(self, layer: int, attended: AttentionView) -> None:
        """See models/observe.py."""
        self.sinks.update(layer - 1, attended.sums)

    @override
    def result(self) -> tuple[Scalars, Arrays]:
        sinks = self.sinks.compute()
        scalars: Scalars = {"sink_uniform": sinks.uniform, "sink_epsilon": self.sinks.epsilon}
        arrays: Arrays = {"sink_epsilons": np.array(self.sinks.grid)}
        for suffix in ("",) if self.rows_sum_to_one else ("", "_normalised"):
            mass, rate = getattr(sinks, f"mass{suffix}"), getattr(sinks, f"rate{suffix}")[..., 0]
            grid_ELHT = getattr(sinks, f"rate_grid{suffix}")
            arrays |= {
                f"sink_mass{suffix}": mass,
                f"sink_rate{suffix}": rate,
                f"sink_rate_grid{suffix}": np.ascontiguousarray(grid_ELHT[..., 0]),
                f"sink_rate_by_key{suffix}": grid_ELHT.mean(2)[:, self.shown].mean(1),
                f"sink_position{suffix}": getattr(sinks, f"position{suffix}"),
                f"importance{suffix}": getattr(sinks, f"importance{suffix}"),
            }
            scalars |= {
                f"sink_mass{suffix}": mean(mass),
                f"sink_mass{suffix}_max": SCALARS["max"](mass),
                f"sink_rate{suffix}": mean(rate),
            }
        return scalars, arrays


class ObservedDocumentSinks(_Builtin):
    """Sinks at documents that begin inside a sequence (definitions §5)."""

    key = "document_sinks"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        sizes, self.rows_sum_to_one = setting.sizes, setting.rows_sum_to_one
        self.has_documents = setting.has_documents
        self.sinks = DocumentSinks(sizes.n_layers, sizes.n_heads)

    def attention(self, layer: int, attended: AttentionView) -> None:
        """See models/observe.py."""
        if attended.first_BT is not None and (on_first_2BHT := attended.sums.on_first_2BHT) is not None:
            self.sinks.update(layer - 1, on_first_2BHT, attended.first_BT)

    @override
    def result(self) -> tuple[Scalars, Arrays]:
        found = self.sinks.compute() if self.has_documents else None
        if found is None:
            return {}, {}
        arrays = {"document_sink_mass": found.mass}
        if not self.rows_sum_to_one:
            arrays["document_sink_mass_normalised"] = found.mass_normalised
        scalars: Scalars = {"document_sink_uniform": found.uniform, "document_sink_documents": found.n_documents}
        return scalars | {name: mean(array) for name, array in arrays.items()}, arrays


class ObservedAggregation(_Builtin):
    """Positional variance and effective number of tokens (definitions §6)."""

    key = "aggregation"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        sizes, attention = setting.sizes, setting.model.config.attention
        self.rows_sum_to_one = setting.rows_sum_to_one
        self.tokens = EffectiveTokens(sizes.n_layers, sizes.n_heads, sizes.seq_len)
        shape = sizes.n_layers, sizes.n_heads, sizes.seq_len, sizes.d_value or sizes.d_head

        def made() -> PositionalVariance:
            return PositionalVariance(*shape, n_constant=setting.n_constant, dtype=setting.dtype)

        self.variance = made()
        # Variance after norm, calibration, gate and adapter; without them it equals that of the value aggregation.
        plain = attention.aggregation == "plain" and attention.gate == "none" and not setting.adapter.changes_outputs
        self.variance_out = self.variance if plain else made()

    def attention(self, layer: int, attended: AttentionView) -> None:
        """See models/observe.py."""
        raw_BHT, normalised_BHT = attended.sums.squares_2BHT
        self.tokens.update(layer - 1, raw_BHT, None if self.rows_sum_to_one else normalised_BHT)
        self.variance.update(layer - 1, attended.o_BHTK)
        if self.variance_out is not self.variance:
            self.variance_out.update(layer - 1, attended.out_BHTK)

    @override
    def result(self) -> tuple[Scalars, Arrays]:
        variance, variance_out = self.variance.compute(), self.variance_out.compute()
        tokens = self.tokens.compute()
        arrays = {
            "positional_variance": variance.variance,
            "positional_variance_out": variance_out.variance,
            "variance_discrepancy": variance.discrepancy,
            "variance_discrepancy_out": variance_out.discrepancy,
            "n_eff": tokens.n_eff,
        }
        if not self.rows_sum_to_one:
            arrays["n_eff_normalised"] = tokens.n_eff_normalised
        scalars: Scalars = {
            "variance_discrepancy": mean(variance.discrepancy),
            "variance_discrepancy_out": mean(variance_out.discrepancy),
            "n_eff": mean(tokens.n_eff_normalised[..., -1]),
        }
        return scalars, arrays


class ObservedNeurons(_Builtin):
    """Super neurons (definitions §7): every unit's activations, and weights of the units of largest robust z."""

    key = "neurons"
    takes_sums = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.model = setting.model
        self.units = SuperNeurons(setting.sizes.n_layers, setting.sizes.d_ff)
        self.weights: list[UnitWeights] = []

    def neurons(self, layer: int, sums: ActivationSums) -> None:
        """See models/observe.py."""
        self.units.update(layer - 1, sums)

    @override
    def passed(self, layer: int) -> None:
        if layer:
            first_LF, others_LF = self.units.compute()
            top_K = _loudest(super_neurons(first_LF[layer - 1], others_LF[layer - 1]).z)
            maps = mlp_maps(self.model, layer)
            self.weights.append(no_weights(len(top_K)) if maps is None else unit_weights(top_K, *maps))

    @override
    def result(self) -> tuple[Scalars, Arrays]:
        first_LF, others_LF = self.units.compute()
        z_LF, ratio_LF, is_super_LF = super_neurons(first_LF, others_LF)
        top_LK = _loudest(z_LF)
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
        for name, by_layer in zip(UnitWeights._fields, zip(*self.weights, strict=True), strict=True):
            arrays[f"neuron_{name}"] = np.stack(by_layer)
        return {"super_neurons": is_super_LF.sum()}, arrays


def _loudest(z: np.ndarray) -> np.ndarray:
    """Return the units of largest robust z, along the last axis."""
    return np.argsort(-z, axis=-1, kind="stable")[..., :N_NEURONS]


class ObservedStates(_Builtin):
    """Dominance, massive activations and effective rank of the residual stream (definitions §7)."""

    key = "states"
    takes_sums = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        n_places, seq_len, width = setting.sizes.n_layers + 1, setting.sizes.seq_len, setting.sizes.d_model
        self.dominance = DominanceRatio(n_places, seq_len)
        self.massive = MassiveActivations(n_places, seq_len, width, N_MASSIVE)
        self.rank: EffectiveRank | RankBeside | RankOfPlaces
        if setting.by_block:
            self.rank = RankOfPlaces(n_places, width)
            return
        n_rows = None if setting.device.type == "cpu" else N_MOMENT_ROWS
        self.rank = EffectiveRank(n_places, width, n_rows)
        if setting.device.type == "cuda" and world_size() == 1 and self.rank.at_most:
            self.rank, self.is_solving = RankBeside(self.rank, setting.n_sequences), True

    def residual(self, site: Site, layer: int, sums: ActivationSums) -> None:
        """See models/observe.py."""
        if site != "attention":
            self.dominance.update(layer, sums)
            self.massive.update(layer, sums)
            self.rank.update(layer, sums.x_BTD)

    @override
    def passed(self, layer: int) -> None:
        if isinstance(self.rank, RankOfPlaces):
            self.rank.passed(layer)

    @override
    def result(self) -> tuple[Scalars, Arrays]:
        dominance, massive, rank = self.dominance.compute(), self.massive.compute(), self.rank.compute()
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


class ObservedLock(_Builtin):
    """QK lock (definitions §7)."""

    key = "lock"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        sizes = setting.sizes
        self.lock = QKLock(sizes.n_layers, sizes.n_heads, sizes.d_head)

    def attention(self, layer: int, attended: AttentionView) -> None:
        """See models/observe.py."""
        self.lock.update(layer - 1, attended.query_sums)

    @override
    def result(self) -> tuple[Scalars, Arrays]:
        lock = self.lock.compute()
        arrays = {"qk_cosine": lock.cosine, "qk_cosine_signed": lock.signed, "qk_positive": lock.positive}
        return {"qk_cosine": mean(lock.cosine), "qk_positive": mean(lock.positive)}, arrays


OBSERVED: Mapping[str, type[_Builtin]] = {
    metric.key: metric
    for metric in (
        ObservedContraction,
        ObservedPreference,
        ObservedBirth,
        ObservedSinks,
        ObservedDocumentSinks,
        ObservedAggregation,
        ObservedNeurons,
        ObservedStates,
        ObservedLock,
    )
}
"""Metrics that are fed here, by their key in ``metrics/quantities.py``."""


def builtin_metrics(setting: Setting, observed: Mapping[str, type[_Builtin]] = OBSERVED) -> list[Observed]:
    """Make all built-in metrics, in the order of their declarations; ``observed`` has those that this module feeds."""
    with setting.tensors_on_device():
        return [
            observed[key](setting) if key in observed else SelfObserving(_builtin_source(key, setting), setting)
            for key in METRICS
        ]


def _builtin_source(key: str, setting: Setting) -> MetricSource:
    module, _, name = key.partition(":")
    own = getattr(importlib.import_module(f"{_metrics.__name__}.{module}"), name)
    # Settings that a class takes beside the sizes.
    asked = {field: getattr(setting, field) for field in getattr(own, "from_setting", ())}
    return MetricSource(key, METRICS[key], partial(own, **asked))
