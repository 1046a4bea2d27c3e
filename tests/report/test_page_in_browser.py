"""The page of runs as a reader uses it, in a real browser: hover, scrub, choose, print, read without script."""

import json
import shutil
from itertools import groupby, pairwise

import numpy as np
import pytest
from pages import values

from birthmark.files import read_json, write_json, write_text
from birthmark.measure.metrics_log import append_metrics
from birthmark.report.charts.chart_page import Controls, PageRun, Panels, render_page
from birthmark.report.charts.lines import end_of_path, paths_of
from birthmark.report.charts.specs import CurvePanel, Series
from birthmark.report.run_page import build_report, summarise

pytestmark = pytest.mark.heavy

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
TOOLTIP = ".tip:not([hidden])"


def write_report(runs, folder):
    build_report(runs, folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def one(tmp_path_factory, make_run):
    """A run of four snapshots, and its page."""
    folder = tmp_path_factory.mktemp("one")
    run = make_run(folder / "run", steps=(0, 10, 20, 30))
    return run, write_report([run], folder)


@pytest.fixture(scope="module")
def several(tmp_path_factory, make_run):
    """Two configs: two seeds of the first, one of the second, whose name is an attack; and their page."""
    folder = tmp_path_factory.mktemp("several")
    names = ("plain", "plain-1", "other <b onmouseover=alert(3)>")
    runs = [make_run(folder / name, seed=seed, steps=(0, 10, 20)) for seed, name in enumerate(names)]
    for run, seed, mlp in zip(runs, (0, 1, 0), ("gelu", "gelu", "relu"), strict=True):
        write_json(run.birth, read_json(run.birth) | {"init_seed": seed})
        write_text(run.config, f"name: {run.path.name!r}\ninit_seed: {seed}\nmodel: {{mlp: {mlp}}}\n")
    return runs, write_report(runs, folder)


def hover(tab, panel, share):
    """Move the mouse over a panel's plot, so far from its left; what the tooltip says."""
    over = tab.page.locator(f"#panel-{panel} .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    tab.page.mouse.move(box["x"] + 2, box["y"] + 20)
    tab.page.mouse.move(box["x"] + min(max(share * box["width"], 1), box["width"] - 1), box["y"] + box["height"] / 2)
    return tab.text(TOOLTIP).split("\n")


def scrub(tab, place):
    """Put the scrubber on its ``place``-th step."""
    move = "(bar, place) => { bar.value = place; bar.dispatchEvent(new Event('input')); }"
    tab.page.locator("#scrub").evaluate(move, place)


def view(tab):
    """The choices that the address holds."""
    text = tab.run("() => location.hash.slice(1)")
    return dict(part.split("=", 1) for part in text.split("&")) if text else {}


def tokens(tab):
    return tab.page.locator("#panel-tokens .live td.text").all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_in_the_readers_colours_without_a_word_in_the_console_and_fetches_nothing(one, open_page, scheme):
    tab = open_page(one[1], color_scheme=scheme)
    assert tab.page.locator("figure.panel canvas").count() >= 4
    assert len(tab.asked) == 1
    ground = tab.run("() => getComputedStyle(document.documentElement).backgroundColor")
    assert ground == {"light": "rgb(254, 254, 254)", "dark": "rgb(22, 25, 29)"}[scheme]
    ink = tab.run("() => charts.runColour(0)")
    assert ink == {"light": "#0072b2", "dark": "#5fb0ea"}[scheme]


def test_a_page_of_one_run_is_short_and_fits_a_phone(one, open_page):
    assert open_page(one[1]).run("() => document.documentElement.scrollHeight") <= 2500
    phone = open_page(one[1], width=420)
    assert phone.run("() => document.documentElement.scrollWidth") == 420
    phone.run("() => document.querySelectorAll('details').forEach(d => d.open = true)")
    assert phone.run("() => document.documentElement.scrollWidth") == 420


def test_hovering_says_what_the_csv_holds(one, open_page):
    page = one[1]
    tab = open_page(page)
    for share, step in ((0, 0), (1, 30)):
        at, *rows = hover(tab, "alignment", share)
        assert at == f"step {step}"
        (value,) = values(page.parent, "direction-alignment.csv", step=step, quantity="bias/alignment")
        shown = [float(row) for row in rows if row.replace(".", "", 1).replace("-", "", 1).isdigit()]
        assert float(f"{value:.4g}") in shown
    # The cursor of one panel is that of all: no tooltip stands where the mouse is not.
    assert tab.page.locator(TOOLTIP).count() == 1


def test_scrubbing_moves_maps_lines_and_the_ranking(one, open_page):
    run, page = one
    tab = open_page(page)
    snapshots = run.snapshots()
    for place in (0, 2):
        scrub(tab, place)
        snapshot = snapshots[place]
        expected = [token["text"] for token in snapshot.summary["top_tokens"][:10]]
        assert [text.strip() for text in tokens(tab)] == [printed(text).strip() for text in expected]
        cells = tab.page.locator("#panel-sink-heads .live td").evaluate_all("all => all.map(c => c.dataset.tip)")
        wanted = [float(f"{v:.4g}") for v in snapshot.arrays["sink_mass"].ravel()]
        assert [float(tip.rpartition(": ")[2]) for tip in cells] == wanted
        assert f"{snapshot.step}" in tab.text("#step")
        position = hover(tab, "variance-positions", 0)
        assert position[0] == "position 0"
        seen = [float(line) for line in position[1:] if line.replace(".", "", 1).isdigit()]
        first = snapshot.arrays["positional_variance"][:, :, 0].mean(1)
        assert sorted(seen) == sorted(float(f"{v:.4g}") for v in first)


def test_a_map_of_many_blocks_is_one_picture_that_answers_the_mouse(make_run, open_page, tmp_path):
    run = make_run(tmp_path / "run", steps=(0, 10), n_layers=20, n_heads=14)
    tab = open_page(write_report([run], tmp_path))
    canvas = tab.page.locator("#panel-sink-heads .live canvas")
    assert canvas.evaluate("c => [c.width, c.height]") == [14, 20]
    assert tab.page.locator("#panel-sink-heads .live td").count() == 0
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    values = run.snapshots()[-1].arrays["sink_mass"]
    for layer, head in ((0, 0), (7, 11), (19, 13)):
        tab.page.mouse.move(box["x"] + (head + 0.4) / 14 * box["width"], box["y"] + (layer + 0.4) / 20 * box["height"])
        assert tab.text(TOOLTIP) == f"block {layer + 1}, head {head}: {float(f'{values[layer, head]:.4g}'):g}"
    # Lines of twenty blocks have a scale in place of twenty names.
    keys = tab.page.locator("#panel-sink-importance .live .keys")
    assert keys.inner_text().split() == ["block", "1", "20"]
    tab.page.locator("#choose-block").select_option("8")
    mark = tab.page.locator("#panel-sink-heads .live .chosen").bounding_box()
    box = canvas.bounding_box()
    assert mark["y"] - box["y"] == pytest.approx(7 / 20 * box["height"], abs=1)
    assert mark["height"] == pytest.approx(box["height"] / 20, abs=1)


def printed(text):
    shown = text.replace("\u202e", "\\u202e")
    return shown if len(shown) <= 24 else shown[:23] + "…"


def test_a_link_keeps_the_view(one, open_page):
    tab = open_page(one[1])
    scrub(tab, 1)
    tab.page.select_option("#choose-block", "2")
    tab.page.select_option("#choose-head", "1")
    tab.page.click("#panel-sink-mass .ylog")
    assert view(tab) == {"step": "10", "block": "2", "head": "1", "ylog": "sink-mass"}
    again = open_page(one[1], tab.run("() => location.hash"))
    assert again.page.input_value("#scrub") == "1"
    rows = hover(again, "sink-mass", 1)
    assert again.page.get_attribute("#panel-sink-mass .ylog", "aria-pressed") == "true"
    expected = one[0].snapshots()[-1].arrays["sink_mass"][1, 1]
    assert f"{float(f'{expected:.4g}')}" in rows
    assert any("block 2" in row or "head 1" in row or row == "Sink mass" for row in rows)
    again.page.click("#reset")
    assert view(again) == {}
    assert again.page.input_value("#choose-block") == ""


@pytest.mark.parametrize("fragment", ["#%", "#step=x&zoom=9,1&focus=7&hide=a&x=sideways&ylog=none", "#nowhere"])
def test_a_damaged_address_shows_the_whole_view(one, open_page, fragment):
    tab = open_page(one[1], fragment)
    assert tab.page.input_value("#scrub") == "3"
    assert hover(tab, "alignment", 1)[0] == "step 30"


def test_dragging_zooms_all_panels_over_steps_and_a_double_click_ends_it(one, open_page):
    tab = open_page(one[1])
    box = tab.page.locator("#panel-alignment .u-over").bounding_box()
    tab.page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 50)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 60, steps=4)
    tab.page.mouse.up()
    low, high = map(float, view(tab)["zoom"].split(","))
    assert (low, high) == (pytest.approx(12, abs=0.5), pytest.approx(27, abs=0.5))
    tab.page.locator("#panel-persistence-ranks .u-over").dblclick()
    assert "zoom" not in view(tab)


