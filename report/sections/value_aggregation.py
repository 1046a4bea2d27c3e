"""Aggregation: the first token's variance stands out before anything is learned [SO]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...measure.records import Snapshot
from ..csv_files import LabelledArray
from ..pictures.axes import token_axis
from ..pictures.curves import Control
from ..pictures.heads import draw_heads
from ..pictures.layers import block_titles
from ..pictures.panels import Heights, Panel
from ..pictures.style import DASHED, SOLID
from ..probe_arrays import PROBES, arrays_of, measured_probes
from .link import Link
from .section import Drawing, Section
from .snapshot_view import Arrays, SnapshotView, draw_by_block, head_lines, of_blocks, shown_positions
from .training_view import BlockValues, TrainingView


def positive(values: np.ndarray, scale: float | None = None) -> np.ndarray:
    """What a logarithmic axis can show; not rounding errors in place of 0, as of a first token that never varies.

    ``scale`` is what is not small; by default the largest of the values.
    """
    largest = np.nanmax(np.abs(values), initial=0.0, where=np.isfinite(values)) if scale is None else scale
    return np.where(values > 1e-9 * largest, values, np.nan)


def positive_ratio(values: np.ndarray) -> np.ndarray:
    """Ratios that a logarithmic axis can show."""
    return positive(values, 1.0)


def _discrepancy_of_heads(variance: np.ndarray) -> np.ndarray:
    """``[L, H]``: σ²(0) over its mean at t ≥ T/2 of every head, from σ²(t) ``[L, H, T]``."""
    late = variance[..., (variance.shape[-1] + 1) // 2 :].mean(-1)
    return np.divide(variance[..., 0], late, out=np.full(late.shape, np.nan), where=late > 0)


def _differ(arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether what enters the output projection has another variance than what attention aggregates."""
    raw, out = (arrays.get(name) for name in ("variance_discrepancy", "variance_discrepancy_out"))
    return raw is not None and out is not None and not np.array_equal(raw, out)


def _notes_of_constant_first(snapshot: Snapshot) -> list[str]:
    """What a reader must know of probes whose sequences all start with one token."""
    return [
        f"All sequences of the {PROBES[prefix]} probe start with the same token: position 0 has no variance there."
        for prefix in measured_probes(snapshot)
        if (found := arrays_of(snapshot, prefix).get("variance_discrepancy")) is not None
        and np.isnan(positive_ratio(found)).all()
    ]


# ── over training ────────────────────────────────────────────────────────────────────────────────────────────────────

_EQUAL = ("equal variance", lambda summary, array: 1.0)
_RAW = BlockValues("variance_discrepancy", "variance_discrepancy", positive_ratio, "value aggregation", _EQUAL)
_OUT = BlockValues("variance_discrepancy_out", "variance_discrepancy_out", positive_ratio, "enters the output", _EQUAL)
_OF_HEADS = BlockValues(
    "variance_discrepancy", "positional_variance", lambda a: positive_ratio(_discrepancy_of_heads(a)), reference=_EQUAL
)
_N_EFF = BlockValues(
    "n_eff", "n_eff", lambda a: a[..., -1].mean(1), reference=("uniform attention", lambda summary, a: a.shape[-1])
)


def _over_training(view: TrainingView, section: Section) -> None:
    calibrated = any(_differ(s.arrays) for run in view.runs for s in run.dated)
    both = [_RAW, _OUT] if calibrated else [replace(_RAW, title="")]
    caption = "Variance discrepancy, σ²(0) over its mean at t ≥ T/2, by block."
    view.add_blocks(section, "discrepancy", caption, both, Heights("σ²(0) / σ²(late)", log=True, most=3))
    caption = "Effective number of tokens that the last position averages over, by block."
    view.add_blocks(section, "n-eff", caption, [_N_EFF], Heights("n_eff at the last position", log=True, least=1))
    caption = "Variance discrepancy of every head."
    heights = Heights("σ²(0) / σ²(late)", log=True, most=3)
    view.add_heads(section, "discrepancy-heads", caption, _OF_HEADS, heights)
    notes = [note for run in view.runs if run.last for note in _notes_of_constant_first(run.last)]
    section.notes.extend(dict.fromkeys(notes))
    view.explain_if_empty(section)


# ── in one snapshot ──────────────────────────────────────────────────────────────────────────────────────────────────


