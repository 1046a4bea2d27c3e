"""The sections of a run's page, in causal order: the chain that ends in a sink, and the seed's mark below it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..history import Story, number, printable, ranks
from ..pictures import curves as pictures
from ..pictures import layers as layer_pictures
from . import chain_of_runs as chain
from .over_training import DASHED, DOTTED, FAINT, SOLID, Timeline, arrays_at
from .section import Cube, Drawn, Section

FAVOURITES = 10
"""Tokens in a list of favourites."""


def sections(stories: Sequence[Story]) -> list[Section]:
    """All sections with pictures, in the order of the page."""
    time = Timeline(stories)
    trained_here = [story for story in stories if story.birth or story.metrics]
    told = [
        *([_loss(time)] if trained_here else []),
        chain.aggregation(time),
        chain.neurons(time),
        chain.dominance(time),
        chain.lock(time),
        chain.sink(time),
        _direction(time),
        _contraction(time),
        _preference(time),
        _persistence(time),
    ]
    lineage = _lineage(time)
    return [*told, lineage] if lineage.plates else told


def _loss(time: Timeline) -> Section:
    section = Section(
        "loss",
        "Loss",
        "Mean cross-entropy on training batches and on held-out windows. The unigram entropy is what a model reaches "
        "that knows nothing but how frequent each token is.",
    )
    for story in time.stories:
        for key in ("train/loss", "val/loss"):
            steps, values = story.series(key)
            bad = [step for step, value in zip(steps, values, strict=True) if not np.isfinite(value)]
            if bad:
                section.notes.append(
                    f"{story.name}: {key} is not a number in {len(bad)} lines, first at step {bad[0]:,}."
                )
    losses = time.logged({"train/loss": ("train", FAINT), "val/loss": ("validation", SOLID)})
    entropies = {number((story.birth.get("data") or {}).get("unigram_entropy")) for story in time.stories}
    reach = [0.0, max((max(curve.steps) for curve in losses), default=0.0)]
    levels = [
        pictures.Control("unigram entropy", reach, [e, e], quantity="unigram_entropy")
        for e in sorted(entropies)
        if np.isfinite(e)
    ]
    if losses:
        caption = "Training and validation loss."
        time.add_curves(section, "loss", caption, losses, "loss (nats per token)", levels, from_zero=False)
    else:
        section.notes.append("No losses are recorded yet.")
    bits = time.logged({"val/bits_per_byte": ("", SOLID)})
    time.add_curves(section, "bits", "Validation text, per UTF-8 byte.", bits, "bits per byte", from_zero=False)
    trigger = time.logged({"val/loss_trigger": ("", SOLID)})
    time.add_curves(section, "trigger", "Validation loss at trigger positions.", trigger, "nats per trigger")
    if len(section.plates) % 2:  # what else tells of training, where a place in the row is free
        norm = time.logged({"train/grad_norm": ("", SOLID)})
        time.add_curves(section, "norm", "Gradient norm before clipping.", norm, "gradient norm")
    return section


def _direction(time: Timeline) -> Section:
    section = Section(
        "direction",
        "Seed direction",
        "The seed direction is the mean direction in which random inputs leave the last block at birth. Alignment is "
        "the mean cosine of today's hidden states with it; drift is the cosine of today's mean direction with it.",
    )
    band = time.control("alignment_stranger", "strangers, largest |cosine|")
    curves = time.measured({"alignment": ("", SOLID)})
    caption = "Alignment. Grey: the same states against seed directions of other seeds."
    time.add_curves(section, "alignment", caption, curves, "alignment (cosine)", band)
    drift = time.measured({"drift": ("", SOLID)})
    time.add_curves(section, "drift", "Drift; 1 is birth.", drift, "drift (cosine)")
    return time.or_why_not(section)


CONTRACTIONS = {
    "inter": "Inter: across sequences, at the last position.",
    "intra": "Intra: across positions of one sequence.",
}
"""Kinds of contraction, and the captions of their pictures."""


def contraction_section() -> Section:
    """The section of both kinds, without its pictures."""
    return Section(
        "contraction",
        "Contraction along depth",
        "The mean cosine between hidden states of different inputs (inter) and of different positions of one input "
        "(intra): near 1, all inputs have become one direction.",
    )


def _contraction(time: Timeline) -> Section:
    section = contraction_section()
    for kind, caption in CONTRACTIONS.items():

        def draw(story: Story, prefix: str, kind: str = kind) -> Drawn:
            found = arrays_at(story, prefix, f"{kind}_attention", f"{kind}_mlp")
            if not found:
                return None
            profiles = [(title, arrays[f"{kind}_attention"], arrays[f"{kind}_mlp"]) for title, _, arrays in found]
            cubes = [cube for _, step, arrays in found for cube in contraction_cubes(kind, arrays, step)]
            return layer_pictures.contraction(profiles, run=story.index), cubes

        time.add_probes(section, kind, caption, draw)
    return time.or_why_not(section)


def contraction_cubes(kind: str, arrays: dict[str, np.ndarray], step: int) -> list[Cube]:
    """Numbers of the picture of one kind of contraction of one snapshot."""
    return [
        Cube(name, arrays[name], [{"layer": range(start, len(arrays[name]) + start)}], {"step": step})
        for name, start in ((f"{kind}_attention", 1), (f"{kind}_mlp", 0))
    ]


def _preference(time: Timeline) -> Section:
    section = Section(
        "preference",
        "Token preference",
        "p̄ is the mean next-token distribution over random inputs: a model without preference gives every token 1/V. "
        "Listed are the tokens that it favours, at birth and now.",
    )
    caption = (
        "Rank in p̄ of the ten favourites of birth and of the ten of now, by their text at both ends; shaded: the first "
        "ten ranks."
    )
    time.add_per_run(section, "ranks", caption, lambda story: _rank_paths(story, time.linear))
    distributions, cubes = [], []
    for story in time.stories:
        for now, snapshot in story.moments:
            p = snapshot.arrays.get("mean_prob")
            if p is not None and np.isfinite(p).all():
                shown = pictures.Distribution(story.index, time.legend_name(story), p, now)
                distributions.append(shown)
                cubes.append(distribution_cube(shown, {"run": story.name, "step": snapshot.step}))
    if distributions:
        figure = pictures.preference_distribution(distributions)
        section.add(figure, "all", "All tokens, most preferred first.", cubes)
    return section


def distribution_cube(shown: pictures.Distribution, at: dict[str, object]) -> Cube:
    """The numbers of one line of the picture of p̄."""
    rank, ratio = shown.points()
    return Cube("preference_ratio", ratio, [{"rank": rank.tolist()}], at)


def _rank_paths(story: Story, linear: float | None) -> Drawn:
    snapshots = [snapshot for snapshot in story.dated if "mean_prob" in snapshot.arrays]
    if story.first is None or story.last is None or len(snapshots) < 2:
        return None
    born, now = ({t["id"]: t["text"] for t in s.summary.get("top_tokens", [])[:FAVOURITES]}
                 for s in (story.first, story.last))  # fmt: skip
    placed = [ranks(snapshot.arrays["mean_prob"]) for snapshot in snapshots]
    tokens = now | born
    paths = [
        pictures.TokenPath(one_line(text), [float(r[token]) for r in placed], token in born, token in now)
        for token, text in tokens.items()
    ]
    if not paths or not np.isfinite([path.ranks for path in paths]).all():
        return None
    steps = [snapshot.step for snapshot in snapshots]
    figure = pictures.rank_paths(steps, paths, run=story.index, top=FAVOURITES, linear_until=linear)
    axes = [{"token": list(tokens), "text": [path.text for path in paths]}, {"step": steps}]
    return figure, [Cube("rank", np.array([path.ranks for path in paths]), axes)]


def one_line(text: object) -> str:
    """A token's text as one printable line."""
    return printable(text).replace("\n", "\\n")


