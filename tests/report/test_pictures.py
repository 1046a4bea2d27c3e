"""Pictures are drawn by a library that is loaded when one is drawn, and whose settings stay those of others."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import birthmark.report
from birthmark.measure.records import Snapshot
from birthmark.report.pictures.curves import Curve, draw_curves
from birthmark.report.pictures.labels import place_labels
from birthmark.report.pictures.layers_and_heads import draw_blocks, draw_head_maps, draw_heads
from birthmark.report.pictures.panels import Heights, Panel
from birthmark.report.pictures.saving import save_png
from birthmark.report.sections.dominance import DOMINANCE
from birthmark.report.sections.section import Section
from birthmark.report.sections.seed_mark import DIRECTION
from birthmark.report.sections.snapshot_view import SnapshotView

pytestmark = pytest.mark.heavy


def test_pictures_leave_the_settings_of_others_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    figure = draw_head_maps([("at birth", np.full((2, 2), 0.25))], "sink mass")
    save_png(figure, tmp_path / "sink.png")
    assert (tmp_path / "sink.png").read_bytes().startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before


def test_importing_reports_needs_no_matplotlib():
    code = "import sys, birthmark.report.run_page; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for file in (Path(birthmark.report.__file__).parent / "pictures").glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not module.startswith("engine.") or module == "engine.letters", file


def of_heads(lines, heights):
    panel = Panel("block 1", np.arange(3), np.array(lines, dtype=float)[:, None] * np.ones(3))
    return draw_heads([panel], run=0, heights=heights, x_axis=lambda axes: None).axes[0]


def test_a_head_at_zero_leaves_the_mean_and_the_range_of_the_others():
    heights = Heights("importance", log=True, most=1)
    *_, mean = of_heads([0.5, 0.3, 0.0], heights).lines
    np.testing.assert_allclose(mean.get_ydata(), 0.8 / 3)
    many = of_heads([0.5] * 16 + [0.0], heights)
    np.testing.assert_allclose(many.lines[-1].get_ydata(), 8 / 17)
    (band,) = many.collections
    heights_of_band = band.get_paths()[0].vertices[:, 1]
    assert (heights_of_band.min(), heights_of_band.max()) == (many.get_ylim()[0], 0.5)


def test_what_is_zero_everywhere_is_a_line_at_zero_on_a_linear_axis():
    axes = of_heads([0.0, 0.0], Heights("importance", log=True))
    assert axes.get_yscale() == "linear"
    assert [line.get_ydata().tolist() for line in axes.lines] == [[0, 0, 0]] * 3
    panel = Panel("", np.arange(3), np.zeros((2, 3)), {"uniform": np.full(3, 0.5)})
    blocks = draw_blocks([panel], heights=Heights("ratio", log=True), x_axis=lambda axes: None).axes[0]
    curve = draw_curves([Curve(0, "", [0, 1], [0.0, 0.0])], ylabel="", x_axis=lambda axes: None, log=True).axes[0]
    for axes, ends in ((blocks, (-0.025, 0.525)), (curve, (-2, 2))):
        assert axes.get_yscale() == "linear"
        assert axes.get_ylim() == pytest.approx(ends)
        assert np.isfinite(axes.lines[0].get_ydata()).all()


def test_a_block_that_was_not_seen_has_empty_cells():
    figure = draw_head_maps([("", np.array([[0.1, 0.2], [np.nan, np.nan]]))], "mass")
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.10", "0.20"]


@pytest.mark.parametrize(
    ("link", "name"),
    [(DIRECTION, "energy_share"), (DIRECTION, "alignment"), (DOMINANCE, "effective_rank"), (DOMINANCE, "dominance")],
)
def test_what_is_no_number_anywhere_has_no_picture(link, name):
    shape = (3, 4) if name == "dominance" else (3,)
    for value, n_pictures in ((np.nan, 0), (1.0, 1)):
        view = SnapshotView("run", Snapshot({"step": 0, "bias": {}}, {name: np.full(shape, value)}))
        section = Section(link.id, link.title, "")
        link.in_snapshot(view, section)
        assert len(section.pictures) == n_pictures


def test_labels_do_not_lie_on_one_another():
    points = np.random.default_rng(0).uniform(100, 160, size=(12, 2))
    sizes = np.tile([40.0, 8.0], (12, 1))
    corners = place_labels(points, sizes, (0, 0, 300, 300), gap=4)
    boxes = np.concatenate([corners, corners + sizes], axis=1)
    assert boxes.min() >= 0
    assert boxes.max() <= 300
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    # With room, a label stands right of its point.
    (corner,) = place_labels(points[:1], sizes[:1], (0, 0, 300, 300), gap=4)
    assert corner == pytest.approx(points[0] + [4, -4])
