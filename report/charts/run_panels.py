"""Panels of a page of runs: one per quantity, with all runs in it, by the section that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...findings.run_history import GROUPS, PROBES, RunHistory, Start, arrays_of
from ...metrics.quantities import LOGGED, MEASURED
from ...metrics.quantity import AXES, AxisName, Quantity
from ..sections.preference import ranking_panel
from ..sections.snapshot_view import drawn_positions
from ..sections.training import evaluated, in_words
from ..sections.training_view import AVERAGED, control_label, shown_of_runs, steps_are_wide, thin
from ..sections.value_aggregation import positive_ratio
from .specs import LOOKS, ChartPanel, CurvePanel, HeatmapPanel, Look, RankingPanel, Series

_OF_ATTENTION = "share of attention"


def _unit_of_mass(runs: Sequence[RunHistory]) -> str:
    """Return the unit of sink masses: where rows of a run need not sum to 1, shares of the row."""
    is_share = shown_of_runs(runs, "sink_mass").name != "sink_mass"
    return "share of the row" if is_share else _OF_ATTENTION


@dataclass(frozen=True)
class _Curves:
    """A panel of snapshot scalars over training."""

    id: str
    title: str
    quantities: Mapping[str, tuple[str, Look]]
    """Scalar → its name in the legend, and its line."""
    control: str = ""
    """Scalar that they are judged against."""
    control_look: Look = "control"
    array: str = ""
    """Array from which a chosen block or head is read."""
    csv: str = ""
    unit: str = ""
    """Unit, by default the quantity's."""
    lead: str = "random"
    """The probe that is shown first; "" for all."""


_DIRECTION = _Curves(
    "alignment",
    "Alignment with the seed direction",
    {"alignment": ("", "solid")},
    "alignment_stranger",
    "band",
    "alignment",
    "direction-alignment.csv",
    "cosine",
)
_PERSISTENCE = _Curves(
    "persistence-ranks",
    "Order of tokens against birth",
    {"rank_persistence": ("", "solid")},
    "rank_persistence_stranger",
    "band",
    csv="persistence-correlation.csv",
    unit="Spearman ρ",
)
_MASS = _Curves(
    "sink-mass",
    "Sink mass",
    {"sink_mass": ("", "solid")},
    "sink_uniform",
    array="sink_mass",
    unit=_OF_ATTENTION,
    csv="sink-mass.csv",
    lead="",
)
_DOCUMENT_MASS = _Curves(
    "sink-documents",
    "Sink mass where documents begin",
    {"document_sink_mass": ("", "solid")},
    "document_sink_uniform",
    array="document_sink_mass",
    unit=_OF_ATTENTION,
    csv="sink-document_sink_mass.csv",
    lead="",
)
_CONTRACTION = _Curves(
    "contraction-cos",
    "Contraction",
    {"inter": ("across sequences", "solid"), "intra": ("within them", "dashed")},
    csv="contraction-inter.csv",
    unit="cosine",
)
_DISCREPANCY = _Curves(
    "discrepancy",
    "Variance of the first position",
    {"variance_discrepancy": ("", "solid")},
    array="variance_discrepancy",
    csv="aggregation-discrepancy.csv",
    unit="σ²(0) / σ²(late)",
)
_DOMINANCE = _Curves(
    "dominance-ratio",
    "Largest channel over the mean",
    {"dominance_first": ("position 0", "solid"), "dominance_median": ("median position", "dashed")},
    csv="dominance-ratio.csv",
    unit="max / mean",
)
_LOCK = _Curves(
    "lock-cos",
    "First key along the queries",
    {"qk_cosine": ("", "solid")},
    array="qk_cosine",
    csv="lock-cosine-heads.csv",
    unit="|cosine|",
)
_NEURONS = _Curves(
    "neurons-count",
    "Super neurons",
    {"super_neurons": ("", "solid")},
    array="super_neurons",
    csv="neurons-count.csv",
    unit="number",
)
_RATIO = _Curves("preference-ratio", "The favourite token", {"preference_ratio": ("", "solid")}, unit="V · max p̄")


#: CSV of every head over training → the one that has a panel's numbers where a page lacks it: of one head, or one step.
_IN_PLACE = {"sink-mass-heads.csv": "sink-map.csv", "lock-cosine-heads.csv": "lock-cosine.csv"}