def test_links_open_what_they_lead_to(one, open_page):
    tab = open_page(one[1], "#sink")
    assert tab.page.locator("#sink > details").get_attribute("open") is not None
    tab.page.click('nav a[href="#aggregation"]')
    assert tab.page.locator("#aggregation figure").first.is_visible()
    assert view(tab) == {"at": "aggregation"}


def test_runs_are_chosen_and_seeds_of_one_config_are_a_band(several, open_page):
    runs, page = several
    tab = open_page(page)
    _, *rows = hover(tab, "alignment", 1)
    values = [run.snapshots()[-1].bias["alignment"] for run in runs]
    assert {f"{float(f'{v:.4g}')}" for v in values} <= set(rows)
    assert any("mean of 2 seeds" in row for row in rows)
    # Lines of one group that differ in their looks have keys for both.
    hover(tab, "loss-live", 1)
    keys = tab.page.locator("#panel-loss-live .live .keys span").all_inner_texts()
    assert {"validation", "train"} <= set(keys)
    tab.page.click('.chips [data-run="1"]')
    assert view(tab)["hide"] == "1"
    _, *rows = hover(tab, "alignment", 1)
    assert f"{float(f'{values[1]:.4g}')}" not in rows
    assert not any("mean of" in row for row in rows)
    tab.page.select_option("#choose-focus", "2")
    ratios = "#panel-tokens .live td:nth-child(3)"
    shown = [t.page.locator(ratios).all_inner_texts() for t in (tab, open_page(page, "#focus=2"), open_page(page))]
    assert shown[0] == shown[1] != shown[2]
    assert tab.text("#panel-tokens .when").startswith("other <b onmouseover=alert(3)>")


