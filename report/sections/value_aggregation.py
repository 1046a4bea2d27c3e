"""Aggregation: the first token's variance stands out before anything is learned [SO]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...findings.run_history import PROBES, arrays_of, measured_probes
from ...measure.records import Snapshot
from ...metrics.quantities import MEASURED, shown_name
from ..charts.specs import Drawn
from ..csv_files import LabelledArray
from .declared import Link
from .section import Section
from .snapshot_view import Arrays, SnapshotView, draw_by_block, drawn_positions, head_lines, levels
from .training_view import BlockValues, TrainingView


def without_rounding(values: np.ndarray, scale: float | None = None) -> np.ndarray:
    """Return ``values`` with 0 in place of mere rounding errors, such as those of a first token that never varies.

    Rounding errors are judged against ``scale``; by default the largest of the values.
    """
    largest = np.nanmax(np.abs(values), initial=0.0, where=np.isfinite(values)) if scale is None else scale
    return np.where(values <= 1e-9 * largest, 0.0, values)


def positive_ratio(values: np.ndarray) -> np.ndarray:
    """Replace ratios that a logarithmic axis cannot show by NaN."""
    found = without_rounding(values, 1.0)
    return np.where(found > 0, found, np.nan)


def _discrepancy_of_heads(variance: np.ndarray) -> np.ndarray:
    """Return, ``[L, H]``, the discrepancy of every head: σ²(0) over the mean of σ²(t) at t ≥ T/2, from ``[L, H, T]``;
    NaN where no variance is left.
    """
    late = variance[..., (variance.shape[-1] + 1) // 2 :].mean(-1)
    ratio = np.divide(variance[..., 0], late, out=np.full(late.shape, np.nan), where=late > 0)
    found = without_rounding(ratio, 1.0)
    # A head at 0 beside others counts in their mean.
    return found if (found > 0).any() else positive_ratio(found)


def _differ(arrays: Mapping[str, np.ndarray]) -> bool:
    """Say if the variance differs between the attention's aggregation and the input of the output projection."""
    raw, out = (arrays.get(name) for name in ("variance_discrepancy", "variance_discrepancy_out"))
    return raw is not None and out is not None and not np.array_equal(raw, out)


def _notes_of_constant_first(snapshot: Snapshot) -> list[str]:
    """Return the remarks about probes whose sequences all start with one token."""
    return [
        f"All sequences of the {PROBES[prefix]} probe start with the same token: position 0 has no variance there."
        for prefix in measured_probes(snapshot)
        if (found := arrays_of(snapshot, prefix).get("variance_discrepancy")) is not None
        and np.isnan(positive_ratio(found)).all()
    ]


# ── over training ────────────────────────────────────────────────────────────────────────────────────────────────────

_AGGREGATED, _ENTERS = MEASURED["variance_discrepancy"], MEASURED["variance_discrepancy_out"]
_OF_BLOCKS = (
    BlockValues(_AGGREGATED, positive_ratio, title="value aggregation"),
    BlockValues(_ENTERS, positive_ratio, title="enters the output"),
)
_OF_HEADS = BlockValues(_AGGREGATED, _discrepancy_of_heads, "positional_variance")
_N_EFF = BlockValues(MEASURED["n_eff"], as_share=True)


def _over_training(view: TrainingView, section: Section) -> None:
    calibrated = any(_differ(s.arrays) for run in view.runs for s in run.dated)
    both = _OF_BLOCKS if calibrated else [replace(_OF_BLOCKS[0], title="")]
    caption = "Variance discrepancy, σ²(0) over its mean at t ≥ T/2, by block."
    view.add_blocks(section, "discrepancy", caption, *both)
    caption = "Effective number of tokens that the last position averages over, by block."
    view.add_blocks(section, "n-eff", caption, _N_EFF, unit="n_eff at the last position")
    caption = "Variance discrepancy of every head."
    view.add_heads(section, "discrepancy-heads", caption, _OF_HEADS)
    notes = [note for run in view.runs if run.last for note in _notes_of_constant_first(run.last)]
    section.notes.extend(dict.fromkeys(notes))


# ── in one snapshot ──────────────────────────────────────────────────────────────────────────────────────────────────


