"""The metric of docs/extending.md, in a real run: it shows wherever ours do."""

import csv
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import Seen
from rich.console import Console

import birthmark
from birthmark.data.probes import random_probe
from birthmark.measure.records import RunDir, read_metrics
from birthmark.models.birth import born
from birthmark.report.block_table import figures, print_snapshot
from birthmark.report.run_page import build_report
from birthmark.report.snapshot_table import print_table
from birthmark.trainer.run import pretrain


@pytest.fixture(scope="module")
def code():
    """The example."""
    page = (Path(birthmark.__file__).parent / "docs/extending.md").read_text()
    section = page.split("## A metric of your own")[1].split("\n## ")[0]
    (block,) = [block.split("```")[0] for block in section.split("```python\n")[1:]]
    return block


@pytest.fixture(scope="module")
def run(code, tiny, tmp_path_factory, no_snapshot_page):
    """A run of two steps with it, logged to W&B offline."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "value_norm.py").write_text(code)
    fields = {
        "snapshot.metrics": ["value_norm:ValueNorm"],
        "snapshot.probes": ["random", "text"],
        "log.wandb": "offline",
        "trainer.max_steps": 2,
    }
    with pytest.MonkeyPatch.context() as patch, no_snapshot_page():
        patch.chdir(folder)
        patch.delitem(sys.modules, "value_norm", raising=False)
        pretrain(tiny(fields), RunDir(folder / "run"))
    return RunDir(folder / "run")


def test_it_is_short(code):
    assert len([line for line in code.splitlines() if line.strip()]) <= 30


def test_it_is_in_every_snapshot(run, tiny):
    config = tiny()
    first, last = run.snapshots()
    with torch.no_grad():
        born(config.model, 3)(torch.from_numpy(random_probe(24, 10, 8, 0)), observer=(seen := Seen()))
    norms = torch.stack([attended.v_BHTK.double().norm(dim=-1).mean(0) for attended in seen.attended.values()])
    np.testing.assert_allclose(first.arrays["value_norm"], norms[..., 0] / norms[..., 1:].mean(-1), rtol=1e-5)
    for snapshot in (first, last):
        assert snapshot.bias["value_norm"] == pytest.approx(snapshot.arrays["value_norm"].mean())
        assert snapshot.summary["bias_text"]["value_norm"] == pytest.approx(snapshot.arrays["text.value_norm"].mean())
        assert snapshot.quantities["value_norm"].label == "value norm"


def test_it_is_logged_like_ours(run, offline_wandb):
    lines = [line for line in read_metrics(run.metrics) if "bias/value_norm" in line]
    assert [line["step"] for line in lines] == [0, 2]
    assert [line["bias/value_norm"] for line in lines] == [s.bias["value_norm"] for s in run.snapshots()]
    (start,) = offline_wandb(run.path)
    merged = start.logged
    last = run.snapshots()[-1]
    assert merged["bias/value_norm"] == merged["sink/value_norm"] == last.bias["value_norm"]
    assert merged["bias_text/value_norm"] == merged["sink/value_norm on text"]
    assert merged["sink/value_norm (no difference)"] == 1
    assert merged["bias/value_norm_by_head/_type"] == merged["bias/sink_mass_by_head/_type"] == "table-file"
    assert merged["sink/sink_mass (uniform)"] == last.bias["sink_uniform"]


def test_it_has_a_column_in_the_table_of_blocks(run):
    snapshot = run.snapshots()[-1]
    wide, narrow = (Console(width=width, file=io.StringIO()) for width in (250, 60))
    for console in (wide, narrow):
        print_snapshot(snapshot, console)
    assert "value norm" in wide.file.getvalue()
    assert "value norm" in narrow.file.getvalue().partition("no room for")[2].partition(":")[0]
    rows = figures(snapshot)["layers"]
    assert [row.get("value_norm") for row in rows] == [None, *snapshot.arrays["value_norm"].mean(1).tolist()]


def test_it_is_drawn_in_the_page_of_the_run_with_its_numbers(run, tmp_path):
    build_report([run], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "value norm" in page.lower()
    rows = [row for file in (tmp_path / "page-data").glob("*.csv") for row in csv.DictReader(file.open())]
    drawn = [float(row["value"]) for row in rows if row["quantity"] == "value_norm" and row.get("head")]
    assert set(np.float32(drawn)) >= set(np.float32(run.snapshots()[-1].arrays["value_norm"].ravel()))
    console = Console(width=200, file=io.StringIO())
    print_table(run, console)
    cells = console.file.getvalue().split()
    assert all(f"{snapshot.bias['value_norm']:.3f}" in cells for snapshot in run.snapshots())
