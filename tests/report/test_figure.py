"""A figure for a paper: found by name, at the size that was asked for, in the format of its file."""

import re
import shutil
import struct
from itertools import zip_longest
from math import nan

import numpy as np
import pytest

from birthmark.errors import UsageError
from birthmark.launch.cli import main
from birthmark.launch.commands import figure as command
from birthmark.measure.records import RunDir
from birthmark.report.charts.scales import fitting_scale
from birthmark.report.charts.specs import CurvePanel, PageRun, Series, roles_of
from birthmark.report.figure import NAMES, draw_panel, save_figure
from birthmark.report.pictures.style import MUTED, RUN_COLOURS, figure_style

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_run):
    return make_run(tmp_path_factory.mktemp("figure") / "run")


def test_it_has_the_size_that_was_asked_for(run, tmp_path):
    save_figure([run], "sink", tmp_path / "f.png", width=3, height=2)
    assert struct.unpack(">II", (tmp_path / "f.png").read_bytes()[16:24]) == (900, 600)  # 300 dpi
    save_figure([run], "sink-map", tmp_path / "f.svg", width=4, height=1.5)
    assert re.search(r'<svg[^>]* width="288pt"', (tmp_path / "f.svg").read_text())
    assert re.search(r'<svg[^>]* height="108pt"', (tmp_path / "f.svg").read_text())
    save_figure([run], "direction", tmp_path / "f.pdf", width=3.5)
    pdf = (tmp_path / "f.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert re.search(rb"/MediaBox \[ ?0 0 252 ", pdf)


def test_a_name_of_a_run_is_no_formula(run, tmp_path):
    runs = [RunDir(shutil.copytree(run.path, tmp_path / name)) for name in (r"r$\frac$", "$_$")]
    save_figure(runs, "sink", tmp_path / "f.svg")
    assert r"r$\frac$" in (tmp_path / "f.svg").read_text()


def test_letters_have_the_size_that_was_asked_for(run, tmp_path):
    def sizes(**font):
        save_figure([run], "sink", tmp_path / "f.svg", width=6, **font)
        text = (tmp_path / "f.svg").read_text()
        return sorted({float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", text)})

    assert sizes() == [8, 8.5]
    assert sizes(font_size=17) == [16, 17]


def test_the_same_run_gives_the_same_bytes(run, tmp_path):
    for ending in ("pdf", "svg", "png"):
        files = [tmp_path / f"{i}.{ending}" for i in (0, 1)]
        for file in files:
            save_figure([run], "persistence", file)
        assert files[0].read_bytes() == files[1].read_bytes()


def test_what_does_not_exist_is_told_with_what_does(run, tmp_path):
    with pytest.raises(UsageError, match=r"^sinc: no such figure; did you mean sink\? there are: .*sink-map"):
        save_figure([run], "sinc", tmp_path / "f.pdf")
    with pytest.raises(UsageError, match=r"f\.jpg: a figure is written as \.pdf, \.svg, \.png"):
        save_figure([run], "sink", tmp_path / "f.jpg")
    with pytest.raises(UsageError, match="sink-map: a figure of one run"):
        save_figure([run, run], "sink-map", tmp_path / "f.pdf")
    assert list(tmp_path.iterdir()) == []


def test_the_command_names_the_figures_and_writes_one(run, tmp_path, capsys):
    out = tmp_path / "f.svg"
    of_run = ["figure", str(run.path), "sink", "--out", str(out)]
    assert main([*of_run, "--beside", str(run.path), "--font-size", "9"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert "run (2)" in out.read_text()
    assert main([*of_run, "--width", "0"]) == 2
    assert "--width 0: give 1 to 60 (inches)" in capsys.readouterr().err
    assert command._NAMES.startswith(", ".join(NAMES))


# ── nothing lies on anything else ────────────────────────────────────────────────────────────────────────────────────


def curves(n_runs, losses=("train", "validation"), **more):
    """A panel with two lines for each run: run ``i`` ends at ``i``."""
    looks = dict(zip(losses, ("solid", "dashed"), strict=False))
    x = {"step": [0, 10, 20]}
    lines = [Series(np.array([9.0, 8, i + 0.1]), x, i, k, looks[k]) for i in range(n_runs) for k in losses]
    return CurvePanel("p", "", lines, unit="loss (nats per token)", **more)


def drawn(panel, names=("",), font=8.5, roles=(), groups=(), **size):
    with figure_style():
        from matplotlib import rc_context

        with rc_context({"font.size": font, "legend.fontsize": font, "xtick.labelsize": font, "ytick.labelsize": font}):
            facts = zip_longest(names, groups, roles, fillvalue="")
            runs = [PageRun(name, group, role=role) for name, group, role in facts]
            figure = draw_panel(panel, runs, **size)
            figure.draw_without_rendering()
            return figure


def boxes(artists):
    return [a.get_window_extent() for a in artists if a.get_text()]


def apart(artists):
    """No two texts overlap by more than half a pixel."""
    found = boxes(artists)
    return not any(
        min(a.x1, b.x1) - max(a.x0, b.x0) > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5
        for i, a in enumerate(found) for b in found[:i]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("n_runs", "width", "height"), [(6, 3.3, None), (7, 3.3, None), (15, 5.0, None), (60, 5.0, None), (60, 3.3, 3.0)]
)
def test_a_legend_lies_beside_the_plot_and_within_the_figure(n_runs, width, height):
    figure = drawn(curves(n_runs), [f"arm_{i:02d}_lr0.001234" for i in range(n_runs)], 7, width=width, height=height)
    (axes,), (legend,) = figure.axes, figure.legends
    assert apart([*legend.get_texts(), *axes.texts, figure._supylabel, axes.xaxis.label])
    assert legend.get_window_extent().y0 >= axes.bbox.y1
    assert figure.bbox.height == pytest.approx(height * figure.dpi) if height else axes.bbox.height > 0.3 * width * 72
    for box in boxes([*legend.get_texts(), *axes.texts, figure._supylabel]):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height


def test_a_height_that_the_legend_fills_is_an_error():
    with pytest.raises(UsageError, match=r"^--height 0\.8: the legend takes \d\.\d inches; give \d\.\d or more"):
        drawn(curves(60), [f"a long name of run {i}" for i in range(60)], width=3.3, height=0.8)


@pytest.mark.parametrize(
    ("losses", "words"),
    [([5, 7, 1, 8, 9, 8, 4.0], {0: "first", 2: "best", 4: "worst"}), ([nan] * 7, {0: "first, lowest", 6: "highest"})],
)
def test_of_more_runs_than_colours_three_stand_out(losses, words):
    names = [f"run {i}" for i in range(7)]
    figure = drawn(curves(7, ("train",)), names, roles=roles_of(losses))
    (axes,), (legend,) = figure.axes, figure.legends
    assert sorted(text.get_text() for text in axes.texts) == sorted(words.values())
    shown = {int(line.get_ydata()[-1]): line.get_color() for line in axes.lines}
    for i, (run, word) in enumerate(words.items()):
        assert f"{word}: run {run}" in [text.get_text() for text in legend.get_texts()]
        assert shown[run] == RUN_COLOURS[i]
    assert list(shown.values()).count(MUTED) == 7 - len(words)


def test_seeds_of_a_few_groups_share_the_colours_of_the_page():
    names, groups = [f"run {i}" for i in range(8)], ["a (4 seeds)", "b (3 seeds)"] * 3 + ["a (4 seeds)", ""]
    figure = drawn(curves(8, ("train",)), names, roles=roles_of([5.0] * 8, groups), groups=groups)
    (axes,), (legend,) = figure.axes, figure.legends
    assert [text.get_text() for text in legend.get_texts()][:3] == ["a (4 seeds)", "b (3 seeds)", "run 7"]
    assert [line.get_color() for line in legend.get_lines()][:3] == list(RUN_COLOURS[:3])
    shown = {int(line.get_ydata()[-1]): line.get_color() for line in axes.lines}
    assert [shown[i] for i in range(8)] == [RUN_COLOURS[place] for place in (0, 1, 0, 1, 0, 1, 0, 2)]


def test_bands_of_many_runs_are_one(tmp_path):
    x = {"step": [0, 1]}
    bands = [Series(np.array([i, 1.0]), x, i, "strangers", "band") for i in range(3)]
    (axes,) = drawn(CurvePanel("p", "", [*curves(3).series, *bands])).axes
    (band,) = axes.collections
    assert np.abs(band.get_paths()[0].vertices[:, 1]).max() == 2


def test_the_first_of_two_steps_is_paler_in_every_series():
    values, x = np.array([[0.1, 0.2], [0.3, 0.4]]), {"step": [0, 8], "layer": [1, 2]}
    panel = CurvePanel(
        "p", "", [Series(values + i, x, 0, k, look) for i, (k, look) in enumerate((("a", "solid"), ("b", "dashed")))],
        "layer",
    )  # fmt: skip
    figure = drawn(panel)
    keys = {text.get_text(): line for text, line in zip(
        figure.legends[0].get_texts(), figure.legends[0].get_lines(), strict=True
    )}  # fmt: skip
    assert len(keys) == len({(line.get_linestyle(), line.get_alpha()) for line in keys.values()}) == 4
    for name in "ab":
        first, last = keys[f"{name}, step 0"], keys[f"{name}, step 8"]
        assert first.get_alpha() < (last.get_alpha() or 1)
        assert (first.get_color(), first.get_linestyle()) == (last.get_color(), last.get_linestyle())


def test_a_logarithmic_axis_says_so_and_is_filled_by_its_lines():
    x = {"step": [5], "layer": range(1, 9), "position": range(30)}
    values = np.linspace(3.3, 3.8, 8 * 30).reshape(1, 8, 30)
    figure = drawn(CurvePanel("p", "", [Series(values, x, 0)], "position", unit="ratio", log=True, x_log=True))
    axes, bar = figure.axes
    assert (axes.get_xlabel(), figure.get_supylabel()) == ("position, log scale", "ratio, log scale")
    shares = axes.transAxes.inverted().transform(axes.transData.transform([[0, 3.3], [29, 3.8]]))
    assert (shares[0] < 0.15).all()
    assert (shares[1] > 0.85).all()
    assert [text.get_text() for text in bar.get_yticklabels()] == [f"{block:g}" for block in bar.get_yticks()]
    assert all(block == int(block) for block in bar.get_yticks())
    plain = drawn(CurvePanel("p", "", [Series(values, x, 0)], "position", unit="ratio"))
    assert (plain.axes[0].get_xlabel(), plain.get_supylabel()) == ("position", "ratio")
    assert fitting_scale([1.0, 1.0], log=True).high == 2


@pytest.mark.parametrize(("font", "height"), [(7, None), (12, None), (7, 1.5)])
def test_names_of_tokens_have_the_letters_asked_for_and_do_not_overlap(font, height):
    ranks = np.array([np.arange(1, 21), np.arange(20, 0, -1) ** 2], dtype=float).T
    texts = [f"token-{i}" for i in range(20)]
    series = Series(ranks, {"text": texts, "step": [0, 8]}, 0, "favourites")
    figure = drawn(
        CurvePanel("p", "", [series], log=True, down=True, unit="rank"), (""), font, width=3.3, height=height
    )
    names = figure.axes[0].texts
    assert {text.get_fontsize() for text in names} == {font}
    assert apart([*names, figure._supylabel])
    if height is None:
        assert len(names) == 40
    else:
        assert 10 <= len(names) < 40
        assert {"‹token-19› 1", "1 ‹token-0›"} <= {text.get_text() for text in names}
