"""`birthmark audit`: its table, its page, and its errors."""

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from trained_suites import STEPS, exchange, weights_file

from birthmark.launch.cli import main
from birthmark.report.table import Cell, Column, Table
from birthmark.report.terminal import say


def test_what_is_no_suite_is_told_in_a_line(clean, capsys, tmp_path):
    for name, told in ((tmp_path, "no checkpoint in it"), (clean / "step-0", "one checkpoint is no suite")):
        assert main(["audit", str(name)]) == 2
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1
    assert main(["audit", str(tmp_path / "none")]) == 2
    assert "no such run, folder of checkpoints, or hub id" in capsys.readouterr().err
    assert main(["audit", ""]) == 2
    assert "'': a name is empty" in capsys.readouterr().err


def test_the_page_has_the_evidence_and_every_pair(suite, capsys, tmp_path):
    exchange(suite, 8, 12)
    weights_file(suite, 24).write_bytes(b"")
    (suite / "step-20").rename(suite / "<b>x")
    assert main(["audit", str(suite), "--out", str(tmp_path / "a.html")]) == 3
    assert capsys.readouterr().err == f"page: {tmp_path / 'a.html'}\n"
    page = (tmp_path / "a.html").read_text()
    assert "lies on the curve where step 12 should: the two are exchanged" in page
    assert "model.safetensors: is empty" in page
    assert "<b>x" not in page
    assert "&lt;b&gt;x" in page
    with (tmp_path / "a-data" / "pairs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * 5 // 2
    # Neighbours differ in the third digit.
    assert all(page.count(f">{float(row['cosine']):.3f}</td>") >= 2 for row in rows)
    a, b = (load_file(Path(rows[-1][name]) / "model.safetensors") for name in "ab")
    # Most tensors are small enough to be read whole.
    matrices = [name for name, tensor in a.items() if tensor.ndim > 1]
    cosines = [np.corrcoef(a[name].ravel(), b[name].ravel())[0, 1] for name in matrices]
    assert float(rows[-1]["cosine"]) == pytest.approx(np.mean(cosines), abs=1e-4)
    assert main(["audit", str(suite), "--out", str(tmp_path / "a.png")]) == 2
    assert "is no page; give a name that ends in .html" in capsys.readouterr().err


def test_checkpoints_that_are_listed_or_regular_and_absent_are_notes(suite, capsys, tmp_path):
    shutil.rmtree(suite / "step-12")
    (suite / "revisions.txt").write_text("".join(f"step-{step}\n" for step in (*STEPS, 28)) + "main\n\n")
    assert main(["audit", str(suite), "--out", str(tmp_path / "a.html")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("6 checkpoints of one birth: nothing is wrong with them\n")
    assert "step-24" in out
    assert "note: listed, and not in the suite: step-12, step-28\n" in out
    assert "note: not in the suite, whose steps are otherwise regular: step 12\n" in out
    assert "Listed, and not in the suite: step-12, step-28." in (tmp_path / "a.html").read_text()
    # A folder of a step without weights is a checkpoint that is missing.
    (suite / "step-12").mkdir()
    (suite / "logs").mkdir()
    assert main(["audit", str(suite)]) == 3
    assert "step-12: no weights in it\n" in capsys.readouterr().out


def test_a_spreadsheet_computes_no_name_of_a_checkpoint(suite, tmp_path, monkeypatch):
    (suite / "step-8").rename(suite / '=HYPERLINK("http:')
    monkeypatch.chdir(suite)
    assert main(["audit", *[path.name for path in suite.iterdir()], "--out", str(tmp_path / "a.html")]) == 0
    for name in ("checkpoints.csv", "pairs.csv"):
        with (tmp_path / "a-data" / name).open(newline="") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        assert "'=HYPERLINK(\"http:" in cells
        assert not any(cell.startswith("=") for cell in cells)


def test_names_of_strangers_reach_no_terminal_as_they_are(suite, capsys, tmp_path):
    """OSC 52 would write the clipboard, and CSI 2 J erase the screen."""
    escape = "\x1b]52;c;cm0=\x07\x1b[2J\x9b1m"
    file = weights_file(suite, 8)
    save_file(load_file(file) | {f"a{escape}": torch.full((8, 8), float("nan"))}, file)
    (suite / "step-20").rename(suite / f"x{escape}")
    assert main(["audit", str(suite)]) == 3
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert rf"a{escape.encode('unicode_escape').decode()} has 64 NaN or inf" in out
    assert main(["audit", str(suite), "--json"]) == 3
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert str(suite / f"x{escape}") in {one["name"] for one in json.loads(out)["checkpoints"]}
    folder = suite / f"x{escape}"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": f"x{escape}", "auto_map": {"AutoConfig": "a.b"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["describe", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("birthmark: error: ")
    assert error.removesuffix("\n").isprintable()


def test_the_colours_of_a_terminal_stay(monkeypatch):
    """Colours that rich adds to a text are no part of the text."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=60)
    say(console, "a\x1b[2J\tb", style="red")
    Table([Column("name", "name")], [[Cell("c\x1b[2J", look="green")]]).print(console)
    written = console.file.getvalue()
    assert written.startswith("\x1b[31ma\\x1b[2J ")
    assert "\x1b[32mc\\x1b[2J\x1b[0m" in written
