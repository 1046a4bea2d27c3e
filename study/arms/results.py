"""Results of a study of arms: figures per arm over its seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from ...files import finite_or_nan
from ...findings.attention_sink import SinkReading
from ...findings.run_history import join_rows, row_key, unigram_entropy
from ...findings.thresholds import threshold
from ...measure.metrics_log import MetricsLog, metrics_by_step
from ...measure.records import Snapshot
from ...metrics.quantities import LOGGED, MEASURED, shown_name
from ...metrics.quantity import Quantity
from ..trials import Trial
from .trials import ArmStudy


class Figure(NamedTuple):
    """A scalar at the end of a run."""

    quantity: Quantity
    probe: Literal["text", "random", ""]
    format: str = ""
    """Format of a figure over seeds, which needs more digits than one run's; by default the quantity's."""

    @property
    def key(self) -> str:
        """Name in a row (findings/run_history.py)."""
        return f"text_{self.quantity.name}" if self.probe == "text" else row_key(self.quantity.name)

    @property
    def is_optional(self) -> bool:
        """True if only some studies measure it."""
        return bool(self.quantity.when) or self.quantity.section == "outliers"

    @property
    def label(self) -> str:
        """Label, for a table whose figures are of the task's text."""
        return self.quantity.label + (", random tokens" if self.probe == "random" else "")


SCALARS = {
    "sink_mass": Figure(MEASURED["sink_mass"], "text"),
    "sink_mass_normalised": Figure(MEASURED["sink_mass_normalised"], "text"),
    "sink_mass_largest_head": Figure(MEASURED["sink_mass_max"], "text"),
    "document_sink_mass": Figure(MEASURED["document_sink_mass"], "text"),
    "document_sink_mass_normalised": Figure(MEASURED["document_sink_mass_normalised"], "text"),
    "sink_mass_random": Figure(MEASURED["sink_mass"], "random"),
    "sink_mass_random_normalised": Figure(MEASURED["sink_mass_normalised"], "random"),
    "trigger_loss": Figure(LOGGED["val/loss_trigger"], ""),
    "val_loss": Figure(LOGGED["val/loss"], ""),
    "largest_value": Figure(MEASURED["residual_inf_norm"], "text", "ratio"),
    "kurtosis": Figure(MEASURED["residual_kurtosis"], "text", "ratio"),
}
"""Figures by name, in the order of the table."""

AT_BIRTH = ("trigger_loss", "val_loss")
"""Figures that are kept at birth too, as ``FIGURE_birth``."""


ARRAYS = ("variance_discrepancy", "variance_discrepancy_out")
"""Arrays ``[L]`` of the random probe, at birth and at the end. (Where every sequence starts with one BOS, the variance
at position 0 is 0.)"""


class Spread(NamedTuple):
    """A figure over the seeds of an arm; NaN if there is none (or, for ``sd``, only one)."""

    mean: float
    sd: float
    """Unbiased."""
    min: float
    max: float
    n: int
    """Seeds that have the figure."""


def spread(values: Sequence[float]) -> Spread:
    """Summarise the figures of some seeds, without those that are not numbers."""
    seen = np.array([value for value in values if math.isfinite(value)], dtype=float)
    if not len(seen):
        return Spread(math.nan, math.nan, math.nan, math.nan, 0)
    sd = float(seen.std(ddof=1)) if len(seen) > 1 else math.nan
    return Spread(float(seen.mean()), sd, float(seen.min()), float(seen.max()), len(seen))


