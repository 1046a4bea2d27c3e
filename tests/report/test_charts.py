"""Panels as data, their still pictures, and pages of blocks: every text escaped, every number rounded once."""

import json
import re

import numpy as np
import pytest

from birthmark.report.charts.chart_page import (
    Controls,
    Finding,
    Findings,
    Fold,
    Heading,
    PageRun,
    Panels,
    Prose,
    island,
    render_page,
    sparkline,
)
from birthmark.report.charts.scales import Scale, fitting_scale
from birthmark.report.charts.specs import (
    CurvePanel,
    HeatmapPanel,
    MatrixPanel,
    Point,
    Ranking,
    RankingPanel,
    ScatterPanel,
    Series,
    colours_of,
    roles_of,
    rounded,
)
from birthmark.report.charts.stills import still
from birthmark.report.table import Column, Table

EVIL = "</script><img onerror=alert(1)>&"


def one_of_each():
    steps = [0, 10, 100]
    curve = Series(np.array([1.0, np.nan, 3.0]), {"step": steps}, 0, EVIL)
    axes = {"step": steps, "layer": [1, 2], "head": [0, 1]}
    heads = Series(np.arange(12.0).reshape(3, 2, 2), axes, 0, probe="random")
    rankings = [Ranking(0, step, [["1", EVIL, "2.0"]]) for step in steps]
    return [
        CurvePanel("curve", EVIL, [curve, heads]),
        HeatmapPanel("map", EVIL, [heads], limits=(0, 11)),
        RankingPanel("rank", EVIL, ["", EVIL, "p"], rankings, texts=[1]),
        MatrixPanel("matrix", EVIL, [EVIL, "b"], ["a", EVIL], np.array([[38, 1], [np.nan, -40]]), pale=2, full=40),
        ScatterPanel("points", EVIL, [Point(1, 2, EVIL, EVIL, x_error=(0.5, 1.5)), Point(np.nan, 1, "b")], EVIL, EVIL),
    ]


@pytest.fixture(scope="module")
def page():
    blocks = [
        Heading("top", EVIL, EVIL),
        Findings([Finding(EVIL, "present", [3, 2, float("nan"), 1], [1, 1, 1, 1], link="more")], EVIL),
        Controls(),
        Panels(one_of_each()),
        Fold(EVIL, [Prose(EVIL), Table([Column(EVIL, "text"), Column("x")], [[EVIL, 1]])], id="more", note=EVIL),
    ]
    return render_page(EVIL, blocks, runs=[PageRun(EVIL, EVIL, {0: 0, 10: 2_000})], about=EVIL, data="page-data")


def test_no_text_becomes_markup(page, parse):
    read = parse(page)
    assert read.tags.count("script") == 2
    assert "img" not in read.tags
    assert EVIL not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert "".join(read.text).count(EVIL) > 10  # the reader still sees it as it is


def test_only_our_own_script_may_run(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    *others, script = policy.split("; ")
    assert others == ["default-src 'none'", "style-src 'unsafe-inline'", "img-src data:"]
    assert re.fullmatch(r"script-src 'sha256-[\w+/=]{44}'", script)


def test_the_island_holds_the_panels(page):
    text = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.S)[1]
    data = json.loads(text)
    assert data["steps"] == [0, 10, 100]
    assert data["runs"] == [{"name": EVIL, "group": EVIL, "start": "at birth", "tokens": {"0": 0, "10": 2000}}]
    curve, heads = data["panels"]["curve"]["series"]
    assert curve == {"axes": [["step", [0, 10, 100]]], "v": [1, None, 3], "run": 0, "name": EVIL}
    assert heads["v"] == list(range(12))
    assert data["panels"]["rank"]["lists"][2]["rows"] == [["1", EVIL, "2.0"]]


def test_half_a_character_and_separators_of_lines_are_data():
    panel = CurvePanel("x", "\ud800\u2028", [Series(np.ones(2), {"step": [0, 1]})])
    text = island([panel], [])
    assert "\u2028" not in text
    assert json.loads(text.encode().decode())["panels"]["x"]["title"] == "\ud800\u2028"