def panels_of_runs(runs: Sequence[RunHistory], start: Start, files: Container[str] = ()) -> dict[str, list[ChartPanel]]:
    """Build the panels by section, in causal order and in the words of the runs' start; a section without numbers over
    training has none.

    Args:
        runs: runs of the page.
        start: their start.
        files: names of the page's CSV files; a panel without one of these links none.
    """
    made: dict[str, list[ChartPanel | None]] = {
        "loss": [
            _losses(runs),
            _by_source(runs),
            _logged(runs, "loss-trigger-live", "val/loss_trigger", "loss-trigger.csv"),
        ],
        "evaluation": [_evaluation(runs, *scores) for scores in (("acc", "copy_accuracy"), ("bits_per_byte",))],
        "direction": [_curves(runs, _DIRECTION)],
        "preference": [ranking_panel(runs), _curves(runs, _RATIO)],
        "persistence": [_curves(runs, _PERSISTENCE)],
        "lineage": [_lineage(runs), _lineage_of_weights(runs)],
        "contraction": [_curves(runs, _CONTRACTION)],
        "sink": [_curves(runs, _MASS), _curves(runs, _DOCUMENT_MASS), _map(runs), _importance(runs)],
        "aggregation": [_curves(runs, _DISCREPANCY), _variance(runs)],
        "neurons": [_curves(runs, _NEURONS)],
        "dominance": [_curves(runs, _DOMINANCE)],
        "lock": [_curves(runs, _LOCK)],
    }
    return {
        section: [_linked(_in_words_of(start, panel), files) for panel in panels if panel is not None]
        for section, panels in made.items()
    }


def _linked(panel: ChartPanel, files: Container[str]) -> ChartPanel:
    """Link a panel to the page's file of its numbers, if there is one."""
    names = (panel.csv, _IN_PLACE.get(panel.csv, ""))
    return replace(panel, csv=next((name for name in names if name in files), ""))


def _in_words_of(start: Start, panel: ChartPanel) -> ChartPanel:
    """Adapt a panel, written for a birth, to the words of another start."""
    if start.is_birth:
        return panel
    if isinstance(panel, RankingPanel):
        panel = replace(panel, headings=[start.says(heading) for heading in panel.headings], start=start.at)
    elif isinstance(panel, CurvePanel):
        panel = replace(panel, series=[replace(series, name=start.says(series.name)) for series in panel.series])
    return replace(panel, title=start.says(panel.title))


# ── curves over training ─────────────────────────────────────────────────────────────────────────────────────────────


def _scalars(
    run: RunHistory, key: str, name: str, look: Look = "solid", group: str = "bias", probe: str = ""
) -> Series | None:
    """Read a snapshot scalar over the steps of a run; None if it has no number."""
    steps, values = run.measured(key, group)
    if not np.isfinite(values).any():
        return None
    return Series(np.array(values), {"step": steps}, run.index, name, look, probe)


def _arrays(
    run: RunHistory, prefix: str, name: str, read: Callable[[np.ndarray], np.ndarray] | None = None
) -> tuple[list[int], np.ndarray] | None:
    """Return steps and arrays ``[S, …]`` of those snapshots that hold one of the newest one's shape."""
    held = [(s.step, arrays_of(s, prefix)[name]) for s in run.dated if name in arrays_of(s, prefix)]
    held = [(step, np.asarray(read(a) if read else a, dtype=float)) for step, a in held]
    held = [(step, a) for step, a in held if a.shape == held[-1][1].shape]
    if not held or not any(np.isfinite(a).any() for _, a in held):
        return None
    return [step for step, _ in held], np.stack([a for _, a in held])


def _coordinates(axes: Sequence[AxisName], shape: Sequence[int]) -> dict[str, Sequence[int]]:
    found = [(AXES[axis], size) for axis, size in zip(axes, shape, strict=True)]
    return {axis.column: range(axis.first, axis.first + size) for axis, size in found}


def _of_blocks(run: RunHistory, name: str, legend: str) -> Iterator[Series]:
    """Yield the series for a chosen block or head of an array, by probe."""
    for prefix, probe in PROBES.items():
        if (found := _arrays(run, prefix, run.shown_array(name, prefix))) is not None:
            steps, values = found
            axes = {"step": steps, **_coordinates(MEASURED[name].axes, values.shape[1:])}
            yield Series(values, axes, run.index, _with_probe(run, legend, probe), probe=probe)


def _with_probe(run: RunHistory, legend: str, probe: str) -> str:
    """Return a legend's words, with the probe if there are two."""
    both = any(s.summary.get("bias_text") for s in run.snapshots)
    return ", ".join(filter(None, [legend, f"{probe} probe" if both else ""]))