def test_a_table_says_where_configs_differ_and_pairs_what_that_makes(several, open_page):
    runs, page = several
    tab = open_page(page)
    table = tab.page.locator("table").first
    assert table.locator("th").all_inner_texts() == ["run", "init_seed", "model.mlp"]
    assert table.locator("tbody tr").last.locator("td").all_inner_texts()[1:] == ["0", "relu"]
    rows = {row[0]: row for row in (r.split("\t") for r in tab.text("#pairs table").split("\n"))}
    a, b = (run.snapshots()[-1].bias["alignment"] for run in (runs[0], runs[2]))
    _, first, second, apart = rows["alignment"]
    assert [float(first), float(second), float(apart)] == pytest.approx([a, b, b - a], abs=6e-4)
    assert "one pair cannot tell" in tab.text("p.lede")


def test_nothing_that_a_run_or_a_token_is_called_runs(tmp_path, make_run, open_page):
    run = make_run(tmp_path / EVIL.replace("/", "∕"), steps=(0, 5))
    for snapshot in run.snapshots():
        for token in snapshot.summary["top_tokens"]:
            token["text"] = EVIL
        snapshot.write(run.snapshot(snapshot.step))
    tab = open_page(write_report([run, run], tmp_path))
    tab.run("() => document.querySelectorAll('details').forEach(d => d.open = true)")
    hover(tab, "alignment", 0.5)
    scrub(tab, 0)
    assert tab.page.locator("img").count() == 0
    assert tokens(tab)[0].startswith("<img src=x onerr")