def test_stills_say_what_the_panel_holds():
    curve, heat, ranking, matrix, scatter = map(still, one_of_each())
    assert curve.count('class="l"') == 1  # blocks and heads wait for the reader's choice
    assert re.findall(r">([\d.]+)</td>", heat) == ["8.00", "9.00", "10", "11"]
    assert ranking.count("<caption>") == 2  # birth and the last step
    assert re.findall(r"([\d.]+)%,var\(--paper\)", matrix) == ["89", "6", "90"]  # z 38, a stranger's z 1, z -40
    assert scatter.count('<path class="mark"') == 1


def test_a_panel_without_numbers_says_so():
    nothing = [CurvePanel("a", "a", []), HeatmapPanel("b", "b", []), ScatterPanel("c", "c", [], "x", "y")]
    assert all("Nothing to draw yet" in still(panel) for panel in nothing)


def test_numbers_are_rounded_once_and_shapes_must_fit():
    assert [rounded(v) for v in (0.123456, 123456.7, 2.0, np.inf, np.float32(0.1))] == [0.1235, 123500, 2, None, 0.1]
    with pytest.raises(ValueError, match=r"shape \(2,\), axes of \(3,\)"):
        Series(np.ones(2), {"step": [0, 1, 2]})
    twice = [Panels([CurvePanel("a", "a", []), CurvePanel("a", "b", [])])]
    with pytest.raises(ValueError, match="two panels of one page are called a"):
        render_page("page", twice)


def test_scales_by_hand():
    assert Scale(0, 10).share(2.5) == 0.25
    assert Scale(0.01, 100, log=True).share(1) == 0.5
    assert np.isnan(Scale(0.01, 100, log=True).share(0))
    assert Scale(0, 1).ticks() == [0, 0.5, 1]
    assert Scale(1, 1000, log=True).ticks() == [1, 10, 100, 1000]
    assert fitting_scale([2, 10]).low == 0
    assert fitting_scale([9, 10]).low == pytest.approx(8.95)
    assert fitting_scale([np.nan]) == Scale(0, 1)
    huge = fitting_scale([1e308, -1e308, 5.0, 6.0])  # whose difference is no float
    assert huge == fitting_scale([5.0, 6.0])
    assert np.isnan(huge.share(1e308))
    assert fitting_scale([5e-324, 1e308, 2.0], log=True).ticks() == [1, 2, 3, 4]


def test_where_everything_is_zero_the_axis_is_linear_and_begins_with_it():
    assert fitting_scale([0.0, 0.0], log=True).ticks() == [0, 1, 2, 3, 4]
    zeros = Series(np.zeros(3), {"step": [0, 1, 2]}, 0)
    level = Series(np.full(3, 0.5), {"step": [0, 1, 2]}, None, "level", "control")
    for series in ([zeros], [zeros, level]):
        (line, *_) = re.findall(r'<path class="l" d="([^"]*)"', still(CurvePanel("a", "a", series, log=True)))
        assert len(re.findall(r"[ML][\d.]+ [\d.]+", line)) == 3


def test_a_small_curve_has_each_step_at_its_place():
    places = re.findall(r"[ML]([\d.]+) ", sparkline([1.0, 2.0, 3.0, 4.0], steps=[0, 1, 2, 100]))
    assert np.allclose([float(x) for x in places], 2 + 96 * np.array([0, 1, 2, 100]) / 100, atol=0.051)
    log = re.findall(r"[ML]([\d.]+) ", sparkline([1.0, 2.0, 3.0, 4.0], steps=[0, 1, 2, 100], is_log=True))
    assert np.allclose([float(x) for x in log], 2 + 96 * np.arcsinh([0, 1, 2, 100]) / np.arcsinh(100), atol=0.051)
    even = re.findall(r"[ML]([\d.]+) ", sparkline([1.0, 2.0, 3.0]))
    assert [float(x) for x in even] == [2.0, 50.0, 98.0]


