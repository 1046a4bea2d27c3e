"""What is declared is shown: sections come from one table, and a quantity without a picture of its own gets those that
its axes ask for, in both pages, the tables and the CSV files."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from pages import values
from rich.console import Console

import birthmark
from birthmark.errors import RunError
from birthmark.measure.records import Snapshot
from birthmark.metrics.quantities import LOGGED, MEASURED, SECTIONS
from birthmark.metrics.quantity import AXES, Column, Quantity
from birthmark.report.block_table import figures, print_snapshot
from birthmark.report.csv_files import COLUMNS
from birthmark.report.notebook import run_html
from birthmark.report.run_page import build_pages, build_report, summarise
from birthmark.report.sections.chain import LINKS
from birthmark.report.snapshot_page import build_snapshot_page
from birthmark.report.snapshot_table import print_table

pytestmark = pytest.mark.heavy

L, H, T, F = 3, 2, 16, 40
MINE = (
    Quantity("level", definition="A scalar.", section="My idea", control="floor", control_label="floor", format=".2f"),
    Quantity("floor", definition="Its control.", section="My idea", over_training=None),
    Quantity("gain", ("layer",), definition="Of blocks.", section="My idea", scale="log", control=1.0),
    Quantity("depth", ("state",), definition="Of states.", section="My idea", unit="nats"),
    Quantity("norm", ("layer", "head"), definition="Of heads.", section="sink", scalar="mean", per_block="mean"),
    Quantity("trace", ("position",), definition="Of positions.", section="My idea"),
    Quantity("path", ("state", "position"), definition="Of states and positions.", section="my idea"),
    Quantity("gaze", ("layer", "head", "position"), definition="Of all.", section=""),
    Quantity("unit_norm", ("layer", "unit"), definition="Of units.", section=""),
    Quantity("pair", ("stranger", "token"), definition="Of no picture.", section=""),
)
SHAPES = {"layer": L, "state": L + 1, "head": H, "position": T, "unit": F, "stranger": 2, "token": 120}


def with_mine(snapshot, seed):
    """The snapshot with a user's quantities on both probes, as their metrics leave them."""
    rng = np.random.default_rng(seed)
    arrays, scalars = dict(snapshot.arrays), {"": {}, "text.": {}}
    for q in MINE:
        for prefix in scalars:
            if q.axes:
                arrays[prefix + q.name] = rng.random([SHAPES[axis] for axis in q.axes])
            if q.has_scalar:
                array = arrays.get(prefix + q.name)
                scalars[prefix][q.name] = float(rng.random() if array is None else array.mean())
    bias = snapshot.bias | scalars[""]
    more = {"bias": bias, "bias_text": scalars["text."], "quantities": [q.to_json() for q in MINE]}
    return Snapshot(snapshot.summary | {"n_layers": L, "n_heads": H} | more, arrays)


@pytest.fixture(scope="module")
def run(make_run, tmp_path_factory):
    """A run whose every snapshot holds them."""
    run = make_run(tmp_path_factory.mktemp("declared") / "run", steps=(0, 4, 9))
    for snapshot in run.snapshots():
        with_mine(snapshot, snapshot.step).write(run.snapshot(snapshot.step))
    return run


@pytest.fixture(scope="module")
def pages(run):
    """Texts of its page and of its newest snapshot's."""
    build_pages([run], run.report)
    return run.report.read_text(), (run.snapshot(9) / "report.html").read_text()


def sections_of(text):
    return re.findall(r'<section id="([\w-]+)"', text)


def test_the_table_of_links_is_that_of_the_declared_sections():
    assert [link.id for link in LINKS] == ["loss", "evaluation", *SECTIONS, "speed"]


def test_links_draw_quantities_that_are_declared_in_their_section():
    declared = {**LOGGED, **MEASURED}
    drawn = [(link.id, name) for link in LINKS for name in link.quantities]
    assert len({name for _, name in drawn}) == len(drawn)
    assert [(section, name) for section, name in drawn if declared[name].section != section] == []


