"""Pages of a model in which some blocks have experts: their hidden units are not seen."""

import dataclasses
import re

import numpy as np
import pytest

from birthmark.data.probes import random_probe
from birthmark.findings.run_history import RunHistory
from birthmark.measure.measurement import measure
from birthmark.measure.records import Snapshot
from birthmark.models.birth import born
from birthmark.models.config import ExpertsConfig, ModelConfig
from birthmark.report.charts.stills import Across, x_ticks
from birthmark.report.run_page import about_run
from birthmark.report.sections.neurons import NEURONS
from birthmark.report.sections.snapshot_view import SnapshotView


@pytest.mark.parametrize("n_dense", [1, None])
def test_units_of_dense_blocks_are_drawn_and_listed_alone(n_dense):
    experts = ExpertsConfig(n_experts=3, d_ff=8, n_dense=n_dense)
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=40, max_seq_len=6, experts=experts)
    found = measure(born(config, 0), random_probe(40, 8, 6, 0))
    view = SnapshotView("here", Snapshot({"step": 0, "bias": found.scalars, "unseen": [*found.unseen]}, found.arrays))
    section = NEURONS.section_in_snapshot(view, [])
    if n_dense is None:
        assert section is None
        return
    units = [listing for listing in section.listings if listing.title == "Units of largest z"]
    rows = [[cell.text(column) for column, cell in zip(units[0].table.columns, row, strict=True)]
            for row in units[0].table.cells]  # fmt: skip
    assert {row[0] for row in rows} == {"1"}
    assert all(re.fullmatch(r"\d+", row[1]) for row in rows)
    assert any(picture.file.startswith("neurons-units") for picture in section.pictures)


def test_a_runs_first_line_says_which_experts_it_has():
    run = RunHistory.of_snapshot(Snapshot({"step": 0, "bias": {}}, {}))
    for n, said in ((None, "MLP gelu"), (3, "MLP gelu · 3 experts, 2 for each token")):
        config = ModelConfig(d_model=16, n_layers=2, n_heads=2, mlp="gelu", experts=ExpertsConfig(n))
        about = about_run(dataclasses.replace(run, birth={"model": dataclasses.asdict(config)}))
        assert f"2 blocks of 2 heads · width 16 · {said} · vocabulary" in about


@pytest.mark.parametrize("blocks", [[2], [1, 2], [*range(1, 40)]])
def test_blocks_are_whole_numbers_also_where_one_has_experts(blocks):
    ticks = x_ticks(Across(np.array(blocks, dtype=float)))
    assert ticks
    assert set(ticks) <= set(blocks)