def test_small_curves_and_bands_break_where_there_is_no_number():
    nan = float("nan")
    assert 'd="M2.0 22.0h0M' in sparkline([1.0, nan, 4.0, 3.0])  # a point alone is a dot
    small = sparkline([1.0, 2.0, nan, 4.0, 3.0], [nan, 1.0, nan, 1.0, 1.0])
    subpaths = [[part.count("L") for part in d.split("M")[1:]] for d in re.findall(r'd="([^"]+)"', small)]
    assert subpaths == [[0, 1], [1, 1]]  # the control first
    assert sparkline([1.0, nan, nan]) == ""
    band = Series(np.array([0.1, 0.2, nan, 0.3, 0.4, 0.5]), {"step": range(6)}, 0, "stranger", "band")
    line = Series(np.zeros(6), {"step": range(6)}, 0)
    (d,) = re.findall(r'<path d="([^"]+)" fill="var\(--muted\)"', still(CurvePanel("a", "a", [line, band])))
    assert [len(re.findall("[ML]", part)) for part in d.split("Z")] == [4, 6, 0]
    shares = [{float(x) for x in re.findall(r"[ML]([\d.]+) ", part)} for part in d.split("Z")[:2]]
    assert max(shares[0]) < min(shares[1])


@pytest.mark.parametrize("n_blocks", [1, 2, 5])
def test_headings_of_small_panels_stand_inside_the_picture_above_their_grid(n_blocks):
    heads = [Series(np.ones((2, 3)), {"head": [0, 1], "step": range(3)}, facet=f"block {i}") for i in range(n_blocks)]
    picture = still(CurvePanel("a", "a", heads))
    tops = [float(y) for y in re.findall(r'class="name" x="[^"]*" y="([^"]*)"', picture)]
    assert len(tops) == n_blocks
    letters = 10  # the height of a line of them
    assert min(tops) >= letters
    lines = [float(y) for y in re.findall(r'class="g"[^>]* y1="([^"]*)"', picture)]
    assert min(tops) < min(lines)


def test_axes_have_titles():
    for x, log, title in (("step", True, "optimizer steps, log scale"), ("layer", False, "block")):
        panel = CurvePanel("p", "P", [Series(np.array([1.0, 2.0]), {x: [1, 2]})], x, x_log=log)
        assert f">{title}</text>" in still(panel)
        assert title.startswith(panel.to_json()["xname"])


@pytest.mark.parametrize(
    ("groups", "roles", "colours"),
    [
        ("aabb", "    ", [0, 1, 2, 3]),
        ("aaaabbbb", "        ", [0, 0, 0, 0, 1, 1, 1, 1]),
        ("aab bcccc", "         ", [0, 0, 1, 2, 1, 3, 3, 3, 3]),
        ("aabbccddeeffgg", "f     w      b", [0, *[None] * 5, 1, *[None] * 6, 2]),
        ("       ", "fb w   ", [0, 1, None, 2, None, None, None]),
    ],
)
def test_groups_of_seeds_have_colours_while_there_are_enough(groups, roles, colours):
    words = {"f": "first", "b": "best", "w": "worst"}
    values = [{"b": 1.0, "w": 9.0}.get(role, 5.0) for role in roles]
    groups = [group.strip() for group in groups]
    found = roles_of(values, groups)
    assert found == [words.get(role, "") for role in roles]
    runs = [PageRun(f"run-{i}", group, role=role) for i, (group, role) in enumerate(zip(groups, found, strict=True))]
    assert colours_of(runs) == colours


# ── still pictures of several runs ───────────────────────────────────────────────────────────────────────────────────


def strokes_of(picture):
    """Stroke and opacity of every line of a still picture, from below to above."""
    found = re.findall(r'<path class="l" [^>]*stroke="([^"]+)"([^>]*)/>', picture)
    return [(colour, re.findall(r'opacity="([^"]+)"', rest)) for colour, rest in found]


def keys_in(picture):
    """Name and colour of every key of a still picture."""
    return {name: colour for colour, name in re.findall(r'style="--c:([^";]+)[^"]*"></i>([^<]+)<', picture)}


def of_many(n_runs):
    """A panel with a line, a band and a level of each run."""
    x = {"step": [0, 10]}
    parts = [("", "solid", 1.0), ("stranger", "band", 0.1), ("uniform", "control", 0.0)]
    return CurvePanel(
        "a", "a", [Series(np.array([0.5, i * by + 0.5]), x, i, *p) for i in range(n_runs) for *p, by in parts]
    )


