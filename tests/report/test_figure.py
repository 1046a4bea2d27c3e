"""A figure for a paper: found by name, at the size that was asked for, in the format of its file."""

import re
import shutil
import struct

import pytest

from birthmark.errors import UsageError
from birthmark.launch.cli import main
from birthmark.launch.commands import figure as command
from birthmark.measure.records import RunDir
from birthmark.report.figure import NAMES, save_figure

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
