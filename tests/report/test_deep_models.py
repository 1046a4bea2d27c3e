"""Pages, pictures and tables of models of many blocks and heads."""

import re

import numpy as np
import pytest

from birthmark.measure.records import Snapshot
from birthmark.report.pictures.panels import blocks_of_change, evenly_spaced, name_blocks
from birthmark.report.pictures.style import new_figure
from birthmark.report.snapshot_page import build_snapshot_page

SMOL_SINK = [.048, .038, .288, .680, .629, .632, .594, .688, .592, .578, .199, .018, .449, .496, .651, .502, .393, .673,
             .670, .525, .548, .613, .610, .634, .660, .772, .647, .403, .448, .397]  # fmt: skip
"""Sink mass by block of SmolLM2-135M on random tokens, mean over heads."""
SMOL_LARGEST = [35, 240, 910, 907, 903, 895, 889, 876, 751, 179, 142, *[25_100] * 16, 24_791, 10_338, 4_778]
"""Its largest |h| after each block."""


# ── the blocks that are drawn ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n_blocks", [13, 30, 48, 96])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_on_both_sides_of_planted_changes_are_drawn(n_blocks, seed):
    rng = np.random.default_rng(seed)
    forms, vanishes = sorted(rng.choice(np.arange(1, n_blocks), 2, replace=False).tolist())
    sink = rng.normal(0, 1e-3, (n_blocks, 7))
    sink[forms:vanishes] += 0.5
    jump = int(rng.integers(1, n_blocks))
    largest = np.log(np.where(np.arange(n_blocks) < jump, 30.0, 25_000.0))
    found = blocks_of_change([sink, largest], n_blocks)
    assert len(found) == 12
    assert found == sorted(set(found))
    assert {0, n_blocks - 1, forms - 1, forms, vanishes - 1, vanishes, jump - 1, jump} <= set(found)
    assert found == blocks_of_change([sink, largest], n_blocks)


def test_a_real_models_sink_and_massive_channel_are_seen_to_form_and_vanish():
    found = blocks_of_change([np.array(SMOL_SINK), np.log(SMOL_LARGEST)], 30)
    assert {1, 2, 3, 10, 11, 12, 13, 30} <= {block + 1 for block in found}
    assert len(found) == 12


def test_blocks_lie_evenly_where_nothing_changes_or_nothing_is_a_number():
    assert blocks_of_change([], 40) == evenly_spaced(40)
    assert blocks_of_change([np.ones(40), np.full((40, 3), np.nan)], 40) == evenly_spaced(40)
    assert blocks_of_change([np.arange(5.0)], 5) == [0, 1, 2, 3, 4]
    assert blocks_of_change([np.arange(1.0)], 1) == [0]
    assert blocks_of_change([], 0) == []


def test_infinite_values_are_no_change():
    values = np.zeros(40)
    values[20], values[30:] = -np.inf, 1
    assert {29, 30} <= set(blocks_of_change([values], 40))
    assert 20 not in blocks_of_change([values], 40, most=4)


def planted(n_layers, n_heads, length, **blocks):
    """A snapshot whose sink mass and largest state are flat but for such blocks, from 1."""
    rng = np.random.default_rng(0)
    sink = np.full((n_layers, n_heads), 0.05)
    sink[blocks["sink"] - 1 :] = 0.7
    massive = np.full((n_layers + 1, 10), 30.0)
    massive[blocks["massive"] :] = 20_000.0
    arrays = {
        "sink_mass": sink,
        "massive_value": massive,
        "importance": rng.random((n_layers, n_heads, length)),
        "positional_variance": 1 + rng.random((n_layers, n_heads, length)),
        "n_eff": 1 + rng.random((n_layers, n_heads, length)),
    }
    summary = {"step": 3, "vocab_size": 9, "n_layers": n_layers, "n_heads": n_heads, "bias": {}, "top_tokens": []}
    return Snapshot(summary, {**arrays, **{f"text.{name}": array for name, array in arrays.items()}})


@pytest.mark.parametrize("n_layers", [30, 48, 96])
def test_a_page_shows_planted_changes_in_the_same_blocks_of_every_picture_and_probe(n_layers, tmp_path):
    planted(n_layers, 3, 8, sink=n_layers // 2, massive=7).write(tmp_path / "s")
    text = build_snapshot_page(tmp_path / "s").read_text(encoding="utf-8")
    titles = [int(block) for block in re.findall(r">block (\d+)<", text)]
    shown = titles[:12]
    assert titles == shown * 6
    assert {1, 6, 7, n_layers // 2 - 1, n_layers // 2, n_layers} <= set(shown)
    why = f"12 of {n_layers} blocks, where sink mass or largest |h| changes most"
    assert text.count(f'{why}."') == 3  # for screen readers, of the random probe
    assert text.count(f'{why}; text probe."') == 3


# ── colours of blocks ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n_blocks", [2, 4, 5, 18, 30, 48, 96, 400])
def test_few_blocks_have_names_and_many_a_scale_from_the_first_to_the_last(n_blocks):
    figure, axes = new_figure(360, 200)
    name_blocks(figure, [axes], n_blocks, {})
    if n_blocks <= 4:
        assert [text.get_text() for text in figure.texts] == [f"block {i + 1}" for i in range(n_blocks)]
        assert figure.axes == [axes]
        return
    assert [text.get_text() for text in figure.texts] == []
    (bar,) = figure.axes[1:]
    ticks = bar.get_yticks().tolist()
    assert (ticks[0], ticks[-1]) == (1, n_blocks) == tuple(bar.get_ylim())
    assert ticks == sorted(set(ticks))
    assert 2 < len(ticks) <= 9
    # Numbers of ticks do not lie on one another.
    assert min(np.diff(ticks)) >= (n_blocks - 1) / 20
