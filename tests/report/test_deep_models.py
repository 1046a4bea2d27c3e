"""Pages, pictures and tables of models of many blocks and heads."""

import csv
import io
import json
import re

import numpy as np
import pytest
from pages import rows
from PIL import Image

from birthmark.measure.records import Snapshot
from birthmark.report.charts.chart_page import thinned
from birthmark.report.charts.lines import keys_of, lines_of
from birthmark.report.charts.scales import CIVIDIS, png_of_cells
from birthmark.report.charts.specs import CurvePanel, HeatmapPanel, Series
from birthmark.report.csv_files import LabelledArray, to_csv
from birthmark.report.pictures.panels import blocks_of_change, evenly_spaced
from birthmark.report.run_page import build_report
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
    # Of every head of the blocks that are shown, each number is that of the array.
    keys = rows(tmp_path / "s", "sink-keys.csv")
    assert {row["head"] for row in keys} == set("012")
    assert sorted({int(row["layer"]) for row in keys}) == shown
    importance = Snapshot.read(tmp_path / "s").arrays["importance"]
    for row in keys[::17]:
        layer, head, position = (int(row[name]) for name in ("layer", "head", "position"))
        assert float(row["value"]) == importance[layer - 1, head, position]
    why = f"12 of {n_layers} blocks, where sink mass or largest |h| changes most"
    assert text.count(f'{why}."') == 3  # for screen readers, of the random probe
    assert text.count(f'{why}; text probe."') == 3


# ── colours of blocks ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n_blocks", [2, 6, 7, 18, 96, 400])
def test_few_blocks_have_names_and_many_a_scale_from_the_first_to_the_last(n_blocks):
    values = np.arange(float(3 * n_blocks)).reshape(3, n_blocks)
    panel = CurvePanel("p", "", [Series(values, {"step": range(3), "layer": range(1, n_blocks + 1)}, 0)])
    names, scaled = keys_of(lines_of(panel))
    if n_blocks <= 6:
        assert ([key.name for key in names], scaled) == ([f"block {i + 1}" for i in range(n_blocks)], None)
    else:
        assert (names, scaled) == ([], (1, n_blocks))


# ── sizes of pages ───────────────────────────────────────────────────────────────────────────────────────────────────

BY_POSITION = ("key_norms", "value_norms", "residual_kurtosis_by_position", "sink_share")


def deep(step, rng, make_snapshot, n_layers=96, n_heads=96, length=128):
    """A snapshot of a deep model on both probes."""
    found = make_snapshot(step, rng, n_layers=n_layers, n_heads=n_heads, length=length)
    arrays = dict(found.arrays)
    arrays |= {name: rng.random((n_layers + name.startswith("residual"), length)) for name in BY_POSITION}
    arrays |= {name: rng.random((n_layers, n_heads)) for name in ("attention_entropy", "largest_logit")}
    arrays["positional_variance_out"] = rng.random((n_layers, n_heads, length))
    arrays["sink_rate"] = 100 * rng.random((n_layers, n_heads))
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    arrays |= {f"text.{name}": array * np.float32(0.9) for name, array in arrays.items()}
    summary = found.summary | {"n_layers": n_layers, "n_heads": n_heads, "bias_text": found.summary["bias"]}
    return Snapshot(summary, arrays)


@pytest.fixture(scope="module")
def deep_run(make_run, make_snapshot, tmp_path_factory):
    """A run of 96 blocks of 96 heads with twelve snapshots, and its page."""
    folder = tmp_path_factory.mktemp("deep")
    steps = [0, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10_000]
    run = make_run(folder / "run", steps=(0, 10), losses=False, n_layers=2)
    rng = np.random.default_rng(0)
    for step in steps:
        deep(step, rng, make_snapshot).write(run.snapshot(step))
    build_report([run], folder / "report.html")
    return run, (folder / "report.html").read_text(encoding="utf-8")


def numbers_of(page):
    """The data of a page's script, every array in its place."""
    data = json.loads(re.search(r'id="charts">(.*?)</script>', page, re.DOTALL)[1])
    for panel in data["panels"].values():
        for series in panel.get("series", ()):
            if isinstance(series["v"], int):
                series["v"] = data["shared"][series["v"]]
    return data


def test_a_page_of_many_snapshots_of_a_deep_model_stays_small(deep_run):
    run, text = deep_run
    assert len(text.encode()) < 3_000_000
    data = numbers_of(text)
    (series,) = (s for s in data["panels"]["sink-heads"]["series"] if s["probe"] == "text")
    steps = dict(series["axes"])["step"]
    assert (steps[0], steps[-1]) == (0, 10_000)
    values = np.array(series["v"]).reshape([len(coordinates) for _, coordinates in series["axes"]])
    for step, shown in zip(steps, values, strict=True):
        held = Snapshot.read(run.snapshot(step)).arrays["text.sink_mass"]
        assert shown.shape == held.shape
        np.testing.assert_allclose(shown, held, rtol=6e-4)
    # A curve over training keeps every step, and where choices gave way the page says so.
    whole = next(s for s in data["panels"]["sink-mass"]["series"] if s["probe"] == "text" and len(s["axes"]) == 1)
    assert len(whole["v"]) == 12
    assert f"Shown: of a single block or head, {len(steps)} of 12 steps; the snapshots hold all." in text


def test_pictures_of_heads_say_which_of_the_blocks_they_show(deep_run):
    _, text = deep_run
    captions = re.findall(r'aria-label="Sink mass of every head([^"]*)"', text)
    assert captions == [f"{probe}; 12 of 96 blocks, where it changes most." for probe in ("", "; text probe")]


