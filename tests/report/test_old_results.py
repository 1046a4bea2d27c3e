"""Results of version 0.1, before quantities were declared: `results_of_0_1` is what its `pretrain` left of a small run
(without its checkpoints and its HTML), and opens in the report of today with the numbers of its own pages."""

import io
import shutil
from pathlib import Path

import pytest
from pages import rows, values
from rich.console import Console

from birthmark.launch.cli import main
from birthmark.measure.records import RunDir
from birthmark.report.notebook import run_html, snapshot_html
from birthmark.report.snapshot_table import print_table

pytestmark = pytest.mark.heavy

STORED = Path(__file__).parent / "results_of_0_1"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A copy of it; the command draws its page and that of its newest snapshot anew."""
    run = RunDir(tmp_path_factory.mktemp("old") / "old-run")
    shutil.copytree(STORED, run.path)
    for folder in (run.path, run.snapshot(4)):
        shutil.rmtree(folder / "report-data")
    assert main(["report", str(run.path)]) == 0
    return run


@pytest.mark.parametrize("page", [".", "snapshots/step-00000004"], ids=["over training", "one snapshot"])
def test_its_pages_show_the_numbers_of_then(run, page):
    then, now = (root / page for root in (STORED, run.path))
    names, found = (sorted(path.name for path in (folder / "report-data").iterdir()) for folder in (then, now))
    assert found == names != []
    for name in names:
        old, new = ([{**row, "value": ""} for row in rows(folder, name)] for folder in (then, now))
        assert new == old, name
        assert values(now, name) == pytest.approx(values(then, name), rel=1e-12, nan_ok=True), name


def test_its_table_and_fragments_are_made(run, parse):
    console = Console(file=io.StringIO(), width=200)
    print_table(run, console)
    newest = run.snapshots()[-1].bias
    assert f"{newest['alignment']:.3f} ({newest['alignment_stranger']:.3f})" in console.file.getvalue()
    assert len([row for row in parse(run_html(run)).rows if row]) == 2
    assert "step 4" in snapshot_html(run.snapshots()[-1])
