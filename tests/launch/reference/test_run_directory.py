"""The tables of docs/run-directory.md are true of a run."""

import re

import pytest

from birthmark.launch.reference.run_directory import FILE
from birthmark.measure.records import RunDir, read_metrics
from birthmark.report.csv_files import COLUMNS
from birthmark.trainer.run import pretrain

PAGE = FILE.read_text(encoding="utf-8")


def names(table):
    """First cells of a table of the page."""
    text = PAGE.split(f"<!-- table: {table} -->\n")[1].split("<!-- end -->")[0]
    return [re.search(r"`([^`]+)`", line)[1] for line in text.splitlines()[2:]]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run with all that it may leave."""
    run = RunDir(tmp_path_factory.mktemp("run") / "run")
    fields = {"trainer.max_steps": 2, "snapshot.fingerprint.n_inputs": 20, "snapshot.fingerprint.seq_len": 8}
    pretrain(tiny(fields | {"snapshot.fingerprint.enabled": True}), run)
    return run


def test_everything_that_a_run_holds_is_in_the_tables(run):
    for snapshot in run.snapshots():
        assert set(snapshot.bias) <= set(names("scalars"))
        assert set(snapshot.arrays) <= set(names("arrays"))
    logged = {key for line in read_metrics(run.metrics) for key in line} - {"step"}
    assert {key for key in logged if not key.startswith("bias/")} <= set(names("logged"))
    assert {"train/loss", "val/loss", "seedprint/z"} <= logged


def test_csv_columns_are_those_of_the_report():
    assert names("columns") == list(COLUMNS)