def test_the_page_of_quantities_names_the_sections_of_the_pages():
    page = (Path(birthmark.__file__).parent / "docs" / "quantities.md").read_text(encoding="utf-8")
    drawn = " ".join(re.findall(r"^\*\*Drawn\*\*.*", page, re.MULTILINE))
    assert set(re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", drawn)) == {link.title for link in LINKS}


def test_every_axis_has_a_column():
    assert {axis.column for axis in AXES.values()} <= set(COLUMNS)


def test_both_pages_take_their_sections_from_the_table(pages):
    of_run, of_snapshot = pages
    order = [link.id for link in LINKS]
    nowhere = {"evaluation", "lineage", "outliers", "gradient"}
    for text, missing in (
        (of_run, nowhere), (of_snapshot, nowhere | {"loss", "neurons", "direction", "persistence", "speed"}),
    ):  # fmt: skip
        ours = [section for section in sections_of(text) if section in order]
        assert ours == [section for section in order if section in {*order} - missing]
        linked = re.findall(r'<li><a href="#([\w-]+)">', text)
        assert [name for name in linked if name in SECTIONS] == [name for name in ours if name in SECTIONS]


def test_sections_of_ones_own_stand_behind_ours_and_are_linked(pages):
    for text in pages:
        own = [section for section in sections_of(text) if section.startswith("own")]
        assert own == ["own-my-idea", "own-my-idea-2", "own"]
        assert re.findall(r'<li><a href="#(own[\w-]*)">([^<]*)<', text) == [
            ("own-my-idea", "My idea"),
            ("own-my-idea-2", "my idea"),
            ("own", "Other quantities"),
        ]


def test_over_training_every_declared_axis_has_its_picture(run, pages):
    folder, snapshots = run.path, run.snapshots()
    for q in ("level", "norm"):
        name = {"level": "own-my-idea-level", "norm": "sink-norm"}[q]
        for group, probe in (("bias", "random"), ("bias_text", "text")):
            held = values(folder, f"{name}.csv", quantity=f"{group}/{q}")
            assert held == [s.summary[group][q] for s in snapshots], probe
    assert values(folder, "own-my-idea-level.csv", quantity="bias/floor") == [s.bias["floor"] for s in snapshots]
    for prefix, end in (("", ""), ("text.", "-text")):

        def arrays(name, prefix=prefix):
            return [s.arrays[prefix + name] for s in snapshots]

        def held(name, end=end, **where):
            return values(folder, f"{name}{end}.csv", **where)

        assert held("own-my-idea-gain-blocks") == np.ravel(arrays("gain")).tolist()
        assert held("own-my-idea-depth-blocks") == np.ravel(arrays("depth")).tolist()
        assert held("own-my-idea-depth-blocks", layer=0) == [a[0] for a in arrays("depth")]
        assert held("sink-norm-blocks") == pytest.approx(np.ravel([a.mean(1) for a in arrays("norm")]), rel=1e-12)
        assert held("sink-norm-heads") == np.ravel(arrays("norm")).tolist()
        assert held("sink-norm-map", step=9) == arrays("norm")[-1].ravel().tolist()
        assert held("own-my-idea-trace-position", step=0) == arrays("trace")[0].tolist()
        assert held("own-my-idea-2-path-position", step=9) == arrays("path")[-1].ravel().tolist()
        expected = arrays("gaze")[-1].mean(1).ravel()
        assert held("own-gaze-position", step=9) == pytest.approx(expected, rel=1e-12)
        assert held("own-unit_norm-unit", step=9, layer=1) == arrays("unit_norm")[-1][0].tolist()
    assert "<small>depth (nats)</small>" in pages[0]
    assert all("No picture is made of pair [S, V]: arrays.safetensors holds it as pair." in text for text in pages)


def test_in_one_snapshot_every_declared_axis_has_its_picture(run, pages):
    folder, snapshot = run.snapshot(9), run.snapshots()[-1]
    for prefix, end in (("", ""), ("text.", "-text")):

        def held(name, end=end, **where):
            return values(folder, f"{name}{end}.csv", **where)

        a = {name.removeprefix(prefix): array for name, array in snapshot.arrays.items() if name.startswith(prefix)}
        assert held("own-my-idea-gain-blocks", quantity="gain") == a["gain"].tolist()
        assert held("own-my-idea-gain-blocks", quantity="level") == [1, 1]
        assert held("own-my-idea-depth-blocks") == a["depth"].tolist()
        assert held("sink-norm-map") == a["norm"].ravel().tolist()
        assert held("own-my-idea-trace-position") == a["trace"].tolist()
        assert held("own-my-idea-2-path-position") == a["path"].ravel().tolist()
        assert held("own-gaze-position") == a["gaze"].ravel().tolist()
        assert held("own-unit_norm-unit") == a["unit_norm"].ravel().tolist()
    (level,) = values(folder, "own-my-idea-scalars.csv", quantity="level", probe="text")
    assert level == snapshot.summary["bias_text"]["level"]
    assert values(folder, "sink-scalars.csv") == [snapshot.summary[g]["norm"] for g in ("bias", "bias_text")]
    assert "floor " + format(snapshot.bias["floor"], ".2f") in pages[1]


def test_tables_have_a_column_of_each_scalar_with_its_control(run, pages, parse):
    console = Console(file=io.StringIO(), width=200)
    print_table(run, console)
    printed = console.file.getvalue()
    newest = run.snapshots()[-1].bias
    with_control = f"{newest['level']:.2f} ({newest['floor']:.2f})"
    assert with_control in printed
    assert f"{newest['norm']:.3f}" in printed
    snapshots = re.search(r'<section id="snapshots">.*?</section>', pages[0], re.S)[0]
    for text in (snapshots, run_html(run)):
        assert with_control in next(row for row in parse(text).rows if row and row[0].endswith("9"))
    assert "floor" not in [heading.strip() for heading in re.findall(r'<th scope="col">([^<]*)<', pages[0])]
    assert summarise([run])["runs"][0]["rows"][-1]["level"] == newest["level"]
    console = Console(file=io.StringIO(), width=60)
    print_table(run, console)
    assert with_control not in console.file.getvalue()


def test_the_table_of_blocks_has_their_columns_or_says_that_they_are_left_out(run):
    (*_, taken), probe = run.snapshots(), {"n_sequences": 2, "seq_len": T, "dtype": "float32"}
    snapshot = Snapshot(taken.summary | {"probe": probe, "seconds": 1.0}, taken.arrays)
    wide, narrow = (Console(width=width, file=io.StringIO()) for width in (350, 60))
    for console in (wide, narrow):
        print_snapshot(snapshot, console)
    assert "gain" in wide.file.getvalue()
    assert "gain" in narrow.file.getvalue().partition("no room for")[2].partition(":")[0]
    # Others have a number for each position too, and no rule that makes one of them.
    assert not {"path", "gaze"} & figures(snapshot)["layers"][1].keys()
    found = [row.get("norm") for row in figures(snapshot)["layers"]]
    assert found == [None, *snapshot.arrays["norm"].mean(1).tolist()]


def test_a_new_quantity_of_ours_needs_its_declaration_alone(make_run, tmp_path, monkeypatch, parse):
    quantity = Quantity(
        "crowd", ("layer", "head"), definition="New.", section="lock", scalar="max", over_training=Column("crowd %", 9)
    )
    monkeypatch.setitem(MEASURED, "crowd", quantity)
    run = make_run(tmp_path / "run", steps=(0, 5), only=())
    for snapshot in run.snapshots():
        arrays = {**snapshot.arrays, "crowd": np.full((L, H), 0.5 + snapshot.step)}
        bias = snapshot.bias | {"crowd": 0.5 + snapshot.step}
        Snapshot(snapshot.summary | {"bias": bias}, arrays).write(run.snapshot(snapshot.step))
    build_pages([run], run.report)
    assert values(run.path, "lock-crowd.csv") == [0.5, 5.5]
    assert values(run.path, "lock-crowd-heads.csv") == [0.5] * L * H + [5.5] * L * H
    assert values(run.snapshot(5), "lock-crowd-map.csv") == [5.5] * L * H
    page = parse(run.report.read_text())
    assert "crowd %" in [text.strip() for text in page.text]


def test_a_picture_of_ones_own_takes_no_name_of_ours(make_run, tmp_path):
    quantity = Quantity("map", ("layer", "head"), definition="A name that is taken.", section="sink")
    run = make_run(tmp_path / "run", steps=(0,), only=("sink_mass",))
    (snapshot,) = run.snapshots()
    mine = {"quantities": [quantity.to_json()]}
    Snapshot(snapshot.summary | mine, {**snapshot.arrays, "map": np.ones((L, H))}).write(tmp_path / "s")
    text = build_snapshot_page(tmp_path / "s").read_text()
    assert values(tmp_path / "s", "sink-own-map-map.csv") == [1] * L * H
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))


