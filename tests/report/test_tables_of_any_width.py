"""Tables: on narrow terminals every cell, heading and name is somewhere; all outputs have the same cells."""

import csv
import io
import itertools
import math

import numpy as np
import pytest
from markupsafe import Markup
from rich.console import Console

from birthmark.findings.run_history import read_runs
from birthmark.measure.model_pairs import AllPairs, Compared
from birthmark.measure.records import Snapshot
from birthmark.report.block_table import print_snapshot
from birthmark.report.charts.chart_page import render_page
from birthmark.report.compared_models import print_compared
from birthmark.report.snapshot_table import print_table as print_snapshots
from birthmark.report.table import Cell, Column, Table

NAMES = [f"/models/a-suite-whose-names-are-long/model-{i}-after-step-{1000 * i}" for i in range(4)]


def shown(width, columns, rows, **keywords):
    console = Console(width=width, file=io.StringIO())
    Table(columns, rows).print(console, **keywords)
    return console.file.getvalue()


def missing_in(text, *cells):
    """Cells that a text lacks, the breaks of its lines aside."""
    plain = "".join(text.split())
    return [cell for cell in cells if "".join(cell.split()) not in plain]


@pytest.mark.parametrize("width", [200, 80, 60, 30])
@pytest.mark.parametrize("n_numbers", [1, 6, 30, 96])
def test_no_cell_is_lost(width, n_numbers):
    columns = [Column("model", "name"), *(Column(f"block {i}") for i in range(1, n_numbers + 1))]
    rows = [[name, *(f"{i}.{place:03}" for i in range(1, n_numbers + 1))] for place, name in enumerate(NAMES)]
    text = shown(width, columns, rows, title="a title")
    assert all(len(line) <= width for line in text.splitlines() if not line.endswith(tuple(NAMES)))
    cells = [cell for row in rows for cell in row]
    assert missing_in(text, "a title", *(column.title for column in columns), *cells) == []


def test_what_fits_is_one_table_of_whole_names():
    text = shown(120, [Column("model", "name"), Column("loss")], [[name, "1"] for name in NAMES])
    assert [line.split() for line in text.splitlines()[2:]] == [[name, "1"] for name in NAMES]


def test_names_give_up_no_more_than_they_must():
    columns = [Column("model", "name"), Column("loss")]
    names = NAMES[1:]
    rows = [[name, "1.2345"] for name in names]
    widest = max(len(line) for line in shown(200, columns, rows).splitlines())
    lines = shown(widest - 3, columns, rows).splitlines()
    assert {len(line) for line in lines[2:5]} == {widest - 3}
    assert lines[5:] == [f"{line.split()[0]}  {name}" for line, name in zip(lines[2:5], names, strict=True)]


def test_names_that_would_be_one_are_numbered():
    names = [f"{'a' * 40}{middle}{'b' * 40}" for middle in "xyz"]
    text = shown(40, [Column("model", "name"), Column("loss")], [[name, "1"] for name in names])
    assert [line.split() for line in text.splitlines()[2:]] == [
        *([f"[{i}]", "1"] for i in (1, 2, 3)),
        *([f"[{i}]", name] for i, name in enumerate(names, 1)),
    ]


def test_a_style_and_what_rich_would_read_as_one_stay():
    console = Console(width=40, file=io.StringIO(), force_terminal=True, color_system="standard")
    Table([Column("m", "name"), Column("v", "text")], [["[red]x", Cell("kin", look="green")]]).print(console)
    assert "[red]x" in console.file.getvalue()
    assert "\x1b[32mkin\x1b[0m" in console.file.getvalue()


