"""The causal chain of the attention sink, link by link: what its quantities are, and its sections over training [SO].

Aggregation makes the first token's variance stand out, super neurons amplify it, one channel of its state dominates,
its keys lock onto the queries' direction, and a sink forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...measure.records import Snapshot
from ..history import PROBES, Story, arrays_of, probes
from ..pictures import layers as layer_pictures
from ..pictures.curves import Curve
from ..pictures.layers import Heights
from ..tables import format_value
from .over_training import DASHED, DOTTED, SOLID, Quantity, Timeline, arrays_at
from .section import Cube, Drawn, Section

SUPER_Z, SUPER_RATIO = 10.0, 5.0
"""What makes a super neuron: the thresholds of `metrics.neurons`, which would load torch."""


def head_width(summary: Mapping[str, Any]) -> float:
    """Channels of a head; NaN where the snapshot does not say."""
    model = summary.get("model") or {}
    width = model.get("d_head") or model.get("head_dim")
    if width is None and model.get("d_model") and model.get("n_heads"):
        width = model["d_model"] // model["n_heads"]
    return float(width) if width else float("nan")


def discrepancy_of_heads(variance: np.ndarray) -> np.ndarray:
    """``[L, H]``: σ²(0) over its mean at t ≥ T/2 of every head, from σ²(t) ``[L, H, T]``."""
    late = variance[..., (variance.shape[-1] + 1) // 2 :].mean(-1)
    return np.divide(variance[..., 0], late, out=np.full(late.shape, np.nan), where=late > 0)


def visible(values: np.ndarray, scale: float | None = None) -> np.ndarray:
    """What a logarithmic axis can show; not rounding errors in place of 0, as of a first token that never varies.

    ``scale`` is what is not small; by default the largest of the values.
    """
    largest = np.nanmax(np.abs(values), initial=0.0, where=np.isfinite(values)) if scale is None else scale
    return np.where(values > 1e-9 * largest, values, np.nan)


def _ratio(values: np.ndarray) -> np.ndarray:
    return visible(values, 1.0)


def differ(arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether what enters the output projection has another variance than what attention aggregates."""
    raw, out = (arrays.get(name) for name in ("variance_discrepancy", "variance_discrepancy_out"))
    return raw is not None and out is not None and not np.array_equal(raw, out)


def constant_first(snapshot: Snapshot) -> list[str]:
    """What a reader must know of probes whose sequences all start with one token."""
    return [
        f"All sequences of the {PROBES[prefix]} probe start with the same token: position 0 has no variance there."
        for prefix in probes(snapshot)
        if (found := arrays_of(snapshot, prefix).get("variance_discrepancy")) is not None
        and np.isnan(visible(found, 1.0)).all()
    ]


_EQUAL = ("equal variance", lambda summary, array: 1.0)
DISCREPANCY = Quantity("variance_discrepancy", "variance_discrepancy", _ratio, "value aggregation", _EQUAL)
DISCREPANCY_OUT = Quantity("variance_discrepancy_out", "variance_discrepancy_out", _ratio, "enters the output", _EQUAL)
HEAD_DISCREPANCY = Quantity(
    "variance_discrepancy", "positional_variance", lambda a: _ratio(discrepancy_of_heads(a)), reference=_EQUAL
)
N_EFF = Quantity(
    "n_eff", "n_eff", lambda a: a[..., -1].mean(1), reference=("uniform attention", lambda summary, a: a.shape[-1])
)
NEURON_Z = Quantity(
    "neuron_z", "neuron_z", lambda a: _ratio(a[:, 0]), reference=("threshold", lambda summary, a: SUPER_Z)
)
DOMINANCE_FIRST = Quantity("dominance_first", "dominance", lambda a: a[:, 0], "position 0")
DOMINANCE_MEDIAN = Quantity("dominance_median", "dominance", lambda a: np.median(a, axis=-1), "median position")
MASSIVE = Quantity("massive", "massive_value", lambda a: a[:, 0])
EFFECTIVE_RANK = Quantity("effective_rank", "effective_rank")
QK_COSINE = Quantity(
    "qk_cosine", "qk_cosine", lambda a: a.mean(1), reference=("chance", lambda s, a: head_width(s) ** -0.5)
)
QK_COSINE_HEADS = Quantity("qk_cosine", "qk_cosine", reference=QK_COSINE.reference)
QK_POSITIVE = Quantity("qk_positive", "qk_positive", lambda a: a.mean(1), reference=("half", lambda s, a: 0.5))
SINK_MASS_HEADS = Quantity(
    "sink_mass", "sink_mass", reference=("uniform", lambda s, a: s["bias"].get("sink_uniform") or float("nan"))
)


def by_probe(time: Timeline, key: str) -> list[Curve]:
    """Curves of a scalar on the random probe and, dashed, on the text probe."""
    text = time.measured({key: ("text probe", DASHED)}, "bias_text")
    return [*time.measured({key: ("random probe" if text else "", SOLID)}), *text]


def aggregation(time: Timeline) -> Section:
    """How far the variance of the first token stands out."""
    section = Section(
        "aggregation",
        "Aggregation",
        "The first token sees itself alone, later ones average over what they see: so the variance of what attention "
        "aggregates falls with the position, about as 1/n_eff, and the first token stands out before anything is "
        "learned.",
    )
    calibrated = any(differ(s.arrays) for story in time.stories for s in story.dated)
    both = [DISCREPANCY, DISCREPANCY_OUT] if calibrated else [replace(DISCREPANCY, title="")]
    caption = "Variance discrepancy, σ²(0) over its mean at t ≥ T/2, by block."
    time.add_depth(section, "discrepancy", caption, both, Heights("σ²(0) / σ²(late)", log=True, most=3))
    caption = "Effective number of tokens that the last position averages over, by block."
    time.add_depth(section, "n-eff", caption, [N_EFF], Heights("n_eff at the last position", log=True, least=1))
    caption = "Variance discrepancy of every head."
    heights = Heights("σ²(0) / σ²(late)", log=True, most=3)
    time.add_heads(section, "discrepancy-heads", caption, HEAD_DISCREPANCY, heights)
    told = [note for story in time.stories if story.last for note in constant_first(story.last)]
    section.notes.extend(dict.fromkeys(told))
    return time.or_why_not(section)


