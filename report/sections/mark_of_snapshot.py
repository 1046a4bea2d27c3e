"""The seed's mark in one snapshot: its direction, contraction along depth, and the tokens that it favours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..history import number
from ..pictures import curves as pictures
from ..pictures import layers as layer_pictures
from ..tables import format_value
from .of_runs import CONTRACTIONS, contraction_cubes, contraction_section, distribution_cube, one_line
from .one_snapshot import Arrays, Measured, by_block
from .over_training import DASHED, SOLID
from .section import Cube, Drawn, List, Section

_FAVOURITES = 20


def direction(page: Measured) -> Section:
    """What is left of the seed's direction, block by block."""
    section = Section(
        "direction",
        "Seed direction",
        "The seed direction of a block is the mean direction in which random inputs leave it at birth. Alignment: mean "
        "cosine of the states with it. Drift: cosine of the mean direction with it. Energy share: how much of the "
        "squared norm lies along it.",
    )

    def alignment(arrays: Arrays) -> Drawn:
        controls = []
        if (strangers := arrays.get("alignment_stranger")) is not None and len(strangers):
            largest = np.abs(strangers).max(0)
            label = "strangers, largest |cosine|"
            controls = [pictures.Control(label, range(len(largest)), largest.tolist(), True, "alignment_stranger")]
        names = {"alignment": ("alignment", SOLID), "drift": ("drift", DASHED)}
        found = {name: arrays[name] for name in names if name in arrays}
        return by_block(found, names, "cosine", 0, controls, from_zero=True)

    page.add(section, "alignment", "Alignment with the seed direction, and drift, by block.", ["alignment"], alignment)

    def energy(arrays: Arrays) -> Drawn:
        share = arrays["energy_share"]
        chance = number(page.snapshot.bias.get("energy_share_chance"))
        level = [pictures.Control("chance, 1/d", [0, len(share) - 1], [chance, chance], quantity="energy_share_chance")]
        return by_block({"energy_share": share}, {"energy_share": ("", SOLID)}, "share of energy", 0,
                         level if np.isfinite(chance) else [], from_zero=True)  # fmt: skip

    page.add(section, "energy", "Share of the energy along the seed direction, by block.", ["energy_share"], energy)
    return section


def contraction(page: Measured) -> Section:
    """How far states have become one direction, block by block."""
    section = contraction_section()
    for kind, caption in CONTRACTIONS.items():
        names = [f"{kind}_attention", f"{kind}_mlp"]

        def draw(arrays: Arrays, kind: str = kind, names: Sequence[str] = names) -> Drawn:
            figure = layer_pictures.contraction([("", arrays[names[0]], arrays[names[1]])], run=0)
            return figure, contraction_cubes(kind, dict(arrays), page.snapshot.step)

        page.add(section, kind, caption, names, draw)
    return section


def preference(page: Measured) -> Section:
    """Which tokens the model favours."""
    section = Section(
        "preference",
        "Token preference",
        "p̄ is the mean next-token distribution over the probe: a model without preference gives every token 1/V.",
    )

    def distribution(arrays: Arrays) -> Drawn:
        if not np.isfinite(arrays["mean_prob"]).all() or not (arrays["mean_prob"] > 0).any():
            return None
        shown = pictures.Distribution(0, "", arrays["mean_prob"], True)
        return pictures.preference_distribution([shown]), [distribution_cube(shown, {})]

    page.add(section, "all", "All tokens, most preferred first.", ["mean_prob"], distribution)
    tokens = page.snapshot.summary.get("top_tokens", [])[:_FAVOURITES]
    size = number(page.snapshot.summary.get("vocab_size"))
    at_birth = any("rank_at_birth" in token for token in tokens) and page.snapshot.step != 0
    rows = [
        [
            str(token["rank"]),
            one_line(token["text"]),
            str(token["id"]),
            format_value(number(token.get("p")) * size, "ratio"),
            format_value(number(token.get("argmax_share")), "percent"),
            *([format_value(number(token.get("rank_at_birth")), ",d")] if at_birth else []),
        ]
        for token in tokens
    ]
    if rows:
        headings = ["", "token", "id", "V · p̄", "argmax share", *(["rank at birth"] if at_birth else [])]
        axis = {
            "rank": [token["rank"] for token in tokens],
            "token": [token["id"] for token in tokens],
            "text": [one_line(token["text"]) for token in tokens],
        }
        cubes = [
            Cube(name, np.array([number(token.get(name)) for token in tokens]), [axis], page.at(""))
            for name in ("p", "argmax_share", *(["rank_at_birth"] if at_birth else []))
        ]
        section.lists.append(List("Favourite tokens", headings, rows, "preference-list.csv", cubes, texts=[1]))
    return section