def _curves(runs: Sequence[RunHistory], panel: _Curves) -> CurvePanel | None:
    """Build the scalars of every run and probe, the text probe's first if there is one, with their control."""
    series: list[Series | None] = []
    for run in runs:
        for prefix, group in reversed(GROUPS.items()):
            probe = PROBES[prefix]
            for key, (name, look) in panel.quantities.items():
                key, legend = run.shown_scalar(key, group), _with_probe(run, name, probe)
                text_first: Look = "dotted" if prefix == "" and legend != name and not panel.lead else look
                series.append(_scalars(run, key, legend, text_first, group, probe))
                averaged = ", ".join(filter(None, [legend, AVERAGED]))
                series.append(_log_series(run, f"ema/{group}/{key}", averaged, "dashed", probe))
        if panel.control:
            word = control_label(MEASURED[next(iter(panel.quantities))])
            of_each = (_scalars(run, panel.control, word, panel.control_look, group) for group in GROUPS.values())
            series.append(next(filter(None, of_each), None))
        if panel.array:
            series += _of_blocks(run, panel.array, "")
    found = [s for s in series if s is not None]
    if not any("step" in s.axes and len(s.axes) == 1 and s.look not in ("control", "band") for s in found):
        return None
    quantity = MEASURED[next(iter(panel.quantities))]
    return CurvePanel(
        panel.id,
        panel.title,
        found,
        unit=_unit_of_mass(runs) if panel.unit == _OF_ATTENTION else panel.unit or quantity.unit,
        log=quantity.scale == "log",
        x_log=steps_are_wide(runs),
        lead=panel.lead if any(s.probe == panel.lead for s in found) else "",
        csv=panel.csv,
        of_all=_reduction(quantity),
    )


_REDUCTIONS = {"mean": "mean of", "max": "largest of", "sum": "sum of"}


def _reduction(quantity: Quantity) -> str:
    """Return the words for a scalar made of all blocks and heads: "mean of blocks and heads"; "" for others."""
    over = [AXES[axis].column for axis in quantity.axes]
    parts = [word for name, word in (("layer", "blocks"), ("head", "heads")) if name in over]
    return f"{_REDUCTIONS[quantity.scalar]} {' and '.join(parts)}" if parts and quantity.scalar in _REDUCTIONS else ""


def _log_series(run: RunHistory, key: str, name: str, look: Look = "solid", probe: str = "") -> Series | None:
    steps, values = run.series(key)
    if not np.isfinite(values).any():
        return None
    x, y = thin(steps, values)
    return Series(np.asarray(y), {"step": x}, run.index, name, look, probe)


def _losses(runs: Sequence[RunHistory]) -> CurvePanel | None:
    found: list[Series | None] = []
    last = max((max(run.metrics, default=0) for run in runs), default=0)
    levels = {run.unigram_entropy for run in runs}
    for run in runs:
        found += [
            _log_series(run, "train/loss", "train"),
            _log_series(run, "val/loss", "validation", "dashed"),
            _log_series(run, "ema/val/loss", f"validation, {AVERAGED}", "dotted"),
        ]
    series = [s for s in found if s is not None]
    if not series:
        return None
    series += [
        Series(np.array([level, level]), {"step": [0, last]}, None, "unigram entropy", "control")
        for level in sorted(levels)
        if np.isfinite(level)
    ]
    unit = LOGGED["val/loss"].unit
    return CurvePanel("loss-live", "Loss", series, unit=unit, x_log=steps_are_wide(runs), csv="loss-loss.csv")


def _by_source(runs: Sequence[RunHistory]) -> CurvePanel | None:
    """Build the validation losses of the sources of a mixture."""
    found = [
        series
        for run in runs
        for i, name in enumerate((run.birth.get("data") or {}).get("sources") or {})
        if (series := _log_series(run, f"val/loss/{name}", name, LOOKS[i % len(LOOKS)])) is not None
    ]
    unit, title = LOGGED["val/loss"].unit, "Validation loss by source"
    return CurvePanel("loss-by-source", title, found, unit=unit, x_log=steps_are_wide(runs)) if found else None


def _evaluation(runs: Sequence[RunHistory], *scores: str) -> CurvePanel | None:
    """Build one kind of score of all texts or tasks that have it."""
    names = [(name, score) for name, found in evaluated(runs).items() for score in scores if score in found]
    found = [
        series
        for run in runs
        for i, (name, score) in enumerate(names)
        if (series := _log_series(run, f"eval/{name}/{score}", name, LOOKS[i % len(LOOKS)])) is not None
    ]
    last = max((max(run.metrics, default=0) for run in runs), default=0)
    found += [
        Series(np.array([level, level]), {"step": [0, last]}, None, legend, "control")
        for level, legend in _chance(runs, list(dict.fromkeys(name for name, _ in names)))
    ]
    what = in_words(scores[0]).capitalize()
    return CurvePanel(f"evaluation-{scores[0]}", what, found, x_log=steps_are_wide(runs)) if names else None