def test_a_still_of_many_runs_has_one_band_and_faint_lines_below_those_with_names():
    roles = dict(zip((1, 4, 7), ("first", "best", "worst"), strict=True))
    picture = still(of_many(8), runs=[PageRun(f"run-{i}", role=roles.get(i, "")) for i in range(8)])
    assert picture.count('Z"') == 1
    (band,) = re.findall(r'd="M([^"]+)Z"', picture)
    heights = [float(point.split()[1]) for point in band.split("L")]
    zero = (heights[0] + heights[3]) / 2  # the least band is 0.5, the widest 1.2
    assert (heights[2] - zero) / (heights[3] - zero) == pytest.approx(1.2 / 0.5, abs=0.02)
    *others, first, best, worst = [line for line in strokes_of(picture) if line[0] != "var(--muted)" or line[1]]
    assert others == [("var(--muted)", [".45"])] * 5
    assert [first, best, worst] == [(f"var(--run-{i})", []) for i in range(3)]
    assert len(strokes_of(picture)) == 8 + 1
    named = {f"run-{run} ({role})": f"var(--run-{i})" for i, (run, role) in enumerate(roles.items())}
    assert keys_in(picture) == {**dict.fromkeys(["other runs", "stranger", "uniform"], "var(--muted)"), **named}


def test_a_still_names_groups_of_seeds_that_have_colours():
    picture = still(of_many(8), runs=[PageRun(f"{i}", "ab"[i % 2]) for i in range(8)])
    assert keys_in(picture) == {
        "a": "var(--run-0)", "b": "var(--run-1)", "stranger": "var(--muted)", "uniform": "var(--muted)",
    }  # fmt: skip


def test_keys_of_looks_of_several_runs_are_in_ink():
    x, looks = {"step": [0, 1]}, ("solid", "dashed")
    lines = [Series(np.array([1.0, i]), x, i, look, look) for i in range(3) for look in looks]
    panel = CurvePanel("a", "a", [*lines, Series(np.ones(2), x, 2, "of one", "dotted")])
    runs = [PageRun(name) for name in "abc"]
    ink = dict.fromkeys(looks, "var(--ink)")
    assert keys_in(still(panel, runs=runs)) == ink | {"of one": "var(--run-2)"}
    assert set(keys_in(still(CurvePanel("a", "a", lines[:2]), runs=runs[:1])).values()) == {"var(--run-0)"}


def test_lists_of_several_runs_have_their_names_and_are_few():
    rankings = [Ranking(run, step, [["1", "a", "2.0"]]) for run in range(4) for step in (0, 5, 10)]
    panel = RankingPanel("rank", "", ["", "token", "p"], rankings, texts=[1])
    picture = still(panel, runs=[PageRun(f"run-{i}") for i in range(4)])
    captions = [f"run-{run}, {when}" for run in range(3) for when in ("at birth", "step 10")]
    assert re.findall("<caption>(.*?)<", picture) == captions
    assert "Shown: 3 of 4 runs." in picture
    alone = still(RankingPanel("rank", "", ["", "token", "p"], rankings[:3]), runs=[PageRun("run-0")])
    assert re.findall("<caption>(.*?)<", alone) == ["at birth", "step 10"]
    assert "Shown" not in alone


@pytest.mark.parametrize(("run", "place"), [(4, 1), (5, 3)])
def test_a_still_of_one_of_many_runs_has_its_colour(run, place):
    roles = dict(zip((1, 4, 7), ("first", "best", "worst"), strict=True))
    runs = [PageRun(f"run-{i}", role=roles.get(i, "")) for i in range(8)]
    line = Series(np.array([1.0, 2]), {"step": [0, 1]}, run)
    assert strokes_of(still(CurvePanel("a", "a", [line]), runs=runs)) == [(f"var(--run-{place})", [])]
    heads = Series(np.ones((2, 1, 2)), {"step": [0, 1], "layer": [1], "head": [0, 1]}, run, facet="layer")
    assert {colour for colour, _ in strokes_of(still(CurvePanel("a", "a", [heads]), runs=runs))} == {
        f"var(--run-{place})"
    }
    tokens = Series(np.array([[1.0, 2]]), {"text": ["a"], "step": [0, 1]}, run)
    assert strokes_of(still(CurvePanel("a", "a", [tokens]), runs=runs)) == [(f"var(--run-{place})", [])]
