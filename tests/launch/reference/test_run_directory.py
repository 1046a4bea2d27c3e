"""The tables of docs/quantities.md and of docs/run-directory.md are true of a run."""

import re

import pytest

from birthmark.launch.reference import quantities_page, run_directory
from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.records import RunDir
from birthmark.metrics.quantities import MEASURED
from birthmark.report.csv_files import COLUMNS
from birthmark.report.run_page import build_pages
from birthmark.trainer.run import pretrain


def rows(page, table):
    """Cells of a table of a page."""
    text = page.FILE.read_text(encoding="utf-8").split(f"<!-- table: {table} -->\n")[1].split("<!-- end -->")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()[2:]]


def names(page, table):
    """First cells of a table of a page."""
    return [re.search(r"`([^`]+)`", cells[0])[1] for cells in rows(page, table)]


def measured(column):
    """Names of the quantities of a snapshot that have a scalar or an array, by the column that says so."""
    tables = set(quantities_page.TABLES) - {"logged", "thresholds", "terms"}
    every = [cells for table in tables for cells in rows(quantities_page, table)]
    return {cells[0].strip("`") for cells in every if cells[column] != "–"}


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run with all that it may leave."""
    run = RunDir(tmp_path_factory.mktemp("run") / "run")
    fields = {"trainer.max_steps": 2, "snapshot.fingerprint.n_inputs": 20, "snapshot.fingerprint.seq_len": 8}
    pretrain(tiny(fields | {"snapshot.fingerprint.enabled": True}), run)
    return run


def test_everything_that_a_run_holds_is_in_the_tables(run):
    for snapshot in run.snapshots():
        assert set(snapshot.bias) <= measured(column=2)
        assert set(snapshot.arrays) <= measured(column=1)
    logged = {key for line in read_metrics(run.metrics) for key in line} - {"step"}
    assert {key for key in logged if not key.startswith("bias/")} <= set(names(quantities_page, "logged"))
    assert {"train/loss", "val/loss", "seedprint/z"} <= logged


def test_csv_columns_are_those_of_the_report():
    assert names(run_directory, "columns") == list(COLUMNS)


def test_every_quantity_of_a_snapshot_is_in_a_table_with_what_it_gives():
    assert measured(column=1) == {q.name for q in MEASURED.values() if q.has_array}
    assert measured(column=2) == {q.name for q in MEASURED.values() if q.has_scalar}


def test_figures_that_the_page_of_quantities_names_are_drawn(run):
    page = quantities_page.FILE.read_text(encoding="utf-8")
    drawn = " ".join(re.findall(r"^\*\*Drawn\*\*.*", page, re.MULTILINE))
    build_pages([run], run.report)
    folders = (run.path, run.snapshot(run.snapshots()[-1].step))
    files = {file.stem for folder in folders for file in (folder / "report-data").iterdir()}
    assert set(re.findall(r"`([\w-]+)`", drawn)) - files == set()