def test_a_shape_that_changed_on_the_way_is_drawn_from_then_on(make_run, tmp_path):
    quantity = Quantity("wide", ("layer", "head"), definition="Of a metric that was changed.", section="sink")
    run = make_run(tmp_path / "run", steps=(0, 2, 4, 6), only=())
    for snapshot in run.snapshots():
        arrays = {**snapshot.arrays, "wide": np.full((L, 1 if snapshot.step < 4 else 2), 1.0 * snapshot.step)}
        mine = {"quantities": [quantity.to_json()]}
        Snapshot(snapshot.summary | mine, arrays).write(run.snapshot(snapshot.step))
    build_report([run], tmp_path / "report.html")
    assert values(tmp_path, "sink-wide-heads.csv") == [4.0] * L * 2 + [6.0] * L * 2


def test_an_array_that_is_not_as_declared_is_named(make_run, tmp_path):
    quantity = Quantity("odd", ("layer", "head"), definition="Of another shape.", section="sink")
    run = make_run(tmp_path / "run", steps=(0,), only=())
    (snapshot,) = run.snapshots()
    mine = {"quantities": [quantity.to_json()]}
    Snapshot(snapshot.summary | mine, {**snapshot.arrays, "odd": np.ones(L)}).write(tmp_path / "s")
    with pytest.raises(RunError, match=r"arrays.safetensors: damaged \(odd has 1 dimensions instead of 2"):
        build_snapshot_page(tmp_path / "s")