def _in_snapshot(view: SnapshotView, section: Section) -> None:
    """Draw the variance by position, and the effective number of tokens that a query averages over."""
    n_layers = view.n_layers

    def variance(arrays: Arrays) -> Drawn | None:
        return _draw_variance(blocks, arrays["positional_variance"], arrays["n_eff"])

    def variance_out(arrays: Arrays) -> Drawn | None:
        return _draw_variance(blocks, arrays["positional_variance_out"], None) if _differ(arrays) else None

    dashed = "dashed: the prediction from n_eff, mean over heads"
    blocks, caption = view.some_blocks(f"Positional variance σ²(t); {dashed}.")
    view.add(section, "variance", caption, ["positional_variance", "n_eff"], variance)
    _, caption = view.some_blocks("σ²(t) of what enters the output projection.")
    view.add(section, "variance-out", caption, ["positional_variance_out"], variance_out)

    def tokens(arrays: Arrays) -> Drawn | None:
        name = shown_name("n_eff", arrays)
        n_eff = arrays[name]
        if not np.isfinite(n_eff).any():
            return None
        t = drawn_positions(n_eff.shape[2])
        uniform = LabelledArray("uniform attention", t + 1.0, [{"position": t.tolist()}])
        return Drawn([head_lines(name, n_eff, blocks, t)], [uniform])

    _, caption = view.some_blocks("Effective number of tokens n_eff(t).")
    view.add(section, "n-eff", caption, ["n_eff"], tokens)

    def discrepancy(arrays: Arrays) -> Drawn | None:
        names = {"variance_discrepancy": "value aggregation"}
        if _differ(arrays):
            names["variance_discrepancy_out"] = "enters the output projection"
        found = {name: positive_ratio(arrays[name]) for name in names if name in arrays}
        if n_layers < 2:
            return None
        level, label = _AGGREGATED.level(view.snapshot.summary), _AGGREGATED.control_label
        drawn = draw_by_block(found, _AGGREGATED.axis_label, 1, names=names)
        return drawn and replace(drawn, beside=[levels(label, [level, level], [1, n_layers])])

    caption = "Variance discrepancy by block: σ²(0) over its mean at t ≥ T/2."
    view.add(section, "discrepancy", caption, ["variance_discrepancy"], discrepancy)
    section.notes.extend(_notes_of_constant_first(view.snapshot))


def _draw_variance(blocks: Sequence[int], sigma: np.ndarray, n_eff: np.ndarray | None) -> Drawn | None:
    """Draw σ²(t) of every head from ``[L, H, T]``, with the prediction from n_eff beside it where that is given."""
    t = drawn_positions(sigma.shape[2])
    name = "positional_variance" if n_eff is not None else "positional_variance_out"
    numbers = [head_lines(name, sigma, blocks, t)]
    for layer in blocks:
        shown = without_rounding(sigma[layer][:, t])
        if n_eff is not None and (shown[:, 0] > 0).any() and (n_eff[layer] > 0).all():
            # A query at position 0 sees one key alone: the variance there is that of the values themselves.
            predicted = np.mean(sigma[layer][:, :1] * n_eff[layer][:, :1] / n_eff[layer][:, t], axis=0)
            numbers.append(LabelledArray("predicted", predicted, [{"position": t.tolist()}], {"layer": layer + 1}))
    if not any((without_rounding(sigma[layer][:, t]) > 0).any() for layer in blocks):
        return None
    return Drawn(numbers, names={"predicted": "σ²(0) / n_eff", name: ""}, unit="σ²(t)", log=True)


AGGREGATION = Link(
    "aggregation",
    "Aggregation",
    "The first token sees itself alone, later ones average over what they see: so the variance of what attention "
    "aggregates falls with the position, about as 1/n_eff, and the first token stands out before anything is "
    "learned.",
    _over_training,
    "σ²(t) is the variance of what attention aggregates at position t, over the sequences of the probe. Of values "
    "that are independent across positions it would be σ²(0)/n_eff(t): what lies above is correlation between the "
    "values.",
    _in_snapshot,
    quantities=(
        "variance_discrepancy", "variance_discrepancy_out", "n_eff", "n_eff_normalised", "positional_variance",
        "positional_variance_out",
    ),
)  # fmt: skip
