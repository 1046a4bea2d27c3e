"""Token preference: which tokens the model favours whatever it reads [BB, SP]."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...files import finite_or_nan
from ...findings.formatting import format_value, one_line, shorten
from ...findings.run_history import RunHistory
from ...metrics.rankings import places
from ..charts.specs import CurvePanel, Drawn, Ranking, RankingPanel, Series
from ..csv_files import LabelledArray
from ..table import Column, Table
from .declared import Link
from .section import Listing, Section
from .snapshot_view import Arrays, SnapshotView
from .training_view import TrainingView


def _ranks_over_training(view: TrainingView, section: Section) -> None:
    curves = view.measured({"rank_persistence": "Spearman ρ", "kendall_tau": "Kendall τ-b"})
    band = view.measured({"rank_persistence_stranger": "strangers, largest |ρ|"})
    caption = "Rank correlation of p̄ with birth, over the whole vocabulary."
    view.add_curves(section, "correlation", caption, curves, "rank correlation", band)
    # Where the vocabulary has only k tokens, the top k of any two models overlap entirely.
    smallest = min((s.summary.get("vocab_size", 0) for run in view.runs for s in run.snapshots), default=0)
    roles = {f"overlap_{k}": f"top {k:,}" for k in (10, 100, 1000) if k < smallest}
    caption = "Overlap of the k most preferred tokens with birth's."
    view.add_curves(section, "overlap", caption, view.measured(roles), "overlap@k")


PERSISTENCE = Link(
    "persistence",
    "Rank persistence",
    "How far the order in which the newborn model preferred tokens still stands, "
    "beside the order of strangers, births of the same config from other seeds.",
    _ranks_over_training,
    quantities=(
        "rank_persistence", "rank_persistence_stranger", "kendall_tau", "overlap_10", "overlap_100", "overlap_1000",
        "rbo",
    ),
)  # fmt: skip


# ---------------------------------------------------------------- token preference
# Which tokens the model favours whatever it reads [BB, SP].

_FAVOURITES = 10  # in a list over training
_FAVOURITES_OF_SNAPSHOT = 20


def ranks(mean_prob: np.ndarray) -> np.ndarray:
    """Return the rank of every token in p̄, from 1; NaN everywhere if p̄ is not finite."""
    if not np.isfinite(mean_prob).all():
        return np.full(len(mean_prob), np.nan)
    return places(mean_prob) + 1.0


# ── over training ────────────────────────────────────────────────────────────────────────────────────────────────────


def _over_training(view: TrainingView, section: Section) -> None:
    caption = "Rank in p̄ of the ten favourites of birth and of the ten of now, by their text at both ends."
    view.add_per_run(section, "ranks", caption, _draw_ranks)
    numbers = []
    for run in view.runs:
        for _, snapshot in run.moments:
            p = snapshot.arrays.get("mean_prob")
            if p is not None and np.isfinite(p).all():
                numbers.append(_numbers(p, {"run": run.name, "step": snapshot.step}))
    if numbers:
        section.add(_distribution(numbers), "all", "All tokens, most preferred first.")


def _numbers(mean_prob: np.ndarray, at: dict[str, object]) -> LabelledArray:
    """Return V·p̄ by rank, closer for the first ones."""
    size = len(mean_prob)
    ranks = np.unique(np.geomspace(1, size, 300).astype(int))
    ratio = np.sort(mean_prob.astype(float))[::-1][ranks - 1] * size
    return LabelledArray("preference_ratio", ratio, [{"rank": ranks.tolist()}], at)


def _distribution(numbers: list[LabelledArray]) -> Drawn:
    last = max(max(array.axes[0]["rank"]) for array in numbers)
    uniform = LabelledArray("uniform", np.ones(2), [{"rank": [1, last]}])
    return Drawn(numbers, [uniform], unit="V · p̄", log=True)


def _draw_ranks(run: RunHistory) -> Drawn | None:
    snapshots = [snapshot for snapshot in run.dated if "mean_prob" in snapshot.arrays]
    if run.first is None or run.last is None or len(snapshots) < 2:
        return None
    born, now = (
        {t["id"]: t["text"] for t in s.summary.get("top_tokens", [])[:_FAVOURITES]} for s in (run.first, run.last)
    )
    ranks_by_step = [ranks(snapshot.arrays["mean_prob"]) for snapshot in snapshots]
    tokens = now | born
    paths = np.array([[float(r[token]) for r in ranks_by_step] for token in tokens])
    if not len(paths) or not np.isfinite(paths).all():
        return None
    texts, steps = [one_line(text) for text in tokens.values()], [snapshot.step for snapshot in snapshots]
    start = run.start.label if run.start.is_birth else "the start"
    is_of_birth = np.array([token in born for token in tokens])
    series = [
        Series(paths[kind], {"text": [t for t, held in zip(texts, kind, strict=True) if held], "step": steps}, of, name)
        for kind, of, name in (
            (~is_of_birth, None, "favourites now only"),
            (is_of_birth, run.index, f"among {start}'s favourites"),
        )
        if kind.any()
    ]
    panel = CurvePanel("", "", series, unit="rank in p̄", log=True, down=True)
    return Drawn([LabelledArray("rank", paths, [{"token": list(tokens), "text": texts}, {"step": steps}])], made=panel)


_TOKEN_COLUMNS = (
    Column("", key="rank"),
    Column("V · p̄", format="ratio", key="ratio"),
    Column("argmax share", format="percent", key="argmax_share"),
)


def ranking_panel(runs: Sequence[RunHistory]) -> RankingPanel | None:
    """Build the panel of the favourite tokens at every snapshot of the runs; None without any."""
    found = [ranking for run in runs for ranking in _rankings(run)]
    if not found:
        return None
    return RankingPanel(
        "tokens",
        "Favourite tokens",
        ["", "token", "V · p̄", "argmax", "at birth"],
        found,
        texts=[1],
        csv="preference-ranks.csv",
    )


def _rankings(run: RunHistory) -> Iterator[Ranking]:
    born = run.first.arrays.get("mean_prob") if run.first else None
    at_birth = None if born is None else ranks(born)
    for snapshot in run.dated:
        size = finite_or_nan(snapshot.summary.get("vocab_size"))
        rows = [
            [
                str(token["rank"]),
                shorten(one_line(token["text"]), 24),
                format_value(finite_or_nan(token.get("p")) * size, "ratio"),
                format_value(finite_or_nan(token.get("argmax_share")), "percent"),
                "–"
                if at_birth is None or token["id"] >= len(at_birth)
                else format_value(float(at_birth[token["id"]]), ",d"),
            ]
            for token in snapshot.summary.get("top_tokens", [])[:_FAVOURITES]
        ]
        if rows:
            yield Ranking(run.index, snapshot.step, rows)


def favourites(run: RunHistory) -> list[Table]:
    """Build the ranked lists: the favourites at birth and those of now."""
    lists = []
    by_time = dict(run.moments)
    for now, snapshot in run.moments:
        size = snapshot.summary.get("vocab_size", math.nan)
        other = by_time.get(not now)
        prob = other.arrays.get("mean_prob") if other else None
        elsewhere = None if prob is None else ranks(prob)
        rows = [
            token
            | {"ratio": finite_or_nan(token.get("p")) * size}
            | ({} if elsewhere is None else {"other": float(elsewhere[token["id"]])})
            for token in snapshot.summary.get("top_tokens", [])[:_FAVOURITES]
        ]
        when = run.start.step_in_words(snapshot.step)
        title = (f"Now, {when}" if when else "Now") if now else run.start.at.capitalize()
        columns = [*_TOKEN_COLUMNS[:1], Column(title, "token", key="text"), *_TOKEN_COLUMNS[1:]]
        if elsewhere is not None:
            columns.append(Column(f"rank {run.start.at}" if now else "rank now", format=",d", key="other"))
        lists.append(Table.of(columns, rows))
    return lists


# ── in one snapshot ──────────────────────────────────────────────────────────────────────────────────────────────────


def _in_snapshot(view: SnapshotView, section: Section) -> None:
    view.add(section, "all", "All tokens, most preferred first.", ["mean_prob"], _draw_distribution)
    tokens = view.snapshot.summary.get("top_tokens", [])[:_FAVOURITES_OF_SNAPSHOT]
    size = finite_or_nan(view.snapshot.summary.get("vocab_size"))
    at_birth = any("rank_at_birth" in token for token in tokens) and view.snapshot.step != 0
    if tokens:
        columns = [*_TOKEN_COLUMNS[:1], Column("token", "token", key="text"), Column("id"), *_TOKEN_COLUMNS[1:]]
        columns += [Column(f"rank {view.start.at}", format=",d", key="rank_at_birth")] if at_birth else []
        table = Table.of(columns, [token | {"ratio": finite_or_nan(token.get("p")) * size} for token in tokens])
        axis = {
            "rank": [token["rank"] for token in tokens],
            "token": [token["id"] for token in tokens],
            "text": [one_line(token["text"]) for token in tokens],
        }
        numbers = [
            LabelledArray(name, np.array([finite_or_nan(token.get(name)) for token in tokens]), [axis], view.at(""))
            for name in ("p", "argmax_share", *(["rank_at_birth"] if at_birth else []))
        ]
        section.listings.append(Listing("Favourite tokens", table, "preference-list.csv", numbers))


def _draw_distribution(arrays: Arrays) -> Drawn | None:
    if not np.isfinite(arrays["mean_prob"]).all() or not (arrays["mean_prob"] > 0).any():
        return None
    return _distribution([_numbers(arrays["mean_prob"], {})])


PREFERENCE = Link(
    "preference",
    "Token preference",
    "p̄ is the mean next-token distribution over random inputs: a model without preference gives every token 1/V. "
    "Listed are the tokens that it favours, at birth and now.",
    _over_training,
    "p̄ is the mean next-token distribution over the probe: a model without preference gives every token 1/V.",
    _in_snapshot,
    quantities=(
        "kl_uniform", "preference_ratio", "top1_share", "coverage_80", "entropy", "entropy_argmax", "mean_prob",
        "argmax_share", "stranger_mean_prob",
    ),
    explains=False,  # its lists stand in the page of runs even where no picture does
)  # fmt: skip