def _chance(runs: Sequence[RunHistory], names: Sequence[str]) -> list[tuple[float, str]]:
    """Return the levels of guessing, each once, with its legend: the tasks that share it, unless all do."""
    tasks: dict[float, list[str]] = {}
    for name in names:
        for level in {level for run in runs for level in run.series(f"eval/{name}/chance")[1] if np.isfinite(level)}:
            tasks.setdefault(level, []).append(name)
    return [
        (level, "chance" if list(of) == list(names) else f"chance, {', '.join(of)}")
        for level, of in sorted(tasks.items())
    ]


def _logged(runs: Sequence[RunHistory], id_: str, key: str, csv: str) -> CurvePanel | None:
    found = [s for run in runs if (s := _log_series(run, key, "")) is not None]
    quantity = LOGGED[key]
    title = quantity.label[:1].upper() + quantity.label[1:]
    return CurvePanel(id_, title, found, unit=quantity.unit, x_log=steps_are_wide(runs), csv=csv) if found else None


def _lineage(runs: Sequence[RunHistory]) -> CurvePanel | None:
    found = _beside_strangers(runs, "seedprint/z")
    if not found:
        return None
    return CurvePanel(
        "lineage-test", "Lineage test against birth", found, unit="z", x_log=steps_are_wide(runs), csv="lineage-z.csv"
    )


def _lineage_of_weights(runs: Sequence[RunHistory]) -> CurvePanel | None:
    found = _beside_strangers(runs, "seedprint/weights")
    if not found:
        return None
    return CurvePanel(
        "lineage-weights",
        "Weights against birth",
        found,
        unit="cosine",
        x_log=steps_are_wide(runs),
        csv="lineage-weights.csv",
    )


def _beside_strangers(runs: Sequence[RunHistory], key: str) -> list[Series]:
    """Return the curves of a logged name against each run's birth and against strangers; none without the first."""
    found = [
        series
        for run in runs
        for series in (
            _log_series(run, key, "own birth"),
            _log_series(run, f"{key}_stranger", "strangers, largest", "control"),
        )
        if series is not None
    ]
    return found if any(series.look == "solid" for series in found) else []


# ── maps, lines over positions, rankings: at the chosen step ─────────────────────────────────────────────────────────


def _map(runs: Sequence[RunHistory]) -> HeatmapPanel | None:
    """Build the map of sink mass by block and head, the text probe's first."""
    found: list[Series] = []
    for run in runs:
        found += sorted(_of_blocks(run, "sink_mass", ""), key=lambda series: series.probe != "text")
    if not found or max(s.values[0].size for s in found) < 2:
        return None
    return HeatmapPanel(
        "sink-heads",
        "Sink mass by block and head",
        found,
        limits=(0.0, 1.0),
        unit=_unit_of_mass(runs),
        csv="sink-mass-heads.csv",
    )


def _over_positions(run: RunHistory, name: str, read: Callable[[np.ndarray], np.ndarray]) -> Iterator[Series]:
    for prefix, probe in PROBES.items():
        if (found := _arrays(run, prefix, run.shown_array(name, prefix), read)) is not None:
            steps, values = found
            shown = drawn_positions(values.shape[-1])
            axes = {"step": steps, "layer": range(1, values.shape[1] + 1), "position": shown.tolist()}
            yield Series(values[..., shown], axes, run.index, _with_probe(run, "", probe), probe=probe)


def _importance(runs: Sequence[RunHistory]) -> CurvePanel | None:
    found = [s for run in runs for s in _over_positions(run, "importance", lambda a: a.mean(1))]
    if not found:
        return None
    return CurvePanel(
        "sink-importance",
        "Attention on each key",
        found,
        "position",
        "importance, mean of heads",
        log=True,
        x_log=True,
        lead="text" if any(s.probe == "text" for s in found) else "",
        csv="sink-keys.csv",
    )


def _variance(runs: Sequence[RunHistory]) -> CurvePanel | None:
    found = [
        s for run in runs for s in _over_positions(run, "positional_variance", lambda a: positive_ratio(a.mean(1)))
    ]
    if not found:
        return None
    return CurvePanel(
        "variance-positions",
        "Variance by position",
        found,
        "position",
        "σ²(t), mean of heads",
        log=True,
        x_log=True,
        lead="random" if any(s.probe == "random" for s in found) else "",
    )
