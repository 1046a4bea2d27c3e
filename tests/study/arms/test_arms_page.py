"""The page of a study of arms: sentences that the figures bear out, every arm in it, and a browser that draws it."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from birthmark.files import write_text
from birthmark.report.charts.specs import MARKS
from birthmark.report.pictures.style import RUN_COLOURS
from birthmark.study.arms.figure import study_figure
from birthmark.study.arms.page import arms_page, outcome, table_of
from birthmark.study.arms.results import SCALARS, ArmResult, spread

UNIFORM = 0.06


def arm(name, sinks, losses):
    """An arm whose seeds end with these sink masses and losses."""
    course = np.array([[UNIFORM, (UNIFORM + sink) / 2, sink] for sink in sinks])
    figures = {key: spread([]) for key in SCALARS} | {"sink_mass": spread(sinks), "val_loss": spread(losses)}
    return ArmResult(name, len(sinks), 20, figures, UNIFORM, [0, 10, 20], course, list(range(len(sinks))))


def study_of(results, families=None, n_seeds=2):
    arms = {result.arm: {} for result in results}
    return SimpleNamespace(name="sinks", arms=arms, families=families or {}, init_seeds=[*range(n_seeds)])


def test_arms_are_told_apart_by_sink_and_loss():
    results = [
        arm("plain", [0.8, 0.7], [1.0, 1.02]),
        arm("headnorm", [0.001, 0.02], [1.0, 1.03]),
        arm("identity", [0.0, 0.0], [1.4, 1.0]),
        arm("torn", [0.8, 0.01], [1.0, 1.0]),
        arm("unknown", [0.0, 0.0], []),
        arm("diverged", [0.0, 0.0], [1.0, float("nan")]),
        arm("worse", [0.0, 0.0], [1.4, float("nan")]),
    ]
    assert outcome(study_of(results), results) == [
        "With a sink in every seed: plain.",
        "Without a sink, and within 0.05 nats of the loss of plain: headnorm.",
        "Without a sink, but not within 0.05 nats of the loss of plain: identity, worse.",
        "Without a sink; their loss cannot be compared: unknown, diverged.",
        "In between, or not the same in every seed: torn.",
        "A sink is at least 3 times the uniform share of attention on the first position at the end, none is less than "
        "2 times. Seeds of an arm: 2.",
    ]
    assert outcome(study_of(results), [])[0].startswith("No arm has a sink mass yet")


def test_an_arm_underway_is_not_judged_beside_finished_ones():
    """Whoever has trained less has less of a sink, and a higher loss, for that reason alone."""
    done = [arm("plain", [0.8, 0.7], [1.0, 1.02]), arm("headnorm", [0.001, 0.02], [1.0, 1.03])]
    begun = replace(arm("sigmoid", [0.001], [5.0]), step=10, steps=[0, 10], is_finished=False)
    begun = replace(begun, sinks=begun.sinks[:, :2])
    said = outcome(study_of([*done, begun]), [*done, begun])
    assert said[1:3] == [
        "Without a sink, and within 0.05 nats of the loss of plain: headnorm.",
        "Without a finished run, and not judged: sigmoid (step 10).",
    ]
    assert not any("sigmoid" in sentence for sentence in said[:2])
    assert "Without a finished run, and judged at this step: sigmoid (step 10)." in outcome(study_of([begun]), [begun])
    # The first arm underway is no measure of the others' loss.
    first = replace(begun, arm="plain")
    assert outcome(study_of([first, done[1]]), [first, done[1]])[:2] == [
        "Without a sink; their loss cannot be compared: headnorm.",
        "Without a finished run, and not judged: plain (step 10).",
    ]


def test_a_sink_of_an_earlier_step_is_not_that_of_the_end():
    torn = arm("torn", [0.8, 0.7], [1.0, 1.0])
    torn = replace(torn, steps=[0, 10], sinks=torn.sinks[:, :2])  # at step 20 a seed has no number
    results = [arm("plain", [0.8, 0.7], [1.0, 1.0]), torn]
    assert torn.sink.n == 0
    assert "Sink mass at the end not known: torn." in outcome(study_of(results), results)


def test_the_first_arm_stays_within_the_axes_of_the_figure():
    results = [arm("plain", [0.28, 0.25], [1.0, 1.0]), arm("headnorm", [0.001, 0.02], [1.0, 1.0])]
    above = study_figure(study_of(results), results).axes[0]
    low, high = above.get_ylim()
    assert low <= 0
    assert high >= 0.28


def test_figures_of_some_seeds_say_of_how_many():
    result = arm("plain", [0.8, 0.7, 0.6], [1.0, float("nan"), 3.0])
    table = table_of(study_of([result]), [result])
    shown = {column.key: cell for column, cell in zip(table.columns, table.rows[0], strict=True)}
    assert shown["val_loss"] == "2.000 ± 1.414 (1.000–3.000), 2 of 3"
    assert shown["sink_mass"] == "0.700 ± 0.100 (0.600–0.800)"


def test_an_arm_that_has_learned_nothing_is_no_measure_of_others():
    def look(name, sinks, triggers, at_birth=5.56):
        found = arm(name, sinks, [2.0])
        found.figures.update(trigger_loss=spread(triggers), trigger_loss_birth=spread([at_birth]))
        return found

    early = [look("plain", [0.06], [5.36]), look("headnorm", [0.05], [5.3]), look("quick", [0.05], [0.05])]
    told, *said, _ = outcome(study_of(early), early)
    assert told.startswith("plain has not learned: its loss on triggers is 5.36 nats, 5.56 at birth.")
    assert said == ["Without a sink so far: plain, headnorm, quick.", "Learned: quick."]
    late = [look("plain", [0.8], [0.405]), look("headnorm", [0.0], [0.41]), look("failed", [0.0], [1.2])]
    assert outcome(study_of(late), late)[1:3] == [
        "Without a sink, and within 0.05 nats of the loss of plain: headnorm.",
        "Without a sink, but not within 0.05 nats of the loss of plain: failed.",
    ]
    assert [r.learned("trigger_loss") for r in late] == [True, True, False]
    # Of text, token frequencies are what has to be beaten; without them, the loss at birth.
    text = arm("plain", [0.8], [4.2])
    assert text.learned("val_loss") is None
    text.figures["val_loss_birth"] = spread([8.0])
    assert text.learned("val_loss")
    text.figures["unigram_entropy"] = spread([4.22])
    assert text.learned("val_loss") is False
    # A seed without a finite loss has not learned.
    for losses, learned in (([3.0, 3.0], True), ([3.0, float("nan")], None), ([5.0, float("inf")], False)):
        text = arm("plain", [0.8, 0.8], losses)
        text.figures["unigram_entropy"] = spread([4.22])
        assert text.learned("val_loss") is learned


@given(st.lists(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 5)), min_size=1, max_size=3), min_size=1, max_size=5))
def test_every_seed_bears_out_the_sentence_on_its_arm(seeds):
    results = [arm(f"arm{i}", [s for s, _ in found], [x for _, x in found]) for i, found in enumerate(seeds)]
    *said, rests_on = outcome(study_of(results), results)
    where = {name: sentence for sentence in said for name in re.findall(r"arm\d", sentence.split(": ", 1)[1])}
    assert set(where) == {r.arm for r in results}
    reference = np.mean([x for _, x in seeds[0]])
    for i, found in enumerate(seeds):
        words = where[f"arm{i}"]
        assert words.startswith("With a sink") == all(s >= 3 * UNIFORM for s, _ in found)
        assert words.startswith("Without a sink") == all(s < 2 * UNIFORM for s, _ in found)
        if words.startswith("Without a sink, and"):
            assert all(x <= reference + 0.05 + 1e-9 for _, x in found)
    assert ("may be chance" in rests_on) == (min(map(len, seeds)) == 1)


@pytest.fixture
def page(tmp_path):
    """A page of nine arms in two families, some at one place; one is called what must not become markup."""
    names = ["plain", "<b>bold</b>", *(f"arm-{i}" for i in range(7))]
    results = [arm(name, [0.9 - 0.1 * i, 0.88 - 0.1 * i], [1 + i % 2, 1.1 + i % 2]) for i, name in enumerate(names)]
    families = {"one family": names[1:5], "another": names[5:]}
    out = tmp_path / "index.html"
    write_text(out, arms_page(study_of(results, families), results, [], tmp_path))
    return out, names


def test_every_arm_is_in_the_page_and_none_is_markup(page):
    out, names = page
    text = out.read_text()
    assert "<b>" not in text
    assert "&lt;b&gt;bold&lt;/b&gt;" in text
    assert all(name in text for name in names if "<" not in name)


def test_ten_families_are_told_apart_by_their_points(tmp_path):
    results = [arm(f"arm-{i}", [0.05 * i, 0.05 * i], [1 + i, 1 + i]) for i in range(11)]
    families = {f"family {i}": [f"arm-{i}"] for i in range(1, 11)}
    text = arms_page(study_of(results, families), results, [], tmp_path)
    keys = re.findall(r'<span><svg [^>]*><path d="([^"]+)" fill="var\(--ink\)"/></svg>([^<]+)<', text)
    points = {name: d for d, name in re.findall(r'<path class="mark" d="([^"]+)"[^>]*data-tip="(.+)', text)}
    assert len({d for d, _ in keys}) == len(keys) == 10
    assert len(points) == 11
    for d, title in keys:
        assert points[title.replace("family ", "arm-")] == d


@pytest.mark.parametrize(
    ("name", "titles"), [("", ["arms 1 to 4", "arms 5 to 8"]), ("one", ["one, 1 to 4", "one, 5 to 8"])]
)
def test_parts_of_a_large_family_have_one_marker_and_say_which_arms_they_hold(tmp_path, name, titles):
    results = [arm(f"arm-{i}", [0.05 * i, 0.06 * i], [1 + i, 1.5 + i]) for i in range(10 if name else 9)]
    study = study_of(results, {name: [f"arm-{i}" for i in range(1, 9)]} if name else None)
    page = arms_page(study, results, [], tmp_path)
    points = {n: d for d, n in re.findall(r'<path class="mark" d="([^"]+)"[^>]*data-tip="(arm-\d)', page)}
    assert len({points[f"arm-{i}"] for i in range(1, 9)}) == 1
    keys = re.findall(r'<span><svg [^>]*><path d="([^"]+)" fill="var\(--ink\)"/></svg>([^<]+)<', page)
    assert keys == ([(points["arm-1"], "one"), (points["arm-9"], "other arms")] if name else [])
    data = json.loads(re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.S)[1])
    others = ["other arms"] if name else []
    assert [p["title"] for p in data["panels"].values() if p["kind"] == "curves"] == titles + others
    figure = study_figure(study, results)
    assert [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()][: len(titles)] == titles


def test_an_arm_has_one_colour_and_marker_in_figure_scatter_and_curves(tmp_path):
    results = [arm(f"arm-{i}", [0.05 * i, 0.06 * i], [1 + i, 1.5 + i]) for i in range(9)]
    for result in results:
        result.figures.update({f"variance_discrepancy_{at}.1": spread([1.0, 2.0]) for at in ("birth", "end")})
    study = study_of(results, {"one": ["arm-1", "arm-2"], "two": [f"arm-{i}" for i in range(3, 9)]})
    page = arms_page(study, results, [], tmp_path)
    point = r'<path class="mark" d="([^"]+)"[^>]*fill="var\(--run-(\d)\)" data-tip="(arm-\d)'
    in_scatter = {name: (int(colour), d) for d, colour, name in re.findall(point, page)}
    data = json.loads(re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.S)[1])
    series = [s for p in data["panels"].values() if p["kind"] == "curves" for s in p["series"] if "run" in s]
    in_curves = {(s["name"], s["colour"]) for s in series}
    assert {name: colour for name, (colour, _) in in_scatter.items()} == dict(in_curves)
    assert len(in_curves) == 9
    # A line for each seed, which the page gathers by arm.
    assert [data["runs"][s["run"]]["group"] for s in series] == [s["name"] for s in series]
    figure = study_figure(study, results)
    drawn = {}
    rows = dict(zip((t.get_text() for t in figure.axes[-3].get_yticklabels()), range(9), strict=True))
    for axes in figure.axes[-3:-1]:
        for line in axes.lines:
            if line.get_marker() not in ("None", "") and len(line.get_ydata()) == 1:
                drawn.setdefault(line.get_ydata()[0], set()).add((line.get_color(), MARKS[line.get_marker()]))
    for name, (colour, d) in in_scatter.items():
        assert drawn[rows[name]] == {(RUN_COLOURS[colour], d)}
    # Bars are ranges of different things.
    assert [a.get_xlabel().split("range ")[1] for a in figure.axes[-3:]] == ["over seeds", "over seeds", "over blocks"]


@pytest.mark.heavy
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (420, "dark")])
def test_a_browser_draws_it(open_page, page, width, scheme):
    out, names = page
    tab = open_page(out, width=width, color_scheme=scheme)
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run("document.querySelectorAll('.panel.alive canvas').length") == 2
    assert tab.run("document.querySelectorAll('#panel-arms path.mark').length") == len(names)
    # Where it is narrow, a list with the same names and numbers stands in place of the scatter.
    listed = tab.page.locator("#panel-arms table.points")
    assert listed.is_visible() == (width < 500) != tab.page.locator("#panel-arms svg.scatter").is_visible()
    if width < 500:
        rows = [row.split("\t") for row in listed.inner_text().split("\n") if row.strip()]
        assert sorted(cell for row in rows for cell in row if cell in names) == sorted(names)
        assert "0.890" in listed.inner_text()
        return
    # No name lies on another.
    boxes = tab.run("[...document.querySelectorAll('#panel-arms text.name')].map(e => {"
                    "const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]})")  # fmt: skip
    assert len(boxes) == len(names)
    for i, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[:i]:
            assert right < other[0] or other[2] < left or bottom - 4 < other[1] or other[3] - 4 < top
    tab.page.hover("#panel-arms path.mark >> nth=3")
    assert names[3] in tab.text(".tip")
    # Each line of a panel has the colour that its key has.
    colours = "all => all.map(e => getComputedStyle(e).borderTopColor)"
    keys = tab.page.locator("#panel-family-0 .keys i").evaluate_all(colours)
    assert len(set(keys)) == 1 + 4 + 1
    assert "band: least to largest of the seeds" in tab.text("#panel-family-0 .keys")
    # Hovering names each arm once, before its seeds.
    over = tab.page.locator("#panel-family-1 .u-over")
    over.hover(position={"x": over.bounding_box()["width"] - 3, "y": 20})
    told = [text.removesuffix(", mean of 2 seeds") for text in tab.page.locator(".tip .row span").all_inner_texts()]
    assert [told.count(name) for name in ("plain", *names[5:])] == [1] * 5


def test_an_arm_of_a_family_is_drawn_without_the_first_arm(tmp_path, open_page):
    result = arm("late", [0.9, 0.8], [1.0, 1.1])
    study = study_of([arm("plain", [0.1], [1.0]), result], {"one family": ["late"]})
    out = tmp_path / "index.html"
    write_text(out, arms_page(study, [result], [], tmp_path))
    assert open_page(out).run("document.querySelectorAll('.panel.alive canvas').length") == 1
