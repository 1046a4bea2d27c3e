"""Fragments for a notebook: whole, closed to the outside, and free of our page's style sheet."""

import re

import numpy as np
import pytest

from birthmark.report.charts.specs import CurvePanel, MatrixPanel, Series
from birthmark.report.notebook import object_html, run_html, snapshot_html

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def fragments(make_run, tmp_path_factory):
    """Of two runs, and of the newest snapshot of the first."""
    root = tmp_path_factory.mktemp("notebook")
    runs = [make_run(root / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    return runs, [*map(run_html, runs), snapshot_html(runs[0].snapshots()[-1], "one")]


def test_fragments_bring_their_own_colours_and_fetch_nothing(fragments, parse):
    _, texts = fragments
    for text in texts:
        page = parse(text)
        assert {"script", "link", "iframe", "img", "style", "html", "body"}.isdisjoint(page.tags)
        assert page.links == []
        assert "var(" not in text
        assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]*)\)", text))


def test_an_output_has_no_ids_which_others_in_its_notebook_might_have(fragments, parse):
    for text in fragments[1]:
        assert "<svg" in text
        assert {"id", "class"}.isdisjoint(name for name, _ in parse(text).attributes)


def test_the_table_and_the_main_pictures_stand_in_them(fragments, parse):
    (run, _), (text, _, of_snapshot) = fragments
    rows = [row for row in parse(text).rows if row]
    alignment = [f"{s.bias['alignment']:.3f} ({s.bias['alignment_stranger']:.3f})" for s in run.snapshots()]
    assert [row[0] for row in rows] == ["0", "1", "8", "64"]
    assert [row[3] for row in rows] == alignment
    assert text.count("<figure") == 4
    assert "Training and validation loss." in text
    assert of_snapshot.count("<figure") >= 2
    assert "one · step 64" in of_snapshot


def test_a_run_before_its_first_measurement_has_a_fragment(make_run, tmp_path, parse):
    run = make_run(tmp_path / "run", steps=(0,))
    assert "at birth" in snapshot_html(run.snapshots()[0])
    (run.snapshot(0) / "summary.json").unlink()
    (run.snapshot(0) / "arrays.safetensors").unlink()
    run.snapshot(0).rmdir()
    text = run_html(run)
    assert "nothing to draw yet" in text
    assert parse(text).rows == []


def test_keys_look_as_their_lines(parse):
    looks = "solid", "dashed", "dotted", "control", "band", "dots"
    series = [Series(np.arange(3.0), {"step": range(3)}, 0, look, look) for look in looks]
    text = object_html("M", [], [], pictures=[(CurvePanel("p", "P", series), "caption")])
    keys = {name: look for look, name in re.findall(r'<i style="([^"]*)"></i>([^<]*)<', text)}
    strokes = {name: re.findall(r"border-top:2px (\w+)", look) for name, look in keys.items()}
    assert strokes == {
        "solid": ["solid"], "dashed": ["dashed"], "dotted": ["dotted"], "control": ["dashed"], "band": [], "dots": [],
    }  # fmt: skip
    assert "height:.7em" in keys["band"]
    assert "border-radius" in keys["dots"]


def test_token_texts_and_names_are_escaped(make_snapshot):
    snapshot = make_snapshot(3, np.random.default_rng(0))
    assert "<b>" not in snapshot_html(snapshot, "<b>bold</b>")
    matrix = MatrixPanel("m", "M", ["var(--x)"], ["<b>"], np.ones((1, 1)))
    assert ">var(--x)<" in object_html("M", [], [], pictures=[(matrix, "caption")])
