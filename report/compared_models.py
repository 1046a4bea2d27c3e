"""Output of compared models for people: table, JSON, CSV and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..files import atomic_path, strict, write_json, write_text
from ..findings.formatting import format_value, without_shared_folder
from ..measure.model_pairs import AllPairs, Compared, Line
from .charts.specs import CurvePanel, MatrixPanel, Series
from .csv_files import LabelledArray, to_csv
from .figure import save_panel, save_panels
from .pictures.panels import evenly_spaced
from .pictures.saving import save_png
from .pictures.several_models import draw_layer_matrices
from .table import Column, Table
from .terminal import say

#: KL in nats per token up to which two models predict alike: float32's rounding.
_SAME_KL = 1e-5
_KL = "KL(A ‖ B), nats per token"
#: Pairs that a picture of curves has.
_MOST_CURVES = 6


def as_json(found: Sequence[Compared], probe: Mapping[str, Any]) -> dict[str, Any]:
    """Return all numbers as JSON; values that are not numbers are null."""
    return {"probe": dict(probe), "compared": [_as_json(one) for one in found]}


def _as_json(one: Compared) -> dict[str, Any]:
    names, pairs = one.pairs.names, one.pairs
    ordered = [(a, b) for a in range(len(names)) for b in range(len(names)) if a != b]
    found: dict[str, Any] = {
        "step": one.step,
        "models": names,
        "cka": pairs.last_cka().tolist(),
        "cka_by_layer": [
            {"a": names[a], "b": names[b], "values": cka_PQ.tolist()} for (a, b), cka_PQ in pairs.cka_by_layer.items()
        ],
        "kl": pairs.mean_kl().tolist(),
        "kl_se": pairs.kl_se_AA.tolist(),
        "kl_by_position": [{"a": names[a], "b": names[b], "values": pairs.kl_AAT[a, b].tolist()} for a, b in ordered],
        "lines": [
            {"a": names[line.a], "b": names[line.b], "alpha": line.alphas, "loss": line.losses}
            | {"barrier": line.barrier.height, "at": line.barrier.alpha}
            for line in one.lines
        ],
    }
    if (loss_A := pairs.mean_loss()) is not None:
        found["loss"] = loss_A.tolist()
    answer: dict[str, Any] = strict(found)
    return answer


def compared_sentence(one: Compared) -> str:
    """Say how the second of two models differs from the first; "" for other numbers of models."""
    if len(one.pairs.names) != 2:
        return ""
    (first, second), pairs = without_shared_folder(one.pairs.names), one.pairs
    kl, se, cka = float(pairs.mean_kl()[0, 1]), float(pairs.kl_se_AA[0, 1]), float(pairs.last_cka()[0, 1])
    numbers = f"KL(A ‖ B) {format_value(kl, '.3g')} ± {format_value(se, '.1g')} nats per token, CKA of the last states "
    numbers += format_value(cka, ".3f")
    if (loss_A := pairs.mean_loss()) is not None:
        apart = float(loss_A[1] - loss_A[0])
        size, word = format_value(abs(apart), ".3f"), "higher" if apart > 0 else "lower"
        is_same = size == format_value(0.0, ".3f")
        numbers += "; its loss is the same to 0.001 nats" if is_same else f"; its loss is {size} nats per token {word}"
    # Distributions may differ where every likeliest token is the same.
    what = f"predicts as {first} does" if kl < _SAME_KL else f"does not predict as {first} does"
    return f"{second} {what}: {numbers}. Equal models have KL 0 and CKA 1."


def print_compared(found: Sequence[Compared], probe: Mapping[str, Any], console: Console) -> None:
    """Print a row for each pair of models, and for each step."""
    kind = "tokens of text" if probe["kind"] == "text" else "random tokens"
    title = f"{probe['n_sequences']} sequences of {probe['seq_len']} {kind}; KL in nats per token, ± standard error"
    say(console, title)
    if sentence := compared_sentence(found[-1]):
        say(console, sentence, wrapped=True)
    steps, lines = any(one.step is not None for one in found), any(one.lines for one in found)
    losses = any(one.pairs.loss_AT is not None for one in found)
    columns = [*([Column("step")] * steps), Column("A", "name"), Column("B", "name")]
    columns += [Column("CKA,\nlast states", format=".3f"), Column("KL(A ‖ B)"), Column("KL(B ‖ A)")]
    columns += [Column("loss of A", format=".4f"), Column("loss of B", format=".4f")] * losses
    columns += [Column("barrier")] * lines
    rows = []
    for one in found:
        names, pairs = without_shared_folder(one.pairs.names), one.pairs
        cka_AA, kl_AA, se_AA, loss_A = pairs.last_cka(), pairs.mean_kl(), pairs.kl_se_AA, pairs.mean_loss()
        barriers = {(line.a, line.b): line.barrier for line in one.lines}
        for a, b in combinations(range(len(names)), 2):
            cells: list[object] = [cka_AA[a, b]]
            cells += [
                f"{format_value(kl_AA[i, j], '.4g')} ± {format_value(se_AA[i, j], '.1g')}" for i, j in ((a, b), (b, a))
            ]
            if loss_A is not None:
                cells += [loss_A[a], loss_A[b]]
            if lines:
                barrier = barriers[a, b]
                cells.append(f"{barrier.height:.4f} at α {barrier.alpha:.2g}" if barrier.height > 0 else "none")
            rows.append([*([one.step] * steps), names[a], names[b], *cells])
    Table(columns, rows).print(console)


def _numbers(found: Sequence[Compared]) -> list[LabelledArray]:
    """Return everything in long form."""
    arrays = []
    for one in found:
        names, pairs = one.pairs.names, one.pairs
        of_step = {} if one.step is None else {"step": one.step}
        for (a, b), cka_PQ in pairs.cka_by_layer.items():
            at = {"run": names[a], "other": names[b], **of_step}
            rows, columns = (range(n) for n in cka_PQ.shape)
            arrays.append(LabelledArray("cka", cka_PQ, [{"layer": rows}, {"other_layer": columns}], at))
        for a in range(len(names)):
            if pairs.loss_AT is not None:
                axes = [{"position": range(pairs.loss_AT.shape[1])}]
                arrays.append(LabelledArray("loss", pairs.loss_AT[a], axes, {"run": names[a], **of_step}))
            for b in range(len(names)):
                at = {"run": names[a], "other": names[b], **of_step}
                if a != b:
                    axes = [{"position": range(pairs.kl_AAT.shape[-1])}]
                    arrays.append(LabelledArray("kl", pairs.kl_AAT[a, b], axes, at))
        for line in one.lines:
            at = {"run": names[line.a], "other": names[line.b], **of_step}
            arrays.append(LabelledArray("loss", np.array(line.losses), [{"alpha": line.alphas}], at))
    return arrays


def write_picture(out: Path, found: Sequence[Compared]) -> None:
    """Draw the matrix of models at the last step, and write all numbers beside it, as a CSV of the same name."""
    pairs = found[-1].pairs
    panels = model_matrices(without_shared_folder(pairs.names), pairs.last_cka(), pairs.mean_kl())
    save_panels(panels, out, across=True, width=3.5)
    write_text(out.with_suffix(".csv"), to_csv(_numbers(found)))


def write_folder(
    folder: Path, found: Sequence[Compared], answer: Mapping[str, Any], steps_of_one: Sequence[int] | None
) -> None:
    """Write all numbers and pictures into a new folder.

    Args:
        folder: new folder; it appears whole or not at all.
        found: comparisons by rising step, if there are several.
        answer: result of `as_json`.
        steps_of_one: the models' steps, if they are checkpoints of one run.
    """
    last = found[-1].pairs
    with atomic_path(folder) as new:
        new.mkdir()
        write_json(new / "compare.json", answer)
        write_text(new / "compare.csv", to_csv(_numbers(found)))
        names = without_shared_folder(last.names)
        panels = model_matrices(names, last.last_cka(), last.mean_kl())
        save_panels(panels, new / "models.png", across=True, width=3.5)
        several = [(names[a], names[b], cka_PQ) for (a, b), cka_PQ in last.cka_by_layer.items() if a != b]
        save_png(draw_layer_matrices(several), new / "layers.png")
        save_panel(_by_position(last), new / "positions.png")
        if len(found) > 1 or steps_of_one is not None:
            for quantity in ("kl", "cka"):
                save_panel(_over_steps(found, steps_of_one, quantity), new / f"{quantity}_over_steps.png")
        if found[-1].lines:
            save_panel(_lines(names, found[-1].lines), new / "lines.png")


def model_matrices(names: Sequence[str], cka_AA: np.ndarray, kl_AA: np.ndarray) -> list[MatrixPanel]:
    """Build the panels of every pair of models: CKA of the last states, and the divergence of row ‖ column.

    Args:
        names: names of the models.
        cka_AA: CKA, symmetric.
        kl_AA: divergence in nats.
    """
    # A diagonal of ones and zeros is known beforehand, and would take the colours of the rest.
    off = ~np.eye(len(names), dtype=bool)
    largest = float(np.nanmax(kl_AA[off], initial=0.0)) or 1.0
    shown = (
        ("cka", "CKA of the last states", cka_AA, 0.1, 1.0, ".2f"),
        ("kl", "KL(row ‖ column) in nats per token", kl_AA, largest / 30, largest, ".2g"),
    )
    return [
        MatrixPanel(id_, title, names, names, np.where(off, values_AA, np.nan), pale, full, spec)
        for id_, title, values_AA, pale, full, spec in shown
    ]


def _by_position(pairs: AllPairs) -> CurvePanel:
    names, length = without_shared_folder(pairs.names), pairs.kl_AAT.shape[-1]
    every = list(combinations(range(len(names)), 2))
    series = [
        Series(pairs.kl_AAT[a, b], {"position": range(length)}, i, f"{names[a]} ‖ {names[b]}")
        for i, (a, b) in enumerate(every[place] for place in evenly_spaced(len(every), _MOST_CURVES))
    ]
    return CurvePanel("positions", "", series, "position", _KL, x_log=True)


def _over_steps(found: Sequence[Compared], steps_of_one: Sequence[int] | None, quantity: str) -> CurvePanel:
    """Build the curves of pairs of runs over their steps; for the checkpoints of one run, of each against the first."""

    def matrix(pairs: AllPairs) -> np.ndarray:
        return pairs.mean_kl() if quantity == "kl" else pairs.last_cka()

    names = without_shared_folder(found[-1].pairs.names)
    if steps_of_one is not None:
        series = [Series(matrix(found[0].pairs)[0][1:], {"step": steps_of_one[1:]}, 0, f"{names[0]} ‖ later")]
    else:
        names = [name.rpartition("@")[0] for name in names]
        every = list(combinations(range(len(names)), 2))
        steps = [one.step for one in found if one.step is not None]
        series = [
            Series(np.array([matrix(one.pairs)[a, b] for one in found]), {"step": steps}, i, f"{names[a]} ‖ {names[b]}")
            for i, (a, b) in enumerate(every[place] for place in evenly_spaced(len(every), _MOST_CURVES))
        ]
    label = _KL if quantity == "kl" else "CKA of the last states"
    return CurvePanel(quantity, "", series, unit=label, log=quantity == "kl")


def _lines(names: Sequence[str], lines: Sequence[Line]) -> CurvePanel:
    """Build the loss on the straight line between two models and, dashed, the line between the ends' losses."""
    series = []
    for i, line in enumerate(lines[:_MOST_CURVES]):
        axis, ends = {"alpha": line.alphas}, np.array([line.losses[0], line.losses[-1]])
        series.append(Series(np.array(line.losses), axis, i, f"{names[line.a]} – {names[line.b]}"))
        series.append(Series(ends, {"alpha": [0, 1]}, i, "between the ends", "dashed"))
    return CurvePanel("lines", "", series, "alpha", "loss, nats per token")
