"""One forward pass over a probe, read by every metric at once. Plain PyTorch: any loop can call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..metrics.alignment import SeedAlignment
from ..metrics.contraction import Contraction
from ..metrics.preference import (
    TokenPreference,
    coverage,
    kl_to_uniform,
    normalised_entropy,
    preference_ratio,
)
from ..metrics.ranks import kendall_tau, rank_biased_overlap, spearman, top_overlap
from ..metrics.sinks import AttentionSinks
from ..metrics.variance import PositionalVariance
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.observe import Attended, Site


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluate without a trace: no gradients, no autocast, every module's mode put back as it was."""
    modes = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device.type
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@dataclass(frozen=True)
class BirthReference:
    """What later checkpoints are compared with: the mean directions and the preference of a newborn model."""

    direction: np.ndarray
    """``[L+1, d]`` float64 unit vectors: the seed direction."""
    mean_prob: np.ndarray
    """``[V]`` float64: p̄."""


class _Batches:
    """A probe ``[N, T]`` in batches, on the model's device."""

    def __init__(self, model: nn.Module, probe_NT: np.ndarray, batch_size: int) -> None:
        self.device = next(model.parameters()).device
        self.parts = torch.from_numpy(np.ascontiguousarray(probe_NT)).split(batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        return (part.to(self.device) for part in self.parts)


class _ReferenceObserver:
    """Feeds the mean direction alone."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.alignment = SeedAlignment(torch.zeros(0, config.n_layers + 1, config.d_model)).to(device)

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        if site != "attention":
            self.alignment.update(layer, h_BTD)

    def attention(self, layer: int, attended: Attended) -> None:
        """Not read."""


class BiasObserver(_ReferenceObserver):
    """Feeds every metric of definitions §3, §5 and positional variance (§6) as a pass runs."""

    def __init__(
        self, config: ModelConfig, references_RSD: Tensor, seq_len: int, epsilon: float, device: torch.device
    ) -> None:
        self.alignment = SeedAlignment(references_RSD).to(device)
        self.after_mlp = Contraction(config.n_layers + 1, config.d_model).to(device)
        self.after_attention = Contraction(config.n_layers, config.d_model).to(device)
        self.sinks = AttentionSinks(config.n_layers, config.n_heads, seq_len, epsilon).to(device)
        self.rows_sum_to_one = config.attention.rows_sum_to_one
        # Of the value aggregation, and of what norm, calibration and gate make of it.
        shape = config.n_layers, config.n_heads, seq_len, config.d_head
        self.variance, self.variance_out = (PositionalVariance(*shape).to(device) for _ in range(2))

    def residual(self, site: Site, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        super().residual(site, layer, h_BTD)
        if site == "attention":
            self.after_attention.update(layer - 1, h_BTD)
        else:
            self.after_mlp.update(layer, h_BTD)

    def attention(self, layer: int, attended: Attended) -> None:
        """See models/observe.py."""
        self.sinks.update(layer - 1, attended.weights)
        self.variance.update(layer - 1, attended.o_BHTK)
        self.variance_out.update(layer - 1, attended.out_BHTK)


def birth_reference(model: Decoder, probe_NT: np.ndarray, batch_size: int) -> BirthReference:
    """Seed direction and token preference of a newborn model, from one pass over the probe."""
    device = next(model.parameters()).device
    observer, preference = _ReferenceObserver(model.config, device), TokenPreference(model.config.vocab_size).to(device)
    with undisturbed(model):
        for tokens_BT in _Batches(model, probe_NT, batch_size):
            preference.update(model(tokens_BT, last_only=True, observer=observer))
    return BirthReference(observer.alignment.compute().mean_direction, preference.compute().mean_prob)


@dataclass(frozen=True)
class Measurement:
    """All that one pass tells. Names, shapes and units: docs/run-directory.md."""

    scalars: dict[str, float]
    arrays: dict[str, np.ndarray]


def measure(
    model: Decoder,
    probe_NT: np.ndarray,
    birth: BirthReference,
    strangers: list[BirthReference],
    *,
    batch_size: int = 64,
    sink_epsilon: float = 0.3,
) -> Measurement:
    """Every quantity of definitions §3–5, and positional variance (§6), from one forward pass over a probe.

    The pass runs in the parameters' own precision; statistics are float32 inside a batch and float64 across batches.

    Args:
        model: the decoder, in any state; it is left exactly as it was.
        probe_NT: int64 token ids ``[N, T]``.
        birth: reference of this model's own birth.
        strangers: references of other births of the same config.
        batch_size: sequences in one pass; the result does not depend on it.
        sink_epsilon: ε of the sink rate.
    """
    device = next(model.parameters()).device
    references = torch.from_numpy(np.stack([r.direction for r in [birth, *strangers]]))
    observer = BiasObserver(model.config, references, probe_NT.shape[1], sink_epsilon, device)
    preference = TokenPreference(model.config.vocab_size).to(device)
    with undisturbed(model):
        for tokens_BT in _Batches(model, probe_NT, batch_size):
            preference.update(model(tokens_BT, last_only=True, observer=observer))
        return _summarise(observer, preference, birth, strangers)


def _summarise(
    observer: BiasObserver, preference: TokenPreference, birth: BirthReference, strangers: list[BirthReference]
) -> Measurement:
    alignment, sinks = observer.alignment.compute(), observer.sinks.compute()
    mlp, attention = observer.after_mlp.compute(), observer.after_attention.compute()
    variance, variance_out = observer.variance.compute(), observer.variance_out.compute()
    p, w = preference.compute()
    birth_V = birth.mean_prob
    strange_alignment = alignment.alignment[1:]
    strange_persistence = np.array([spearman(p, s.mean_prob) for s in strangers])

    arrays = {
        "mean_prob": p,
        "argmax_share": w,
        "alignment": alignment.alignment[0],
        "drift": alignment.drift[0],
        "energy_share": alignment.energy_share[0],
        "mean_direction": alignment.mean_direction,
        "alignment_stranger": strange_alignment,
        "rank_persistence_stranger": strange_persistence,
        "inter_mlp": mlp.inter,
        "intra_mlp": mlp.intra,
        "inter_attention": attention.inter,
        "intra_attention": attention.intra,
        "sink_mass": sinks.mass,
        "sink_rate": sinks.rate[..., 0],
        "sink_position": sinks.position,
        "importance": sinks.importance,
        "positional_variance": variance.variance,
        "positional_variance_out": variance_out.variance,
        "variance_discrepancy": variance.discrepancy,
        "variance_discrepancy_out": variance_out.discrepancy,
    }
    scalars = {
        "alignment": alignment.alignment[0, -1],
        "drift": alignment.drift[0, -1],
        "energy_share": alignment.energy_share[0, -1],
        "energy_share_chance": 1 / birth.direction.shape[-1],
        "inter": mlp.inter[-1],
        "intra": mlp.intra[-1],
        "kl_uniform": kl_to_uniform(p),
        "preference_ratio": preference_ratio(p),
        "top1_share": w.max(),
        "coverage_80": coverage(w),
        "entropy": normalised_entropy(p),
        "entropy_argmax": normalised_entropy(w),
        "rank_persistence": spearman(p, birth_V),
        "kendall_tau": kendall_tau(p, birth_V),
        **{f"overlap_{k}": top_overlap(p, birth_V, k) for k in (10, 100, 1000) if k <= len(p)},
        "rbo": rank_biased_overlap(p, birth_V),
        "sink_mass": sinks.mass.mean(),
        "sink_mass_max": sinks.mass.max(),
        "sink_uniform": sinks.uniform,
        "sink_rate": sinks.rate[..., 0].mean(),
        "sink_epsilon": observer.sinks.epsilon,
    }
    if not observer.rows_sum_to_one:
        arrays |= {
            "sink_mass_normalised": sinks.mass_normalised,
            "sink_rate_normalised": sinks.rate_normalised[..., 0],
            "sink_position_normalised": sinks.position_normalised,
            "importance_normalised": sinks.importance_normalised,
        }
        scalars |= {
            "sink_mass_normalised": sinks.mass_normalised.mean(),
            "sink_mass_normalised_max": sinks.mass_normalised.max(),
            "sink_rate_normalised": sinks.rate_normalised[..., 0].mean(),
        }
    if strangers:
        scalars["alignment_stranger"] = np.abs(strange_alignment[:, -1]).max()
        scalars["rank_persistence_stranger"] = np.abs(strange_persistence).max()
    return Measurement(
        scalars={name: float(value) for name, value in scalars.items()},
        arrays=arrays,
    )