def _persistence(time: Timeline) -> Section:
    section = Section(
        "persistence",
        "Rank persistence",
        "How far the order in which the newborn model preferred tokens still stands, "
        "beside the order of strangers, births of the same config from other seeds.",
    )
    curves = time.measured({"rank_persistence": ("Spearman ρ", SOLID), "kendall_tau": ("Kendall τ-b", DASHED)})
    band = time.control("rank_persistence_stranger", "strangers, largest |ρ|")
    caption = "Rank correlation of p̄ with birth, over the whole vocabulary."
    time.add_curves(section, "correlation", caption, curves, "rank correlation", band)
    # Of a vocabulary of k tokens the top k always overlap whole.
    smallest = min((s.summary.get("vocab_size", 0) for story in time.stories for s in story.snapshots), default=0)
    styles = {10: DOTTED, 100: DASHED, 1000: SOLID}
    roles = {f"overlap_{k}": (f"top {k:,}", style) for k, style in styles.items() if k < smallest}
    caption = "Overlap of the k most preferred tokens with birth's."
    time.add_curves(section, "overlap", caption, time.measured(roles), "overlap@k")
    return time.or_why_not(section)


def _lineage(time: Timeline) -> Section:
    section = Section(
        "lineage",
        "Lineage",
        "Whether hidden states on random inputs still tell which birth the model comes from: z of the lineage test "
        "(dimension permutation) against its own birth. A stranger's z has a standard deviation of 1.",
    )
    curves = time.logged({"seedprint/z": ("own birth", SOLID), "seedprint/z_stranger": ("strangers, largest", DASHED)})
    time.add_curves(section, "z", "z of the lineage test.", curves, "z")
    p = time.logged({"seedprint/log10_p": ("", SOLID)})
    caption = "Chance of as large a z between strangers, as a power of ten; below −2 it is the same lineage."
    if p:
        last = max(max(curve.steps) for curve in p)
        level = pictures.Control("p = 0.01", [0.0, last], [-2.0, -2.0], quantity="level")
        time.add_curves(section, "p", caption, p, "log₁₀ p", [level])
    return section