def test_it_reads_without_script_and_in_print(one, open_page):
    run, page = one
    plain = open_page(page, java_script_enabled=False)
    printed = open_page(page)
    printed.page.emulate_media(media="print")
    for tab in (plain, printed):
        stills = tab.page.locator("figure.panel .still")
        shown = [stills.nth(i).is_visible() for i in range(stills.count())]
        assert len(shown) > 6
        assert sum(shown) >= 6
        assert not any(shown[i] and not stills.nth(i).locator("svg, table").count() for i in range(len(shown)))
        assert not tab.page.locator("#controls").is_visible()
        assert run.snapshots()[-1].summary["top_tokens"][1]["text"] in tab.text("#panel-tokens .still")
    plain.page.click("#sink summary")
    assert plain.page.locator("#sink figure svg").first.is_visible()
    assert len(printed.page.pdf()) > 20_000


@pytest.mark.parametrize("steps", [(), (0,), (7,)], ids=["no snapshot", "newborn", "one of step 7"])
def test_runs_with_little_to_show_open(tmp_path, make_run, open_page, steps):
    run = make_run(tmp_path / "run", steps=steps or (0,), losses=bool(steps))
    if not steps:
        shutil.rmtree(run.snapshot(0))
    page = write_report([run], tmp_path)
    tab, text = open_page(page), page.read_text()
    assert "0.1.0" in tab.page.text_content("#birth")
    assert tab.page.locator("#scrub").count() == 0
    assert ("No snapshots yet." in text) == (not steps)
    assert ("No losses are recorded yet." in text) == (steps != (7,))
    assert [row["step"] for row in summarise([run])["runs"][0]["rows"]] == [*steps]


def test_what_is_not_a_number_is_a_gap(tmp_path, make_run, make_snapshot, open_page):
    run = make_run(tmp_path / "run", steps=(0, 5))
    rng = np.random.default_rng(0)
    broken = make_snapshot(9, rng, alignment=float("nan"))
    broken.arrays["sink_mass"][...] = np.nan
    broken.write(run.snapshot(9))
    tab = open_page(write_report([run], tmp_path))
    assert json.loads(tab.run("() => document.getElementById('charts').textContent"))["panels"]["alignment"]
    scrub(tab, 2)
    tips = tab.page.locator("#panel-sink-heads .live td").evaluate_all("all => all.map(c => c.dataset.tip)")
    assert all(tip.endswith(": –") for tip in tips)


def test_what_is_zero_everywhere_is_a_line_on_a_logarithmic_panel_too(tmp_path, open_page):
    zeros = Series(np.zeros(3), {"step": [0, 1, 2]}, 0, "norm")
    level = Series(np.full(3, 0.5), {"step": [0, 1, 2]}, None, "level", "control")
    panels = [CurvePanel("alone", "alone", [zeros], log=True), CurvePanel("beside", "b", [zeros, level], log=True)]
    write_text(tmp_path / "page.html", render_page("page", [Controls(), Panels(panels)], runs=[PageRun("a")]))
    tab = open_page(tmp_path / "page.html")
    for panel in panels:
        # A tooltip names those lines that are drawn.
        assert "0" in hover(tab, panel.id, 1)[1:]
        # Nothing of it could be seen on a logarithmic axis, and the button says so.
        switch = tab.page.locator(f"#panel-{panel.id} .ylog")
        assert switch.get_attribute("aria-pressed") == "false"
        assert switch.is_disabled()


def test_ten_runs_are_under_three_megabytes(tmp_path, make_run):
    run = make_run(tmp_path / "run", n_layers=4, n_heads=4)
    assert write_report([run] * 10, tmp_path).stat().st_size < 3_000_000


