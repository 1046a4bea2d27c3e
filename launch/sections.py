"""The sections of a report: which pictures tell which part of the story, in causal order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from . import pictures
from .story import Story, number, printable, ranks
from .table import format_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAVOURITES = 10
"""Tokens in a list of favourites."""
_MAX_POINTS = 600  # per loss curve; more than a picture has pixels says nothing more
_SOLID: Mapping[str, Any] = {}
_FAINT: Mapping[str, Any] = {"alpha": 0.45, "linewidth": 0.9}
_DASHED: Mapping[str, Any] = {"linestyle": (0, (4, 1.6))}
_DOTTED: Mapping[str, Any] = {"linestyle": (0, (1, 1.3))}


@dataclass(frozen=True)
class Section:
    """A heading, the sentence that says what one sees, and its pictures."""

    id: str
    title: str
    lede: str
    figures: list[tuple[Markup, str]] = field(default_factory=list)
    """(SVG, caption)."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know before the pictures, or why there are none."""


def sections(stories: Sequence[Story]) -> list[Section]:
    """All sections with pictures, in the order of the page."""
    linear = _linear_until(stories)
    return [
        _loss(stories, linear),
        _direction(stories, linear),
        _persistence(stories, linear),
        _preference(stories, linear),
        _contraction(stories),
        _sink(stories, linear),
    ]