def neurons(time: Timeline) -> Section:
    """How strongly single hidden units answer to the first token."""
    section = Section(
        "neurons",
        "Super neurons",
        "Hidden units of the MLP that answer to the first token far more than their neighbours (robust z of at least "
        "10) and far more than to other tokens (at least 5 times) carry its difference on.",
    )
    caption = "Robust z of the unit that position 0 excites most, by block."
    time.add_depth(section, "z", caption, [NEURON_Z], Heights("largest robust z", log=True, least=1, most=20))
    curves = by_probe(time, "super_neurons")
    time.add_curves(section, "count", "Super neurons in all blocks.", curves, "super neurons")
    return time.or_why_not(section)


def dominance(time: Timeline) -> Section:
    """How far one channel of the residual stream outgrows the others."""
    section = Section(
        "dominance",
        "Dominant channels",
        "What super neurons write concentrates the first token's state in few channels. Dominance is the largest "
        "channel over the mean one, 1 to d; effective rank is how many directions all states spread over.",
    )
    quantities, heights = [DOMINANCE_FIRST, DOMINANCE_MEDIAN], Heights("dominance ratio", log=True, least=1)
    time.add_depth(section, "ratio", "Dominance ratio by block.", quantities, heights, embeddings=True)
    caption = "Largest absolute value in the residual stream, by block."
    time.add_depth(section, "massive", caption, [MASSIVE], Heights("largest |h|", log=True), embeddings=True)
    caption = "Effective rank of the residual stream, by block."
    time.add_depth(section, "rank", caption, [EFFECTIVE_RANK], Heights("effective rank", least=0), embeddings=True)
    return time.or_why_not(section)


def lock(time: Timeline) -> Section:
    """How well the first token's key meets the queries."""
    section = Section(
        "lock",
        "QK lock",
        "A first token that looks the same in every sequence has one key; heads whose queries share a direction can "
        "turn it towards that key. Cosine of the first key with the first principal direction of the queries.",
    )
    heights = Heights("|cos(k₀, u)|", least=0)
    time.add_depth(section, "cosine", "Root mean square cosine, mean over the heads of a block.", [QK_COSINE], heights)
    caption = "Share of the queries with a positive dot product with the first key."
    time.add_depth(section, "positive", caption, [QK_POSITIVE], Heights("share of queries", least=0, most=1))
    time.add_heads(section, "cosine-heads", "Root mean square cosine of every head.", QK_COSINE_HEADS, heights)
    return time.or_why_not(section)


def sink(time: Timeline) -> Section:
    """What attention the first token gets."""
    section = Section(
        "sink",
        "Attention sink",
        "Sink mass is the mean attention that later queries spend on position 0; importance is the mean attention that "
        "a key receives. Grey: what uniform attention would give.",
    )
    curves = time.measured({"sink_mass": ("mean over heads", SOLID), "sink_mass_max": ("largest head", DOTTED)})
    curves += time.measured({"sink_mass": ("mean over heads, text probe", DASHED)}, "bias_text")
    level = time.control("sink_uniform", "uniform", band=False)
    time.add_curves(section, "mass", "Sink mass over training.", curves, "sink mass", level)
    epsilons = {format_value(s.bias.get("sink_epsilon"), "g") for story in time.stories for s in story.snapshots}
    threshold = " or ".join(sorted(epsilons))
    caption = f"Share of (sequence, layer, head) whose importance of key 0 exceeds ε = {threshold}."
    time.add_curves(section, "rate", caption, by_probe(time, "sink_rate"), "sink rate (%)")
    heights = Heights("sink mass", least=0)
    time.add_heads(section, "mass-heads", "Sink mass of every head.", SINK_MASS_HEADS, heights)
    time.add_probes(section, "map", "Sink mass by block and head.", _map)
    caption = "Importance over key position, mean over the heads of a block."
    time.add_probes(section, "keys", caption, _keys)
    return section


def _map(story: Story, prefix: str) -> Drawn:
    found = arrays_at(story, prefix, "sink_mass")
    cubes = [Cube("sink_mass", a["sink_mass"], block_head(a["sink_mass"]), {"step": step}) for _, step, a in found]
    panels = [(title, arrays["sink_mass"]) for title, _, arrays in found]
    return (layer_pictures.head_maps(panels, "sink mass"), cubes) if panels else None


def _keys(story: Story, prefix: str) -> Drawn:
    found = arrays_at(story, prefix, "importance")
    panels = [(title, arrays["importance"]) for title, _, arrays in found]
    cubes = []
    for _, step, arrays in found:
        mean = arrays["importance"].mean(1)
        axes = [{"layer": range(1, len(mean) + 1)}, {"position": range(mean.shape[1])}]
        cubes.append(Cube("importance", mean, axes, {"step": step}))
    return (layer_pictures.importance(panels), cubes) if panels else None


def block_head(array: np.ndarray) -> list[dict[str, range]]:
    """Axes of a ``[L, H]`` array: blocks from 1, heads from 0."""
    return [{"layer": range(1, array.shape[0] + 1)}, {"head": range(array.shape[1])}]