def test_a_hundred_runs_open(tmp_path, make_run, open_page):
    run = make_run(tmp_path / "run", steps=(0, 3), losses=False, vocab=30, only=())
    runs = [run] * 100
    tab = open_page(write_report(runs, tmp_path))
    assert tab.page.locator(".chips [data-run]").count() == 100
    assert "more" in hover(tab, "alignment", 1)[-1]
    tab.page.click(".chips .more")
    tab.page.click('.chips [data-run="99"]')
    assert view(tab)["hide"] == "99"


RUN_COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b0578d", "#8a6d00", "#0092b8")
"""Colours of runs on a light page, as the docs name them."""


def column_of(tab, panel, share):
    """Read the colours of a panel's picture, pixel for pixel, in the column so far from its plot's left."""
    column = """([panel, share]) => {
        const over = document.querySelector(`#panel-${panel} .u-over`).getBoundingClientRect();
        const canvas = document.querySelector(`#panel-${panel} canvas`), box = canvas.getBoundingClientRect();
        const x = Math.round((over.left - box.left + share * over.width) * devicePixelRatio);
        const copy = Object.assign(document.createElement("canvas"), { width: 1, height: canvas.height });
        const ink = copy.getContext("2d");
        ink.drawImage(canvas, -x, 0);
        const pixels = ink.getImageData(0, 0, 1, canvas.height).data, found = [];
        for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 200) found.push([...pixels.slice(i, i + 3)]);
        return found.map(rgb => "#" + rgb.map(c => c.toString(16).padStart(2, "0")).join(""));
    }"""
    tab.page.locator(f"#panel-{panel}").scroll_into_view_if_needed()
    tab.draw()
    return tab.page.evaluate(column, [panel, share])


def inks(tab, panel, share, colours=RUN_COLOURS):
    """Read which of these colours a column has."""
    return set(column_of(tab, panel, share)) & set(colours)


def test_a_line_breaks_where_it_is_no_number_and_not_at_the_steps_of_others(tmp_path, open_page):
    nan = np.nan
    broken = Series(np.array([1, nan, 1, 1, nan, 1.5, nan]), {"step": [0, 10, 20, 30, 40, 50, 60]}, 0)
    sparse = Series(np.array([3, 3]), {"step": [0, 60]}, 1)
    dense = Series(np.full(61, 2.0), {"step": range(61)}, 2)
    dense.values[7] = nan
    panel = CurvePanel("a", "a", [broken, sparse, dense])
    write_text(tmp_path / "page.html", render_page("page", [Panels([panel])], runs=[PageRun(name) for name in "abc"]))
    tab = open_page(tmp_path / "page.html")
    first, second, third = RUN_COLOURS[:3]
    assert inks(tab, "a", 15 / 60) == {second, third}
    assert inks(tab, "a", 25 / 60) == {first, second, third}
    assert inks(tab, "a", 7 / 60) == {second}
    # A number between two gaps is a point.
    assert first in inks(tab, "a", 50 / 60)


def test_seeds_of_other_steps_share_a_mean_without_gaps(tmp_path, open_page):
    often = Series(np.array([1.0, 1, 1, 1, 1]), {"step": [0, 5, 10, 15, 20]}, 0)
    seldom = Series(np.array([2.0, 2, 2]), {"step": [0, 10, 20]}, 1)
    runs = [PageRun("a", "group"), PageRun("b", "group")]
    write_text(tmp_path / "page.html", render_page("p", [Panels([CurvePanel("a", "a", [often, seldom])])], runs=runs))
    assert inks(open_page(tmp_path / "page.html"), "a", 0.4) == {RUN_COLOURS[0]}