def _in_snapshot(view: SnapshotView, section: Section) -> None:
    """Variance by position, and how many tokens a query averages over."""
    n_layers = view.n_layers

    def variance(arrays: Arrays) -> Drawing | None:
        return _draw_variance(arrays["positional_variance"], arrays["n_eff"])

    def variance_out(arrays: Arrays) -> Drawing | None:
        return _draw_variance(arrays["positional_variance_out"], None) if _differ(arrays) else None

    caption = of_blocks("Positional variance σ²(t); dashed: the prediction from n_eff, mean over heads.", n_layers)
    view.add(section, "variance", caption, ["positional_variance", "n_eff"], variance)
    caption = of_blocks("σ²(t) of what enters the output projection.", n_layers)
    view.add(section, "variance-out", caption, ["positional_variance_out"], variance_out)

    def tokens(arrays: Arrays) -> Drawing:
        n_eff = arrays["n_eff"]
        t = shown_positions(n_eff.shape[2])
        titles = block_titles(len(n_eff))
        panels = [Panel(title, t + 1, n_eff[layer][:, t], {"uniform attention": t + 1.0}) for layer, title in titles]
        figure = draw_heads(
            panels,
            run=0,
            heights=Heights("n_eff(t)", log=True, least=1),
            x_axis=lambda axes: token_axis(axes, t[-1] + 1),
        )
        return figure, [head_lines("n_eff", n_eff, titles, t)]

    view.add(section, "n-eff", of_blocks("Effective number of tokens n_eff(t).", n_layers), ["n_eff"], tokens)

    def discrepancy(arrays: Arrays) -> Drawing | None:
        names = {"variance_discrepancy": ("value aggregation", SOLID)}
        if _differ(arrays):
            names["variance_discrepancy_out"] = ("enters the output projection", DASHED)
        found = {name: positive_ratio(arrays[name]) for name in names if name in arrays}
        if n_layers < 2 or not any(np.isfinite(values).any() for values in found.values()):
            return None
        levels = [Control("equal variance", [1, n_layers], [1.0, 1.0])]
        roles = names if len(found) > 1 else dict.fromkeys(names, ("", SOLID))
        return draw_by_block(found, roles, "σ²(0) / σ²(late)", 1, levels, log=True)

    caption = "Variance discrepancy by block: σ²(0) over its mean at t ≥ T/2."
    view.add(section, "discrepancy", caption, ["variance_discrepancy"], discrepancy)
    section.notes.extend(_notes_of_constant_first(view.snapshot))


def _draw_variance(sigma: np.ndarray, n_eff: np.ndarray | None) -> Drawing | None:
    """σ²(t) of every head of ``[L, H, T]``, beside what n_eff predicts of it where that is given."""
    t = shown_positions(sigma.shape[2])
    titles = block_titles(len(sigma))
    name = "positional_variance" if n_eff is not None else "positional_variance_out"
    panels, numbers = [], [head_lines(name, sigma, titles, t)]
    for layer, title in titles:
        shown, guides = positive(sigma[layer][:, t]), {}
        if n_eff is not None and np.isfinite(shown[:, 0]).any() and (n_eff[layer] > 0).all():
            # A query at position 0 sees one key alone: the variance there is that of the values themselves.
            predicted = np.mean(sigma[layer][:, :1] * n_eff[layer][:, :1] / n_eff[layer][:, t], axis=0)
            guides["σ²(0) / n_eff"] = predicted
            numbers.append(LabelledArray("predicted", predicted, [{"position": t.tolist()}], {"layer": layer + 1}))
        panels.append(Panel(title, t + 1, shown, guides))
    if not any(np.isfinite(panel.lines).any() for panel in panels):
        return None
    figure = draw_heads(
        panels, run=0, heights=Heights("σ²(t)", log=True), x_axis=lambda axes: token_axis(axes, t[-1] + 1)
    )
    return figure, numbers


AGGREGATION = Link(
    "aggregation",
    "Aggregation",
    "chain",
    "The first token sees itself alone, later ones average over what they see: so the variance of what attention "
    "aggregates falls with the position, about as 1/n_eff, and the first token stands out before anything is "
    "learned.",
    _over_training,
    "σ²(t) is the variance of what attention aggregates at position t, over the sequences of the probe. Of values "
    "that are independent across positions it would be σ²(0)/n_eff(t): what lies above is correlation between the "
    "values.",
    _in_snapshot,
    headline=("variance_discrepancy", "σ²(0)/σ²", "ratio"),
)