@dataclass(frozen=True)
class ArmResult:
    """Figures of one arm over its runs."""

    arm: str
    n_runs: int
    """Runs that the figures are taken from."""
    step: int
    """Step at which they are taken."""
    figures: dict[str, Spread]
    """Figures by the names of `SCALARS`, and ``ARRAY_birth.LAYER`` and ``ARRAY_end.LAYER`` with layers from 1."""
    uniform: float
    """The sink mass of uniform attention, of the kind that ``sinks`` are."""
    steps: list[int]
    """Steps that all of these runs measured."""
    sinks: np.ndarray
    """``[runs, steps]`` sink mass: on the task's text where it was measured, a share of the row's sum where rows do
    not sum to 1, on a document's first token where documents see themselves alone."""
    seeds: Sequence[int] = ()
    """Seed of each of these runs."""
    own: dict[str, str] = field(default_factory=dict)
    """Labels of the figures that metrics of the user gave."""
    step_s: Spread = field(default_factory=lambda: spread([]))
    """Median seconds of a training step of each run. They depend on the machine and its other work, so they are not in
    the table, which does not depend on who started the runs.
    """
    is_finished: bool = True
    """False if none of its runs has been trained to its last step."""
    of_documents: bool = False
    """True if ``sinks`` are on the first tokens of documents."""

    def learned(self, loss: str) -> bool | None:
        """True if every seed has learned by its ``trigger_loss`` or ``val_loss``; None if that is unknown, as where a
        seed has no finite loss and the others have learned.

        A loss on triggers must be a small share of that at birth. A validation loss must be below the entropy of
        token frequencies, or where that is unknown below that of birth, by the threshold of a single run.
        """
        none = spread([])
        birth = self.figures.get(f"{loss}_birth", none)
        if loss == "trigger_loss":
            return self.all_reach(loss, threshold("learned_triggers") * birth.mean)
        unigram = self.figures.get("unigram_entropy", none)
        return self.all_reach(loss, (unigram if unigram.n else birth).mean - threshold("learned"))

    def all_reach(self, loss: str, most: float) -> bool | None:
        """True if no seed's loss is above ``most``; None without both, or where only seeds without a finite loss may
        be.
        """
        end = self.figures[loss]
        if not end.n or math.isnan(most):
            return None
        return (None if end.n < self.n_runs else True) if end.max <= most else False

    @property
    def sink(self) -> Spread:
        """The last of ``sinks``; empty if a run has none at ``step``: an earlier one is not the end's."""
        return spread(self.sinks[:, -1].tolist() if self.steps and self.steps[-1] == self.step else [])

    def layers(self, moment: str) -> list[Spread]:
        """Return the variance discrepancy by layer at ``birth`` or at the ``end``, for the input of the output
        projection.
        """
        for array in reversed(ARRAYS):
            prefix = f"{array}_{moment}."
            found = [value for name, value in self.figures.items() if name.startswith(prefix)]
            if found:
                return found
        return []


def task_loss(results: Sequence[ArmResult]) -> str:
    """Return the name of the figure that shows if an arm learned: the loss on triggers, if there are any."""
    return "trigger_loss" if any(result.figures["trigger_loss"].n for result in results) else "val_loss"


def uniform_levels(results: Sequence[ArmResult]) -> list[float]:
    """List the sink masses of uniform attention in these arms, each once, in the order of the arms."""
    return list(dict.fromkeys(result.uniform for result in results if math.isfinite(result.uniform)))


class _Read(NamedTuple):
    trial: Trial
    rows: dict[int, dict[str, Any]]
    """Rows by step."""
    snapshots: dict[int, Snapshot]
    step_s: float
    """Median of the times of its steps; NaN where none was logged."""
    unigram_entropy: float
    """Entropy of the token frequencies of its corpus, nats; NaN where it is not recorded."""


def read_results(study: ArmStudy, trials: Sequence[Trial]) -> list[ArmResult]:
    """Read the results of every arm that has a run, in the study's order.

    They come from the finished runs; if none is, from the last step that all runs of the arm have reached.

    Raises:
        RunError: a file of a run is damaged; the message names it.
    """
    results = []
    for arm in study.arms:
        reads = []
        for trial in trials:
            if trial.arm == arm and trial.started:
                snapshots, metrics = trial.run.snapshots(), metrics_by_step(trial.run)
                rows = {row["step"]: row for row in join_rows(snapshots, metrics)}
                if rows:
                    by_step = {snapshot.step: snapshot for snapshot in snapshots}
                    corpus = trial.run.read_birth().get("data") or {}
                    reads.append(_Read(trial, rows, by_step, _step_seconds(metrics), unigram_entropy(corpus)))
        finished = [read for read in reads if read.trial.finished]
        if reads:
            results.append(_result(arm, finished or reads, is_finished=bool(finished)))
    return results