def test_a_still_map_of_many_cells_is_one_picture_and_its_lines_are_few(deep_run):
    _, text = deep_run
    (figure,) = re.findall(r'<figure class="panel heatmap" id="panel-sink-heads".*?</figure>', text, re.DOTALL)
    assert figure.count("<image") == 1
    assert figure.count("<td") == 0
    (figure,) = re.findall(r'<figure class="panel curves" id="panel-sink-importance".*?</figure>', text, re.DOTALL)
    assert figure.count('<path class="l"') == 24
    assert re.search(r'class="scale">block 1<i [^>]*></i>96</div>', figure)


def test_a_page_of_one_snapshot_of_a_deep_model_stays_small(make_snapshot, tmp_path):
    deep(5, np.random.default_rng(0), make_snapshot).write(tmp_path / "s")
    text = build_snapshot_page(tmp_path / "s").read_text(encoding="utf-8")
    assert len(text.encode()) < 3_000_000
    assert "96" in re.findall(r">(\d+)</text>", text)  # the scale's last block


@pytest.mark.parametrize("n_layers", [4, 12, 30])
def test_pages_of_less_deep_models_keep_every_number(n_layers, make_run, tmp_path):
    run = make_run(tmp_path / "run", n_layers=n_layers, n_heads=8, losses=False)
    build_report([run], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "the snapshots hold all" not in text
    assert len(text.encode()) < 1_500_000


def test_the_longest_arrays_give_way_first():
    rng = np.random.default_rng(0)
    short = Series(rng.random((9, 10)), {"step": range(9), "layer": range(10)})
    long = Series(rng.random((9, 50, 50)), {"step": range(9), "layer": range(50), "head": range(50)})
    lines = Series(rng.random((9, 50, 400)), {"step": range(9), "layer": range(50), "position": range(400)})
    panels = [CurvePanel("a", "", [short]), HeatmapPanel("b", "", [long]), CurvePanel("c", "", [lines], "position")]
    found, notes = thinned(panels, 20_000)
    (kept_short,), (kept_long,), (kept_lines,) = (panel.series for panel in found)
    assert kept_short is short
    assert len(kept_long.axes["step"]) < 9
    assert (kept_long.axes["step"][0], kept_long.axes["step"][-1]) == (0, 8)
    np.testing.assert_array_equal(kept_long.values, long.values[list(kept_long.axes["step"])])
    places = list(kept_lines.axes["position"])
    assert (places[0], places[-1]) == (0, 399)
    assert np.diff(places)[0] < np.diff(places)[-1]
    np.testing.assert_array_equal(kept_lines.values, lines.values[np.ix_([0, 8], range(50), places)])
    assert sum(np.size(panel.series[0].values) for panel in found) <= 20_000
    assert notes == {
        "b": f"Shown: {len(kept_long.axes['step'])} of 9 steps; the snapshots hold all.",
        "c": f"Shown: 2 of 9 steps, {len(places)} of 400 positions; the snapshots hold all.",
    }


# ── a map's pixels ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pixel_is_a_cells_colour():
    shares = np.array([[0.0, 0.5, 1.0], [-1.0, 2.0, np.nan]])
    image = Image.open(io.BytesIO(png_of_cells(shares))).convert("RGBA")
    assert image.size == (3, 2)
    wanted = [CIVIDIS[0], CIVIDIS[8], CIVIDIS[15], CIVIDIS[0], CIVIDIS[15]]
    pixels = ["#" + bytes(pixel).hex() for pixel in np.asarray(image).reshape(-1, 4)]
    assert pixels[:5] == [f"{colour}ff" for colour in wanted]
    assert pixels[5].endswith("00")


# ── numbers in files ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, bool])
def test_a_csv_has_a_line_for_every_value(dtype):
    values = (10 ** np.random.default_rng(0).uniform(-9, 9, (2, 3, 4))).astype(dtype)
    if np.dtype(dtype).kind == "f":
        values[0, 0] = [np.nan, np.inf, -np.inf, -1.5]
        values[1, 1, 0] = 3
    texts = ['a "quoted", text', "100 %s", "=SUM(1)", "two\nlines"]
    axes = [{"layer": [1, 2]}, {"head": [0, 1, 2]}, {"position": [5, 6, 7, 8], "text": texts}]
    array = LabelledArray("q", values, axes, {"run": "50 % of it", "step": 3})
    lines = list(csv.DictReader(io.StringIO(to_csv([array, LabelledArray("level", np.array(0.25))]))))
    assert len(lines) == values.size + 1
    for row, (place, value) in zip(lines, np.ndenumerate(values), strict=False):
        layer, head, position = place
        assert (row["run"], row["step"], row["quantity"]) == ("50 % of it", "3", "q")
        assert (row["layer"], row["head"], row["position"]) == (str(layer + 1), str(head), str(position + 5))
        assert row["text"] == ['a "quoted", text', "100 %s", "'=SUM(1)", "two\\nlines"][position]
        if np.dtype(dtype).kind != "f":
            assert row["value"] == str(value.item())
        elif np.isfinite(value):
            assert dtype(row["value"]) == value
        else:
            assert row["value"].lstrip("'") == {"nan": "", "inf": "inf", "-inf": "-inf"}[str(value)]
    assert lines[-1] == dict.fromkeys(lines[-1], "") | {"quantity": "level", "value": "0.25"}