def test_bands_of_more_seeds_than_colours_keep_their_colour_whichever_run_is_hidden(tmp_path, open_page):
    def page(names, n_seeds):
        ends = [(name, i + seed / 10) for i, name in enumerate(names) for seed in range(n_seeds)]
        series = [Series(np.array([end, end]), {"step": [0, 10]}, run) for run, (_, end) in enumerate(ends)]
        runs = [PageRun(f"{name}-{run}", name) for run, (name, _) in enumerate(ends)]
        blocks = [Controls(), Panels([CurvePanel("a", "a", series)])]
        write_text(tmp_path / "page.html", render_page("page", blocks, runs=runs))
        return tmp_path / "page.html"

    tab = open_page(page("abc", 3))
    assert inks(tab, "a", 0.5) == set(RUN_COLOURS[:3])
    chips = tab.page.locator(".chips [data-run]").evaluate_all("all => all.map(c => c.style.getPropertyValue('--c'))")
    assert chips == [f"var(--run-{group})" for group in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    # Of two configs of two seeds, the band of the second is that of run 2.
    tab = open_page(page("ab", 2), "#hide=2")
    assert inks(tab, "a", 0.5) == {RUN_COLOURS[0], RUN_COLOURS[3]}
    tab = open_page(page("ab", 3), "#hide=3")
    assert inks(tab, "a", 0.5) == {RUN_COLOURS[0], RUN_COLOURS[3]}


def test_of_more_runs_than_colours_first_best_and_worst_stand_out(tmp_path, make_run, open_page):
    losses = [4.2, 4.5, 3.0, 4.0, 3.5, 6.0, 5.0, np.nan]
    runs = [make_run(tmp_path / f"run-{n}", seed=n, steps=(0, 8), only=()) for n in range(8)]
    for run, loss in zip(runs, losses, strict=True):
        append_metrics(run.metrics, 16, {"val/loss": loss, "train/loss": loss})
    best, worst = int(np.nanargmin(losses)), int(np.nanargmax(losses))
    page = write_report(runs, tmp_path)
    tab = open_page(page)
    chips = tab.page.locator(".chips button:visible")
    roles = {0: "first", best: "best", worst: "worst"}
    assert chips.all_inner_texts() == [*(f"run-{n} ({roles[n]})" for n in sorted(roles)), "all 8 runs"]
    assert inks(tab, "loss-live", 0.97) == set(RUN_COLOURS[:3])
    # The one that the reader points at has a colour of its own.
    tab.page.click(".chips .more")
    other = next(n for n in range(8) if n not in roles)
    tab.page.hover(f'.chips [data-run="{other}"]')
    assert inks(tab, "loss-live", 0.97) == set(RUN_COLOURS[:4])
    assert [ink for ink, _ in groupby(column_of(tab, "loss-live", 0.97))].count(RUN_COLOURS[3]) == 1
    tab.page.hover("h1")
    assert inks(tab, "loss-live", 0.97) == set(RUN_COLOURS[:3])
    # Hovering over a line names its run, and colours it.
    _, _, nearest, *_ = hover(tab, "loss-live", 1)
    assert nearest == "run-1, train"
    assert (
        tab.page.locator(f"{TOOLTIP} .row i").first.evaluate("i => i.style.getPropertyValue('--c')") == RUN_COLOURS[3]
    )
    assert inks(tab, "loss-live", 0.97) == set(RUN_COLOURS[:4])
    # So it is in print, with names.
    still = tab.page.locator("#panel-loss-live .still")
    strokes = set(still.locator("path.l").evaluate_all("all => all.map(path => path.getAttribute('stroke'))"))
    assert strokes == {"var(--muted)", *(f"var(--run-{n})" for n in range(3))}
    keys = still.locator(".keys span").evaluate_all("all => all.map(key => key.textContent)")
    assert {f"run-{n} ({role}), train" for n, role in roles.items()} <= set(keys)


def test_a_number_in_a_tooltip_keeps_its_line_beside_a_long_name(tmp_path, open_page):
    panel = CurvePanel("a", "a", [Series(np.array([1.234e-9, -1.234e-9]), {"step": [0, 1]}, 0, "long " * 30)])
    write_text(tmp_path / "page.html", render_page("page", [Panels([panel])], runs=[PageRun("a")]))
    tab = open_page(tmp_path / "page.html")
    hover(tab, "a", 1)
    high = "b => b.getBoundingClientRect().height / parseFloat(getComputedStyle(b).lineHeight)"
    assert tab.page.locator(f"{TOOLTIP} .row b").evaluate(high) < 1.5


def test_pictures_and_switches_have_names_headings_their_order_and_points_are_read_by_keyboard(one, open_page):
    tab = open_page(one[1])
    tab.run("() => document.querySelectorAll('details').forEach(d => d.open = true)")
    named = "all => all.map(e => [e.getAttribute('role'), e.getAttribute('aria-label')])"
    canvases = tab.page.locator("#panel-alignment canvas, #panel-sink-mass canvas").evaluate_all(named)
    assert canvases == [["img", "Alignment with the seed direction"], ["img", "Sink mass"]]
    switches = [label for _, label in tab.page.locator("button.ylog").evaluate_all(named)]
    assert all(label.startswith("log scale: ") and len(label) > 12 for label in switches)
    assert "log scale: Loss" in switches
    levels = tab.run("() => [...document.querySelectorAll('h1, h2, h3, h4')].map(h => +h.tagName[1])")
    assert all(below <= above + 1 for above, below in pairwise(levels))
    over = tab.page.locator("#panel-alignment .u-over")
    over.focus()
    tab.page.keyboard.press("ArrowLeft")
    tab.page.keyboard.press("ArrowLeft")
    assert tab.text(TOOLTIP).split("\n")[0] == "step 20"
    tab.page.keyboard.press("ArrowRight")
    at, *rows = tab.text(TOOLTIP).split("\n")
    assert at == "step 30"
    expected = one[0].snapshots()[-1].bias["alignment"]
    assert f"{float(f'{expected:.4g}')}" in rows


def test_a_panel_says_what_its_line_is_a_mean_of_until_a_block_is_chosen(one, open_page):
    tab = open_page(one[1])
    assert (
        tab.page.locator("#panel-sink-mass .bar small").inner_text() == "share of attention, mean of blocks and heads"
    )
    tab.run("() => document.querySelectorAll('details').forEach(d => d.open = true)")
    heads = tab.page.locator("#panel-picture-lock-cosine-heads-0, #panel-picture-sink-mass-heads-0").first
    heads.scroll_into_view_if_needed()
    tab.draw()
    assert heads.locator(".when").inner_text() == "mean of heads; choose a block to see each"
    tab.page.select_option("#choose-block", "2")
    tab.draw()
    assert heads.locator(".when").count() == 0
    tab.page.locator("#panel-sink-mass").scroll_into_view_if_needed()
    tab.draw()
    assert tab.page.locator("#panel-sink-mass .bar small").inner_text() == "share of attention"


def test_paths_of_tokens_have_the_colours_of_their_two_groups(one, open_page):
    tab = open_page(one[1])
    tab.run("() => document.querySelectorAll('details').forEach(d => d.open = true)")
    panel = tab.page.locator("#panel-picture-preference-ranks-0")
    panel.scroll_into_view_if_needed()
    tab.draw()
    live, still = (
        panel.locator(f"{part} .keys span").evaluate_all("all => all.map(key => key.textContent)")
        for part in (".live", ".still")
    )
    assert live == still == ["favourites now only", "among birth's favourites"]
    assert inks(tab, "picture-preference-ranks-0", 0.5, (*RUN_COLOURS, "#7b8087")) == {RUN_COLOURS[0], "#7b8087"}


def ends_of_paths(tab, fragment):
    """Write a rank panel anew at an address; return the words beside its paths: at the left, at the right."""
    tab.run("""() => {
        window.said = [];
        const write = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
            if (text.includes("‹")) window.said.push([this.textAlign, text]);
            write.call(this, text, ...at);
        };
    }""")
    tab.run(f"() => {{ location.hash = '{fragment}'; }}")
    said = tab.run("() => window.said")
    return [[text for side, text in said if side == wanted] for wanted in ("right", "left")]


def test_paths_of_tokens_are_named_at_the_ends_of_what_is_in_sight(tmp_path, open_page):
    ranks = np.array([[1.0, 3, 2, 5, 9], [7, np.nan, 4, np.nan, 8], [6, np.nan, np.nan, np.nan, 6]])
    steps = [0, 10, 20, 30, 40]
    panel = CurvePanel("a", "a", [Series(ranks, {"text": ["one", "two", "six"], "step": steps}, 0)], down=True)
    write_text(tmp_path / "page.html", render_page("page", [Panels([panel])], runs=[PageRun("a")]))
    left, right = ends_of_paths(open_page(tmp_path / "page.html"), "zoom=5,35")
    assert left == ["3 \u2068‹one›\u2069", "4 \u2068‹two›\u2069"]
    assert right == ["\u2068‹one›\u2069 5", "\u2068‹two›\u2069 4"]


def test_a_token_from_right_to_left_stands_apart_from_its_rank_and_half_a_character_is_not_cut(tmp_path, open_page):
    texts = ["שלום", "𝒂" * 10, "𝒂" * 11]
    ranks = np.array([[1.0, 2], [2.0, 1], [3.0, 3]])
    panel = CurvePanel("a", "a", [Series(ranks, {"text": texts, "step": [0, 40]}, 0)], down=True)
    write_text(tmp_path / "page.html", render_page("page", [Panels([panel])], runs=[PageRun("a")]))
    tab = open_page(tmp_path / "page.html")
    cut = ["שלום", "𝒂" * 10, "𝒂" * 9 + "…"]
    drawn = ends_of_paths(tab, "x=log")
    assert drawn[0] == [f"{rank} \u2068‹{text}›\u2069" for rank, text in zip((1, 2, 3), cut, strict=True)]
    written = tab.page.locator("#panel-a .still text.path").evaluate_all("all => all.map(text => text.textContent)")
    assert written == [*drawn[0], *drawn[1]]
    assert "\u2068" not in end_of_path(next(iter(paths_of(panel))), 0)


def test_a_printed_page_cuts_no_column_and_says_where_y_is_logarithmic(one, open_page):
    tab = open_page(one[1], width=700)
    tab.page.emulate_media(media="print")
    lists = tab.page.locator("#panel-tokens .still table").evaluate_all(
        "all => all.map(t => t.getBoundingClientRect().right)"
    )
    assert len(lists) == 2
    assert max(lists) <= 700
    assert "log scale" in tab.page.locator("#panel-variance-positions .bar").inner_text()
    assert "log scale" not in tab.page.locator("#panel-alignment .bar").inner_text()


def test_a_long_file_name_fits_a_phone_and_one_point_has_an_axis_of_steps(tmp_path, open_page):
    point = Series(np.array([0.5]), {"step": [0]}, 0, "value")
    band = Series(np.array([0.1]), {"step": [0]}, 0, "stranger", "band")
    panels = [CurvePanel("a", "a", [point, band], csv=f"{'outliers-' * 9}.csv")]
    write_text(tmp_path / "page.html", render_page("page", [Panels(panels)], runs=[PageRun("a")], data="page-data"))
    tab = open_page(tmp_path / "page.html", width=390)
    assert tab.run("() => document.documentElement.scrollWidth") == 390
    # Neither a step before the first, nor a key for a band that one point does not draw.
    assert inks(tab, "a", 0.0) == {RUN_COLOURS[0]}
    assert tab.page.locator("#panel-a .live .keys").inner_text() == "value"


def test_the_chain_has_a_live_panel_for_every_picture_over_an_axis(one, open_page):
    run, page = one
    tab = open_page(page)
    tab.run("() => document.querySelectorAll('section > details').forEach(d => d.open = true)")
    pictures = tab.page.locator("section figure:not(.panel)")
    alive = tab.page.locator("section figure:not(.panel) .panel.alive")
    assert alive.count() == pictures.count() > 20
    at, *rows = hover(tab, "picture-dominance-rank-0", 1)
    expected = [float(f"{v:.4g}") for v in run.snapshots()[-1].arrays["effective_rank"]]
    assert at == "step 30"
    assert sorted(float(row) for row in rows if row.replace(".", "", 1).isdigit()) == sorted(expected)
    scrub(tab, 0)
    # What is out of sight is drawn when it comes into sight.
    tab.page.locator("#panel-picture-sink-map-0").scroll_into_view_if_needed()
    tab.page.locator("#panel-picture-sink-map-0 .when", has_text="at birth").wait_for()