def _result(arm: str, reads: Sequence[_Read], *, is_finished: bool) -> ArmResult:
    reached = set.intersection(*(set(read.rows) for read in reads))
    if not is_finished:
        # Behind the last snapshot of a run underway there are lines of its log alone.
        reached = reached.intersection(*(read.snapshots for read in reads)) or reached
    steps = sorted(reached)
    step = steps[-1] if steps else 0
    ends = [read.rows.get(step, {}) for read in reads]
    figures = {name: spread([finite_or_nan(end.get(one.key)) for end in ends]) for name, one in SCALARS.items()}
    for array in ARRAYS:
        for moment, at in (("birth", 0), ("end", step)):
            found = [read.snapshots[at].arrays.get(array) for read in reads if at in read.snapshots]
            for layer, values in enumerate(zip(*(v for v in found if v is not None), strict=True), start=1):
                figures[f"{array}_{moment}.{layer}"] = spread([float(value) for value in values])
    births = [read.rows.get(0, {}) for read in reads]
    for name in AT_BIRTH:
        figures[f"{name}_birth"] = spread([finite_or_nan(birth.get(SCALARS[name].key)) for birth in births])
    figures["unigram_entropy"] = spread([read.unigram_entropy for read in reads])
    own = _label_kinds([read.snapshots[step] for read in reads if step in read.snapshots])
    figures |= {name: spread([finite_or_nan(end.get(name)) for end in ends]) for name in own}
    figures |= _sink_keys([read.snapshots[step] for read in reads if step in read.snapshots])
    sinks_RS = np.array([[_sink(read, at) for at in steps] for read in reads])
    is_measured_S = np.isfinite(sinks_RS).all(0)
    readings = [_reading(read, step) for read in reads]
    return ArmResult(
        arm=arm,
        n_runs=len(reads),
        step=step,
        figures=figures,
        uniform=next((_uniform(end, reading) for end, reading in zip(ends, readings, strict=True)), math.nan),
        steps=[at for at, is_measured in zip(steps, is_measured_S, strict=True) if is_measured],
        sinks=sinks_RS[:, is_measured_S],
        is_finished=is_finished,
        of_documents=any(reading.of_documents for reading in readings),
        seeds=[read.trial.seed for read in reads],
        own=own,
        step_s=spread([read.step_s for read in reads]),
    )


def _label_kinds(ends: Sequence[Snapshot]) -> dict[str, str]:
    """Return the scalars that metrics of the user declared in snapshots, with their labels; on text under ``text_``."""
    found = {}
    for end in ends:
        quantities = end.quantities
        for name in (declared["name"] for declared in end.summary.get("quantities", [])):
            quantity = quantities[name]
            for key, group, where in ((name, "bias", ""), (f"text_{name}", "bias_text", ", text")):
                if name in end.summary.get(group, {}):
                    found[key] = f"{quantity.label}{where}"
    return found


def _step_seconds(metrics: MetricsLog) -> float:
    """Return the median over the lines of a run's log, each of which has that of its own steps."""
    times = [finite_or_nan(value) for value in metrics.series("train/step_p50_s").values()]
    known = [time for time in times if not math.isnan(time)]
    return float(np.median(known)) if known else math.nan


def _sink_keys(ends: Sequence[Snapshot]) -> dict[str, Spread]:
    """Return the key of largest importance, mean over layers and heads, and that importance: a sink may be elsewhere.

    Only the first half of the keys counts: few queries read the last ones.
    """
    found = []
    for end in ends:
        importance_LHT = end.arrays.get("text.importance", end.arrays.get("importance"))
        if importance_LHT is not None:
            mean_T = importance_LHT.mean((0, 1))[: max(1, importance_LHT.shape[-1] // 2)]
            found.append((float(mean_T.argmax()), float(mean_T.max())))
    return {
        name: spread([pair[place] for pair in found]) for place, name in enumerate(("sink_key", "sink_key_importance"))
    }


def _reading(read: _Read, at: int) -> SinkReading:
    """Return the numbers by which a run's sentence on its sink would judge text."""
    return SinkReading.on(read.snapshots.get(at), "bias_text")


def _uniform(row: Mapping[str, Any], reading: SinkReading) -> float:
    # Only text has documents.
    return finite_or_nan(row.get(f"text_{reading.uniform}" if reading.of_documents else reading.uniform))


def _sink(read: _Read, at: int) -> float:
    measured = {key: value for key, value in read.rows[at].items() if value is not None}
    keys = (shown_name(_reading(read, at).mass, measured, prefix) for prefix in ("text_", ""))
    return next((finite_or_nan(measured[key]) for key in keys if key in measured), math.nan)
