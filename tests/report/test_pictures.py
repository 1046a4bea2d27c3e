"""Pictures are drawn by a library that is loaded when one is drawn, and whose settings stay those of others."""

import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from birthmark.measure.records import Snapshot
from birthmark.report.charts.lines import lines_of
from birthmark.report.charts.specs import CurvePanel, Drawn, HeatmapPanel, MatrixPanel, Series
from birthmark.report.charts.stills import still
from birthmark.report.csv_files import LabelledArray
from birthmark.report.figure import save_panel, save_panels
from birthmark.report.pictures.point_labels import place_labels
from birthmark.report.pictures.several_models import draw_matrix
from birthmark.report.sections.dominance import DOMINANCE
from birthmark.report.sections.section import Section
from birthmark.report.sections.seed_mark import DIRECTION
from birthmark.report.sections.snapshot_view import SnapshotView

pytestmark = pytest.mark.heavy


def test_figures_leave_the_settings_of_others_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    save_panel(HeatmapPanel("", "", [cells([[0.25, 0.5]])]), tmp_path / "sink.png")
    assert (tmp_path / "sink.png").read_bytes().startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before


def test_importing_reports_needs_no_matplotlib():
    code = "import sys, birthmark.report.run_page, birthmark.report.figure; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def cells(values):
    """A map of blocks by heads."""
    shape = np.shape(values)
    return Series(np.array(values), {"layer": range(1, shape[0] + 1), "head": range(shape[1])}, 0)


def of_heads(lines, log=True):
    """The panel of one block's heads, each at one level over three positions."""
    values = np.array(lines, dtype=float)[None, :, None] * np.ones(3)
    numbers = LabelledArray("importance", values, [{"layer": [1]}, {"head": range(len(lines))}, {"position": range(3)}])
    return Drawn([numbers], log=log).panel("p", [], {})


def test_a_head_at_zero_counts_in_the_mean_and_leaves_the_range_of_the_others():
    *heads, mean = lines_of(of_heads([0.5, 0.3, 0.0]))
    assert [line.y[0] for line in heads] == [0.5, 0.3, 0.0]
    np.testing.assert_allclose(mean.y, 0.8 / 3)
    lines = list(lines_of(of_heads([0.5] * 16 + [0.0])))
    assert [line.name for line in lines] == ["mean of heads", "least head", "largest head"]
    assert [line.y[0] for line in lines] == pytest.approx([8 / 17, 0.0, 0.5])
    assert {line.facet for line in lines} == {"block 1"}


def test_a_block_that_was_not_seen_has_empty_cells():
    picture = still(HeatmapPanel("", "", [cells([[0.1, 0.2], [np.nan, np.nan]])]))
    assert re.findall("<td[^>]*>(.*?)</td>", picture) == ["0.10", "0.20", "", ""]


def test_two_steps_are_both_shown_and_the_first_is_pale(tmp_path):
    series = Series(np.array([[1.0, 2.0], [3.0, 4.0]]), {"step": [0, 8], "layer": [1, 2]}, 0)
    panel = CurvePanel("p", "", [series], "layer")
    first, last = ((line.name, line.look, line.pale, line.y.tolist()) for line in lines_of(panel))
    assert (first, last) == (("step 0", "solid", True, [1, 2]), ("step 8", "solid", False, [3, 4]))
    assert re.findall(r'<i class="solid" style="--c:var\(--run-0\)(.*?)"></i>(.*?)<', still(panel)) == [
        (";opacity:0.4", "step 0"), ("", "step 8"),
    ]  # fmt: skip
    save_panels([panel, MatrixPanel("m", "pairs", "ab", "ab", np.eye(2), 0.1)], tmp_path / "f.svg")
    assert "pairs" in (tmp_path / "f.svg").read_text()


def test_tokens_stand_at_both_ends_of_their_paths_by_rank():
    series = Series(np.array([[1.0, 30.0], [2.0, 1.0]]), {"text": ["one", "<b>"], "step": [0, 8]}, 0, "favourites")
    picture = still(CurvePanel("p", "", [series], log=True, down=True))
    names = re.findall(r'<text class="path"[^>]* y="([\d.]+)"[^>]*>(.*?)</text>', picture)
    one, b = ("\u2068‹one›\u2069", "\u2068‹&lt;b&gt;›\u2069")
    assert [name for _, name in names] == [f"1 {one}", f"2 {b}", f"{one} 30", f"{b} 1"]
    heights = [float(height) for height, _ in names]
    assert heights[0] < heights[1]  # rank 1 is above rank 2
    assert heights[2] > heights[3]


@pytest.mark.parametrize("name", ["energy_share", "alignment", "effective_rank", "dominance"])
def test_what_is_no_number_anywhere_has_no_picture(name):
    link = DIRECTION if name in ("energy_share", "alignment") else DOMINANCE
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


def test_the_title_of_a_matrix_of_two_models_is_within_the_picture():
    found = SimpleNamespace(z=-0.5, verdict="stranger")
    figure = draw_matrix(
        ["A", "B"], [(0, 1, found)], "null dimensions, 2000 sequences of 64 random tokens of a vocabulary"
    )
    figure.draw_without_rendering()
    box = figure.axes[0]._left_title.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert figure.axes[0].bbox.y1 <= box.y0 < box.y1 <= figure.bbox.height
