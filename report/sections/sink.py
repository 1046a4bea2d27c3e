"""The attention sink: what attention the first token, and every other, gets [AS, SO]."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ...files import finite_or_nan
from ...findings.formatting import format_value, one_line
from ...findings.run_history import PROBES, RunHistory, arrays_of, measured_probes
from ...metrics.declarations.sinks import n_judged_keys
from ...metrics.quantities import MEASURED, shown_name
from ..charts.specs import Drawn, HeatmapPanel, Series
from ..csv_files import LabelledArray
from ..table import Column, Table
from .declared import Link
from .section import Listing, Section
from .snapshot_view import Arrays, SnapshotView, block_and_head, drawn_positions, head_lines
from .training_view import BlockValues, TrainingView, arrays_at, shown_of_runs

_COSINE, _POSITIVE = MEASURED["qk_cosine"], MEASURED["qk_positive"]


def _lock_over_training(view: TrainingView, section: Section) -> None:
    caption = "Root mean square cosine, mean over the heads of a block."
    view.add_blocks(section, "cosine", caption, BlockValues(_COSINE))
    caption = "Share of the queries with a positive dot product with the first key."
    view.add_blocks(section, "positive", caption, BlockValues(_POSITIVE))
    of_heads = BlockValues(_COSINE, np.asarray)
    view.add_heads(section, "cosine-heads", "Root mean square cosine of every head.", of_heads)


def _lock_in_snapshot(view: SnapshotView, section: Section) -> None:
    level = _COSINE.level(view.snapshot.summary)
    chance = f" Chance level of the cosine: {format_value(level, _COSINE.format)}." if np.isfinite(level) else ""
    caption = f"Cosine of the first key with the queries' direction, and share of positive dot products.{chance}"
    view.add(section, "map", caption, ["qk_cosine", "qk_positive"], _draw_lock_maps)


def _draw_lock_maps(arrays: Arrays) -> Drawn:
    shown = (_COSINE, _POSITIVE)
    numbers = [LabelledArray(q.name, arrays[q.name], block_and_head(arrays[q.name])) for q in shown]
    return Drawn(numbers, names={quantity.name: quantity.label for quantity in shown})


LOCK = Link(
    "lock",
    "QK lock",
    "A first token that looks the same in every sequence has one key; heads whose queries share a direction can "
    "turn it towards that key. Cosine of the first key with the first principal direction of the queries.",
    _lock_over_training,
    "How well the first token's key meets the queries of a head: the root mean square cosine with the first "
    "principal direction of the queries, and the share of the queries that have a positive dot product with it.",
    _lock_in_snapshot,
    quantities=("qk_cosine", "qk_positive", "qk_cosine_signed"),
)


# ---------------------------------------------------------------- the attention sink
# What attention the first token, and every other, gets [AS, SO].

# ── over training ────────────────────────────────────────────────────────────────────────────────────────────────────

_MASS, _RATE = MEASURED["sink_mass"], MEASURED["sink_rate"]


def _over_training(view: TrainingView, section: Section) -> None:
    curves = view.measured({"sink_mass": "mean over heads", "sink_mass_max": "largest head"}, as_shares=True)
    curves += view.measured({"sink_mass": "mean over heads, text probe"}, "bias_text", as_shares=True)
    label = shown_of_runs(view.runs, "sink_mass").axis_label
    view.add_curves(section, "mass", "Sink mass over training.", curves, label, view.controls(_MASS, curves))
    epsilons = {format_value(s.bias.get("sink_epsilon"), "g") for run in view.runs for s in run.snapshots}
    threshold = " or ".join(sorted(epsilons))
    label = shown_of_runs(view.runs, "sink_rate").axis_label
    caption = f"Share of (sequence, layer, head) whose importance of key 0 exceeds ε = {threshold}."
    view.add_curves(section, "rate", caption, view.by_probe("sink_rate", as_shares=True), label)
    of_heads = BlockValues(_MASS, np.asarray, as_share=True)
    view.add_heads(section, "mass-heads", "Sink mass of every head.", of_heads)
    view.add_per_probe(section, "map", "Sink mass by block and head.", _draw_mass)
    caption = "Importance over key position, mean over the heads of a block."
    view.add_per_probe(section, "keys", caption, _draw_importance)


def _draw_mass(run: RunHistory, prefix: str) -> Drawn | None:
    name = run.shown_array("sink_mass", prefix)
    found = arrays_at(run, prefix, name)
    numbers = [LabelledArray(name, a[name], block_and_head(a[name]), {"step": step}) for _, step, a in found]
    return Drawn(numbers) if numbers else None


def _draw_importance(run: RunHistory, prefix: str) -> Drawn | None:
    name = run.shown_array("importance", prefix)
    found = arrays_at(run, prefix, name)
    numbers = []
    for _, step, arrays in found:
        mean = arrays[name].mean(1)
        axes = [{"layer": range(1, len(mean) + 1)}, {"position": range(mean.shape[1])}]
        numbers.append(LabelledArray(name, mean, axes, {"step": step}))
    return Drawn(numbers, [_uniform(numbers[-1].values.shape[1])]) if numbers else None


def _uniform(length: int, keys: Sequence[int] | np.ndarray | None = None) -> LabelledArray:
    """Return the importance of each key under uniform attention: 1/(t+1) from every query, averaged over the queries
    t ≥ j.
    """
    every = np.arange(length)
    importance_T = np.cumsum(1 / (every[::-1] + 1.0))[::-1] / (length - every)
    shown = every if keys is None else np.asarray(keys)
    return LabelledArray("uniform attention", importance_T[shown], [{"position": shown.tolist()}])


# ── in one snapshot ──────────────────────────────────────────────────────────────────────────────────────────────────


def _in_snapshot(view: SnapshotView, section: Section) -> None:
    epsilon = finite_or_nan(view.snapshot.bias.get("sink_epsilon"))
    caption = f"Sink mass and sink rate (importance of key 0 above {format_value(epsilon, 'g')}) by block and head."
    view.add(section, "map", caption, ["sink_mass"], _draw_maps)
    caption = "Sink rate of position 0 by the importance ε that makes a sink, mean over the heads of a block."
    view.add(section, "rate", caption, ["sink_rate_grid", "sink_epsilons"], _draw_rates)
    blocks, caption = view.some_blocks("Importance by key position.")
    view.add(section, "keys", caption, ["importance"], partial(_draw_keys, blocks))
    for prefix in measured_probes(view.snapshot):
        arrays = arrays_of(view.snapshot, prefix)
        importance = arrays.get(shown_name("importance", arrays))
        if importance is not None and np.isfinite(importance).any() and np.isfinite(epsilon):
            section.notes.append(_heads_by_key(importance, epsilon, PROBES[prefix]))
    _list_secondary(view, section)


def _heads_by_key(importance: np.ndarray, epsilon: float, probe: str) -> str:
    """Count the heads that have a sink on each key, of ``[L, H, T]``.

    The array ``sink_position`` has the key of every head and counts every key. The last keys are seen by few queries,
    near ones, and heads without a sink have their largest importance there: no sentence rests on those.
    """
    judged = importance[np.isfinite(importance).all(-1), : n_judged_keys(importance.shape[-1])]
    is_sink = judged.max(-1) > epsilon
    places, counts = np.unique(judged[is_sink].argmax(-1), return_counts=True)
    order = np.argsort(-counts, kind="stable")[:4]
    found = [f"position {places[i]} ({counts[i]})" for i in order]
    without = int((~is_sink).sum())
    rest = [f"{without} of {len(judged)} heads have none"] if without else []
    return (
        f"Heads by the key that is their sink (importance above {epsilon:g}), {probe} probe: "
        f"{', '.join(found + rest)}. "
        f"Judged are the first {judged.shape[-1]} keys, which at least a quarter of the queries see."
    )


def _list_secondary(view: SnapshotView, section: Section) -> None:
    """List the sinks of single sequences behind position 0, with the token under each."""
    entries = view.snapshot.summary.get("secondary_sinks", [])
    if not entries:
        return
    numbers = []
    for probe in dict.fromkeys(entry["probe"] for entry in entries):
        of_probe = [entry for entry in entries if entry["probe"] == probe]
        axis = {
            "rank": range(1, len(of_probe) + 1),
            "position": [entry["position"] for entry in of_probe],
            "token": [entry["id"] for entry in of_probe],
            "text": [one_line(entry["text"]) for entry in of_probe],
        }
        importance = np.array([finite_or_nan(entry["importance"]) for entry in of_probe])
        numbers.append(LabelledArray("secondary_sink_importance", importance, [axis], {"probe": probe}))
    columns = [Column("probe"), Column("position"), Column("token", "token", key="text"), Column("id")]
    columns += [Column("importance", format=".2f"), Column("blocks"), Column("heads")]
    title = "Secondary sinks: keys behind position 0 that are a sink in a sequence"
    section.listings.append(Listing(title, Table.of(columns, entries), "sink-secondary.csv", numbers))


def _draw_maps(arrays: Arrays) -> Drawn:
    named = {"sink_mass": _MASS.label, "sink_mass_normalised": "as a share of the row", "sink_rate": _RATE.label}
    names = {name: label for name, label in named.items() if name in arrays}
    numbers = [LabelledArray(name, arrays[name], block_and_head(arrays[name])) for name in names]
    maps = []
    for array in numbers:
        # A rate is a percentage, the others are shares.
        shares = array.values / (100 if array.quantity == "sink_rate" else 1)
        axes = {name: coordinates for axis in array.axes for name, coordinates in axis.items()}
        maps.append(Series(shares, axes, 0, names[array.quantity]))
    return Drawn(numbers, made=HeatmapPanel("", "", maps))


def _draw_rates(arrays: Arrays) -> Drawn:
    grid, epsilons = arrays[shown_name("sink_rate_grid", arrays)], arrays["sink_epsilons"]
    axes = [{"epsilon": epsilons.tolist()}, {"layer": range(1, grid.shape[1] + 1)}]
    return Drawn([LabelledArray(shown_name("sink_rate", arrays), grid.mean(2), axes)])


def _draw_keys(blocks: Sequence[int], arrays: Arrays) -> Drawn | None:
    name = shown_name("importance", arrays)
    values = arrays[name]
    j = drawn_positions(values.shape[2])
    if not np.isfinite(values[blocks]).any():
        return None
    return Drawn([head_lines(name, values, blocks, j)], [_uniform(values.shape[2], j)])


SINK = Link(
    "sink",
    "Attention sink",
    "Sink mass is the mean attention that later queries spend on position 0; importance is the mean attention that "
    "a key receives. Grey: what uniform attention would give.",
    _over_training,
    "Sink mass is the mean attention that later queries spend on position 0; the sink rate is the share of "
    "sequences in which position 0 is a sink; importance is the mean attention that a key receives.",
    _in_snapshot,
    quantities=(
        "sink_uniform",
        "sink_epsilon",
        "sink_epsilons",
        *(
            f"sink_{name}{suffix}"
            for name in ("mass", "rate", "rate_grid", "rate_by_key", "position")
            for suffix in ("", "_normalised")
        ),
        # Tables have these.
        *("key_norm_first", "value_norm_first", "key_norm_sink", "sinks_per_sequence"),
        # The list has them, with text.
        *(f"secondary_sink_{name}" for name in ("importance", "position", "token", "heads")),
        *("sink_mass_max", "sink_mass_normalised_max", "importance", "importance_normalised"),
    ),
)