def test_every_output_has_the_same_cells(parse):
    columns = [Column("run", "name"), Column("validation\nloss", format=".2f", key="val_loss", beside="birth")]
    columns += [Column("verdict", "text"), Column("findings", "prose"), Column("token", "token")]
    rows = [
        ["a|b", Cell(1.234567, "9.00"), Cell("wrong", strong=True), ("is <old>", "is late"), "<x>"],
        ["c", math.nan, "right", (), "y" * 50],
    ]
    table = Table(columns, rows)
    read = list(csv.reader(io.StringIO(table.csv())))
    assert read[0] == ["run", "val_loss", "verdict", "findings", "token"]
    assert read[1:] == [["a|b", "1.234567", "wrong", "is <old> | is late", "<x>"], ["c", "", "right", "", "y" * 50]]
    head, rule, *lines = table.without("token").markdown().splitlines()
    assert (head, rule) == ("| run | validation loss | verdict | findings |", "|---|---:|---|---|")
    assert lines == ["| a\\|b | 1.23 | **wrong** | is <old>, is late |", "| c | – | right |  |"]
    page = parse(render_page("page", [table]))
    assert [[cell.strip() for cell in row] for row in page.table(5)] == [
        ["a|b", "1.23 (9.00)", "wrong", "is <old>is late", "<x>"], ["c", "–", "right", "", "y" * 31 + "…"],
    ]  # fmt: skip
    assert [line.split() for line in shown(80, columns[:2], [row[:2] for row in rows]).splitlines()[3:]] == [
        ["a|b", "1.23", "(9.00)"], ["c", "–"],
    ]  # fmt: skip
    assert [line.split() for line in shown(17, columns[:2], [row[:2] for row in rows]).splitlines()[3:5]] == [
        ["a|b", "1.23"], ["c", "–"],
    ]  # fmt: skip


def test_markup_is_escaped_unless_it_was_made_as_such(parse):
    rows = [["<b>", Markup("<b>bold</b>")]]
    page = render_page("page", [Table([Column("x", "text"), Column("y", "text")], rows)])
    assert '<td class="text">&lt;b&gt;</td><td class="text"><b>bold</b></td>' in page


def test_records_give_the_columns_that_are_asked_for():
    records = [{"a": 1, "other": 2}, {"other": 3}]
    assert Table.of([Column("A", key="a")], records).csv() == 'a\n1\n""\n'


@pytest.mark.parametrize("width", [200, 80, 60])
def test_compared_models_keep_their_names_and_figures(width):
    rng = np.random.default_rng(0)
    n, length = len(NAMES), 5
    cka = {(a, b): rng.random((31, 31)) for a, b in itertools.combinations(range(n), 2)}
    pairs = AllPairs(NAMES, cka, rng.random((n, n, length)), rng.random((n, n)), rng.random((n, length)))
    console = Console(width=width, file=io.StringIO())
    print_compared([Compared(None, pairs, [])], {"kind": "text", "n_sequences": 2, "seq_len": length}, console)
    text = console.file.getvalue()
    short = [name.rpartition("/")[2] for name in NAMES]
    figures = [f"{kl:.4g}" for kl in pairs.mean_kl()[~np.eye(n, dtype=bool)]]
    figures += [f"{loss:.4f}" for loss in pairs.mean_loss()]
    headings = ["CKA,", "last states", "KL(A ‖ B)", "KL(B ‖ A)", "loss of A", "loss of B"]
    assert missing_in(text, *headings, *short, *figures) == []


@pytest.mark.parametrize("width", [200, 80, 60, 40])
@pytest.mark.parametrize("n_layers", [30, 96])
def test_a_column_of_blocks_is_in_the_table_or_said_to_be_left_out(width, n_layers, make_snapshot):
    found = make_snapshot(5, np.random.default_rng(0), n_layers=n_layers, n_heads=9)
    probe = {"n_sequences": 2, "seq_len": 16, "dtype": "float32"}
    arrays = found.arrays | {f"text.{name}": array for name, array in found.arrays.items()}
    console = Console(width=width, file=io.StringIO())
    print_snapshot(Snapshot(found.summary | {"probe": probe, "seconds": 1.0}, arrays), console)
    text = console.file.getvalue()
    headings = ["inter", "intra", "mass", "most in", "n_eff", "super", "largest", "rank", "lock", "on text"]
    assert missing_in(text, *headings) == []
    firsts = [line.split()[0] for line in text.splitlines() if line.split()]
    assert "embed" in firsts
    assert str(n_layers) in firsts
    assert ("no room for" in text) == (width < 200)
    # What is never left out keeps all its digits.
    assert missing_in(text, *(f"{value:.3f}" for value in arrays["inter_mlp"])) == []


@pytest.mark.parametrize(("width", "left_out"), [(200, False), (50, True), (30, True)])
def test_a_column_of_snapshots_is_in_the_table_or_said_to_be_left_out(width, left_out, make_run, tmp_path):
    run = make_run(tmp_path / "run")
    console = Console(width=width, file=io.StringIO())
    print_snapshots(run, console)
    text = console.file.getvalue()
    assert ("no room for" in text) == left_out
    assert ("controls" in text) == left_out
    losses = [row["val_loss"] for row in read_runs([run])[0].rows if row["val_loss"] is not None]
    assert missing_in(text, "step", "sink", *(f"{loss:.3f}" for loss in losses)) == []
