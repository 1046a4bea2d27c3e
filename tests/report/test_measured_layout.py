"""Layout and SVG of pictures: matplotlib, which measures every letter, says whether something is clipped."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from birthmark.report.pictures.axes import block_axis
from birthmark.report.pictures.curves import Curve, draw_curves
from birthmark.report.pictures.labels import text_width
from birthmark.report.pictures.layers_and_heads import draw_head_maps
from birthmark.report.pictures.saving import to_svg
from birthmark.report.pictures.several_models import draw_matrix, draw_model_matrices
from birthmark.report.pictures.style import figure_style
from birthmark.report.pictures.token_ranks import TokenPath, draw_rank_paths


def figures():
    rng = np.random.default_rng(0)
    names = [f"a model of a long name {i}" for i in range(5)]
    square = rng.random((5, 5)) * 40
    words = np.full((5, 5), "kin", dtype=object)
    curves = [Curve(i, f"run {i}", range(5), (1e6 * rng.random(5)).tolist()) for i in range(9)]
    paths = [TokenPath(f"token {i}", [i + 1.0, 300.0 - i], True, False) for i in range(8)]
    yield draw_curves(curves, ylabel="a quantity", x_axis=block_axis)
    yield draw_rank_paths([0, 1000], paths, run=0, top=8)
    yield draw_head_maps([("a", rng.random((3, 2))), ("b", rng.random((3, 2)))], "shares", (0, 2000))
    yield draw_matrix(names, square + square.T, words, "tokens")
    yield draw_model_matrices(names, square, square)


@pytest.mark.heavy
def test_nothing_is_clipped_and_no_labels_of_neighbours_overlap():
    for number, figure in enumerate(figures()):
        with figure_style():
            figure.set_dpi(144)  # at 72 letters have whole pixels' widths
            FigureCanvasAgg(figure)
            figure.get_layout_engine().execute(figure)
            whole = figure.bbox
            boxes = [axes.get_tightbbox() for axes in figure.axes]
            legend = [text.get_window_extent() for text in figure.texts]
        for box in (*boxes, *legend):
            assert whole.x0 - 4 <= box.x0 <= box.x1 <= whole.x1 + 4, number
            assert whole.y0 - 4 <= box.y0 <= box.y1 <= whole.y1 + 4, number
        for i, box in enumerate(boxes):
            for other in (*boxes[i + 1 :], *legend):
                over = min(box.x1, other.x1) - max(box.x0, other.x0), min(box.y1, other.y1) - max(box.y0, other.y0)
                assert min(over) <= 4, (number, over)


def test_the_svg_has_points_lines_and_numbers_where_matplotlib_has_them():
    x, y = [1, 2, 3], [0.25, -1.5, 4.0]
    figure = draw_curves([Curve(0, "", x, y)], ylabel="<y>", x_axis=block_axis)
    root = ElementTree.fromstring(to_svg(figure, "p", 'a "b" <c>'))
    height = float(root.attrib["viewBox"].split()[3])
    places = figure.axes[0].transData.transform(np.stack([x, y], 1))
    wanted = np.stack([places[:, 0], height - places[:, 1]], 1)
    dots = [[float(use.get("x")), float(use.get("y"))] for use in root.iter("use")]
    np.testing.assert_allclose(dots, wanted, atol=0.006)
    line = next(p for p in root.iter("path") if p.get("clip-path") and "--run-0" in p.get("style"))
    drawn = np.array(re.findall(r"-?[\d.]+", line.get("d")), dtype=float).reshape(-1, 2)
    np.testing.assert_allclose(drawn, wanted, atol=0.006)
    for text in root.iter("text"):
        if text.text in ("1", "2", "3") and float(text.get("y")) > height - 40:
            assert float(text.get("x")) == pytest.approx(wanted[int(text.text) - 1, 0], abs=0.006)
    assert "<y>" in [text.text for text in root.iter("text")]
    assert root.attrib["aria-label"] == 'a "b" <c>'


def test_widths_are_those_of_the_font():
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    for text in ("0.001", "block (0: embeddings)", "σ²(0)/n_eff"):
        outline = TextPath((0, 0), text, size=50, prop=FontProperties(family="DejaVu Sans")).get_extents()
        assert text_width(text, 50) == pytest.approx(outline.width, rel=0.06)