def _linear_until(stories: Sequence[Story]) -> float | None:
    """First step of snapshots that lie close early and wide late; None if they are spaced evenly."""
    steps = sorted({snapshot.step for story in stories for snapshot in story.snapshots} - {0})
    return steps[0] if steps and steps[len(steps) // 2] < steps[-1] / 4 else None


def _thin(steps: list[int], values: list[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Means of neighbours, where there are more points than a picture can show."""
    if len(steps) <= _MAX_POINTS:
        return steps, values
    # Cuts spaced evenly and cuts spaced logarithmically, so that either axis shows all that it can.
    half = _MAX_POINTS // 2
    cuts = np.concatenate([np.geomspace(1, len(steps) - 1, half), np.linspace(1, len(steps) - 1, half)])
    groups = np.split(np.arange(len(steps)), np.unique(cuts.astype(int)))
    x, y = np.asarray(steps, dtype=float), np.asarray(values)
    return [x[g].mean() for g in groups], [y[g].mean() for g in groups]


def _legend_name(story: Story, stories: Sequence[Story]) -> str:
    """One run needs no name in every legend: the page is its own."""
    return story.name if len(stories) > 1 else ""


def _logged(stories: Sequence[Story], roles: Mapping[str, tuple[str, Mapping[str, Any]]]) -> list[pictures.Curve]:
    """Curves of metrics.jsonl keys: key → (role, line style)."""
    curves = []
    for story in stories:
        for key, (role, style) in roles.items():
            steps, values = story.series(key)
            if np.isfinite(values).any():
                x, y = _thin(steps, values)
                curves.append(
                    pictures.Curve(story.index, _legend_name(story, stories), x, y, role, style, markers=len(x) < 25)
                )
    return curves


def _measured(
    stories: Sequence[Story], roles: Mapping[str, tuple[str, Mapping[str, Any]]], group: str = "bias"
) -> list[pictures.Curve]:
    """Curves of snapshot scalars over training: name → (role, line style); ``group`` names the probe's scalars."""
    curves = []
    for story in stories:
        steps = [snapshot.step for snapshot in story.snapshots]
        for key, (role, style) in roles.items():
            values = [number(snapshot.summary.get(group, {}).get(key)) for snapshot in story.snapshots]
            if np.isfinite(values).any():
                curves.append(pictures.Curve(story.index, _legend_name(story, stories), steps, values, role, style))
    return curves


def _control(stories: Sequence[Story], key: str, label: str, band: bool = True) -> list[pictures.Control]:
    curves = _measured(stories, {key: ("", _SOLID)})
    return [pictures.Control(label, curve.steps, curve.values, band) for curve in curves]


def _over_training(
    section: Section,
    key: str,
    caption: str,
    curves: Sequence[pictures.Curve],
    ylabel: str,
    linear: float | None,
    controls: Sequence[pictures.Control] = (),
    *,
    from_zero: bool = True,
) -> None:
    """Add a picture over training, if at least one run has more than one point to draw."""
    if any(len(curve.steps) > 1 for curve in curves):
        figure = pictures.over_training(
            curves, ylabel=ylabel, controls=controls, linear_until=linear, from_zero=from_zero
        )
        section.figures.append((_svg(figure, f"{section.id}-{key}", f"{caption} Line chart over training."), caption))


def _per_run(
    section: Section, stories: Sequence[Story], key: str, caption: str, draw: Callable[[Story], Figure | None]
) -> None:
    """Add one small picture per run that has something to draw."""
    for story in stories:
        figure = draw(story)
        if figure is not None:
            text = caption if len(stories) == 1 else f"{story.name}. {caption}"
            section.figures.append((_svg(figure, f"{section.id}-{key}-{story.index}", text), text))


def _svg(figure: Figure, key: str, description: str) -> Markup:
    return Markup(pictures.to_svg(figure, key, printable(description)))


# ── the sections ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _loss(stories: Sequence[Story], linear: float | None) -> Section:
    section = Section(
        "loss",
        "Loss",
        "Mean cross-entropy on training batches and on held-out windows. The unigram entropy is what a model reaches "
        "that knows nothing but how frequent each token is.",
    )
    for story in stories:
        for key in ("train/loss", "val/loss"):
            steps, values = story.series(key)
            bad = [step for step, value in zip(steps, values, strict=True) if not np.isfinite(value)]
            if bad:
                section.notes.append(
                    f"{story.name}: {key} is not a number in {len(bad)} lines, first at step {bad[0]:,}."
                )
    losses = _logged(stories, {"train/loss": ("train", _FAINT), "val/loss": ("validation", _SOLID)})
    entropies = {number((story.birth.get("data") or {}).get("unigram_entropy")) for story in stories}
    reach = [0.0, max((max(curve.steps) for curve in losses), default=0.0)]
    levels = [pictures.Control("unigram entropy", reach, [e, e]) for e in sorted(entropies) if np.isfinite(e)]
    if losses:
        _over_training(
            section,
            "loss",
            "Training and validation loss.",
            losses,
            "loss (nats per token)",
            linear,
            levels,
            from_zero=False,
        )
    else:
        section.notes.append("No losses are recorded yet.")
    bits = _logged(stories, {"val/bits_per_byte": ("", _SOLID)})
    _over_training(section, "bits", "Validation text, per UTF-8 byte.", bits, "bits per byte", linear, from_zero=False)
    trigger = _logged(stories, {"val/loss_trigger": ("", _SOLID)})
    _over_training(section, "trigger", "Validation loss at trigger positions.", trigger, "nats per trigger", linear)
    if len(section.figures) % 2:  # what else tells of training, where a place in the row is free
        norm = _logged(stories, {"train/grad_norm": ("", _SOLID)})
        _over_training(section, "norm", "Gradient norm before clipping.", norm, "gradient norm", linear)
    return section


def _direction(stories: Sequence[Story], linear: float | None) -> Section:
    section = Section(
        "direction",
        "Seed direction",
        "The seed direction is the mean direction in which random inputs leave the last block at birth. Alignment is "
        "the mean cosine of today's hidden states with it; drift is the cosine of today's mean direction with it.",
    )
    band = _control(stories, "alignment_stranger", "strangers, largest |cosine|")
    curves = _measured(stories, {"alignment": ("", _SOLID)})
    caption = "Alignment. Grey: the same states against seed directions of other seeds."
    _over_training(section, "alignment", caption, curves, "alignment (cosine)", linear, band)
    drift = _measured(stories, {"drift": ("", _SOLID)})
    _over_training(section, "drift", "Drift; 1 is birth.", drift, "drift (cosine)", linear)
    return _or_wait(section)


def _persistence(stories: Sequence[Story], linear: float | None) -> Section:
    section = Section(
        "persistence",
        "Rank persistence",
        "How far the order in which the newborn model preferred tokens still stands, "
        "beside the order of strangers, births of the same config from other seeds.",
    )
    curves = _measured(stories, {"rank_persistence": ("Spearman ρ", _SOLID), "kendall_tau": ("Kendall τ-b", _DASHED)})
    band = _control(stories, "rank_persistence_stranger", "strangers, largest |ρ|")
    caption = "Rank correlation of p̄ with birth, over the whole vocabulary."
    _over_training(section, "correlation", caption, curves, "rank correlation", linear, band)
    # Of a vocabulary of k tokens the top k always overlap whole.
    smallest = min((s.summary.get("vocab_size", 0) for story in stories for s in story.snapshots), default=0)
    styles = {10: _DOTTED, 100: _DASHED, 1000: _SOLID}
    roles = {f"overlap_{k}": (f"top {k:,}", style) for k, style in styles.items() if k < smallest}
    caption = "Overlap of the k most preferred tokens with birth's."
    _over_training(section, "overlap", caption, _measured(stories, roles), "overlap@k", linear)
    return _or_wait(section)


def _preference(stories: Sequence[Story], linear: float | None) -> Section:
    section = Section(
        "preference",
        "Token preference",
        "p̄ is the mean next-token distribution over random inputs: a model without preference gives every token 1/V. "
        "Listed are the tokens that it favours, at birth and now.",
    )
    caption = "Rank of the ten favourites of birth (left) and of now (right) in p̄; shaded: the first ten ranks."
    _per_run(section, stories, "ranks", caption, lambda story: _rank_paths(story, linear))
    distributions = [
        pictures.Distribution(story.index, _legend_name(story, stories), snapshot.arrays["mean_prob"], now)
        for story in stories
        for now, snapshot in story.moments
        if "mean_prob" in snapshot.arrays and np.isfinite(snapshot.arrays["mean_prob"]).all()
    ]
    if distributions:
        caption = "All tokens, most preferred first."
        figure = pictures.preference_distribution(distributions)
        section.figures.append((_svg(figure, "preference-all", f"{caption} Line chart, logarithmic."), caption))
    return section


def _rank_paths(story: Story, linear: float | None) -> Figure | None:
    snapshots = [snapshot for snapshot in story.snapshots if "mean_prob" in snapshot.arrays]
    if story.first is None or story.last is None or len(snapshots) < 2:
        return None
    born, now = ({t["id"]: t["text"] for t in s.summary.get("top_tokens", [])[:FAVOURITES]}
                 for s in (story.first, story.last))  # fmt: skip
    placed = [ranks(snapshot.arrays["mean_prob"]) for snapshot in snapshots]
    paths = [
        pictures.TokenPath(printable(text), [float(r[token]) for r in placed], token in born, token in now)
        for token, text in (now | born).items()
    ]
    if not paths or not np.isfinite([path.ranks[-1] for path in paths]).all():
        return None
    steps = [snapshot.step for snapshot in snapshots]
    return pictures.rank_paths(steps, paths, run=story.index, top=FAVOURITES, linear_until=linear)


def _contraction(stories: Sequence[Story]) -> Section:
    section = Section(
        "contraction",
        "Contraction along depth",
        "The mean cosine between hidden states of different inputs (inter) and of different positions of one input "
        "(intra): near 1, all inputs have become one direction.",
    )
    captions = {"inter": "across sequences, at the last position", "intra": "across positions of one sequence"}
    for kind, caption in captions.items():

        def draw(story: Story, kind: str = kind) -> Figure | None:
            names = (f"{kind}_attention", f"{kind}_mlp")
            profiles = [
                (now, s.arrays[names[0]], s.arrays[names[1]])
                for now, s in story.moments
                if all(name in s.arrays for name in names)
            ]
            return pictures.contraction(profiles, run=story.index) if profiles else None

        _per_run(section, stories, kind, f"{kind.capitalize()}: {caption}.", draw)
    return section


def _sink(stories: Sequence[Story], linear: float | None) -> Section:
    section = Section(
        "sink",
        "Attention sink",
        "Sink mass is the mean attention that later queries spend on position 0; importance is the mean attention that "
        "a key receives. Grey: what uniform attention would give.",
    )
    curves = _measured(stories, {"sink_mass": ("mean over heads", _SOLID), "sink_mass_max": ("largest head", _DOTTED)})
    curves += _measured(stories, {"sink_mass": ("mean over heads, text probe", _DASHED)}, "bias_text")
    level = _control(stories, "sink_uniform", "uniform", band=False)
    _over_training(section, "mass", "Sink mass over training.", curves, "sink mass", linear, level)
    rate = _measured(stories, {"sink_rate": ("", _SOLID)})
    rate += _measured(stories, {"sink_rate": ("text probe", _DASHED)}, "bias_text")
    epsilons = {format_value(s.bias.get("sink_epsilon"), "g") for story in stories for s in story.snapshots}
    threshold = " or ".join(sorted(epsilons))
    caption = f"Share of (sequence, layer, head) whose importance of key 0 exceeds ε = {threshold}."
    _over_training(section, "rate", caption, rate, "sink rate (%)", linear)

    for prefix, probe in (("", ""), ("text.", ", text probe")):

        def heatmap(story: Story, prefix: str = prefix) -> Figure | None:
            panels = _panels(story, f"{prefix}sink_mass")
            return pictures.sink_heatmap(panels) if panels else None

        def keys(story: Story, prefix: str = prefix) -> Figure | None:
            panels = _panels(story, f"{prefix}importance")
            return pictures.importance(panels) if panels else None

        key = prefix.rstrip(".")
        _per_run(section, stories, f"heads{key}", f"Sink mass by block and head{probe}.", heatmap)
        caption = f"Importance over key position, mean over the heads of a block{probe}."
        _per_run(section, stories, f"keys{key}", caption, keys)
    return section


def _panels(story: Story, name: str) -> list[tuple[str, np.ndarray]]:
    return [
        (f"now, step {s.step:,}" if now else "at birth", s.arrays[name]) for now, s in story.moments if name in s.arrays
    ]


def _or_wait(section: Section) -> Section:
    if not section.figures:
        section.notes.append("Curves appear once there is a snapshot after birth.")
    return section
