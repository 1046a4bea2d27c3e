"""Sections of evaluations, beside the sink and over chance; and those of a model in which some blocks have experts."""

import csv
import dataclasses
import inspect
import re
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from birthmark.data.probes import random_probe
from birthmark.findings.attention_sink import chain_group
from birthmark.findings.inactive_sections import why_inactive
from birthmark.findings.run_history import BIRTH, RunHistory, read_runs
from birthmark.measure.measurement import measure
from birthmark.measure.metrics_log import append_metrics
from birthmark.measure.records import Snapshot
from birthmark.models.birth import born
from birthmark.models.config import ExpertsConfig, ModelConfig
from birthmark.report.block_table import _table, layers
from birthmark.report.charts import run_panels
from birthmark.report.charts.lines import Across, x_ticks
from birthmark.report.charts.run_panels import panels_of_runs
from birthmark.report.charts.specs import CurvePanel, Series
from birthmark.report.charts.stills import still
from birthmark.report.html_page import navigation
from birthmark.report.run_page import about_run
from birthmark.report.sections.chain import sections_over_training
from birthmark.report.sections.neurons import NEURONS
from birthmark.report.sections.section import csv_numbers, csv_texts
from birthmark.report.sections.snapshot_view import SnapshotView
from birthmark.report.sections.training_view import TrainingView
from birthmark.report.snapshot_table import print_table
from birthmark.report.verdicts import run_figures

STEPS = (0, 4, 8)


def sections_of(run):
    return {section.id: section for section in sections_over_training(TrainingView(read_runs([run])))}


def test_scores_stand_beside_the_sink_and_over_chance(make_run, tmp_path):
    run = make_run(tmp_path / "run", steps=STEPS)
    assert "evaluation" not in sections_of(run)
    for step in STEPS:
        scores = {"acc": step / 10, "acc_norm": step / 20, "acc_stderr": 0.1, "chance": 0.25, "exact_match/strict": 0.5}
        line = {f"eval/a task/{name}": value for name, value in scores.items()}
        append_metrics(run.metrics, step, {**line, "eval/held/bits_per_byte": 3 - step / 10})
    section = sections_of(run)["evaluation"]
    first, *others = [picture.caption for picture in section.pictures]
    assert first == "a task: accuracy."
    assert others == ["Sink mass at the same steps.", "a task: exact match/strict.", "held: bits per byte."]
    rows = list(csv.DictReader(csv_texts([section])["evaluation-a-task-acc.csv"].splitlines()))
    found = {(row["quantity"], row["step"]): float(row["value"]) for row in rows}
    assert found["eval/a task/acc", "8"] == 0.8
    assert found["eval/a task/acc_norm", "8"] == 0.4
    assert found["level", "0"] == 0.25
    panels = panels_of_runs(read_runs([run]), BIRTH)["evaluation"]
    assert [[series.name for series in panel.series] for panel in panels] == [["a task", "chance"], ["held"]]


class Everything:
    def __contains__(self, name):
        return True


@pytest.mark.parametrize("n_heads", [1, 2])
def test_files_that_panels_name_are_those_of_the_sections(n_heads, make_run, tmp_path):
    """A name that no section has would take the link off without a word."""
    levels = {"inter": 0.4, "intra": 0.6, "variance_discrepancy": 1.5, "dominance_first": 4.0, "dominance_median": 2.0}
    levels |= {"qk_cosine": 0.3, "document_sink_mass": 0.2, "document_sink_uniform": 0.1}
    run = make_run(tmp_path / "run", steps=STEPS, n_heads=n_heads, **levels)
    for step in STEPS:
        names = ("val/loss_trigger", "seedprint/z", "seedprint/z_stranger", "seedprint/weights")
        append_metrics(run.metrics, step, {**dict.fromkeys(names, 2.0), "seedprint/weights_stranger": 0.1})
    (history,) = read_runs([run])
    sections = sections_over_training(TrainingView([history]))
    panels = [panel for found in panels_of_runs([history], BIRTH, Everything()).values() for panel in found]
    named = {panel.csv for panel in panels} - {""}
    files, in_place = csv_numbers(sections).keys(), run_panels._IN_PLACE
    assert named >= {*re.findall(r'"([\w-]+\.csv)"', inspect.getsource(run_panels))} - {*in_place.values()}
    # A map of one head is drawn at one step.
    assert {name if n_heads > 1 else in_place.get(name, name) for name in named} <= files


def test_the_joint_chart_says_whose_chance_each_level_is(make_run, tmp_path):
    run = make_run(tmp_path / "run", steps=(0, 8))
    chance = {"a": 0.25, "b": 0.5, "c": 0.25, "d": None}
    for step in (0, 8):
        line = {f"eval/{name}/acc": 0.5 for name in chance}
        line |= {f"eval/{name}/chance": level for name, level in chance.items() if level}
        append_metrics(run.metrics, step, line)
    (panel,) = panels_of_runs(read_runs([run]), BIRTH)["evaluation"]
    controls = {series.name: series.values.tolist() for series in panel.series if series.look == "control"}
    assert controls == {"chance, a, c": [0.25, 0.25], "chance, b": [0.5, 0.5]}


# ---------------------------------------------------------------- blocks with experts, whose hidden units are not seen


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


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ([0.07854, 0.1769, 0.3927, 0.7428], [0.1, 0.2, 0.5]),
        ([0.3, 0.33], [0.3, 0.33]),
        ([0, 1, 8, 64], [0, 1, 10]),
        ([0, 1, 700, 5e6], [0, 10, 100, 1000, 10_000, 1e5, 1e6]),
        ([0, 10, 20], [0, 10, 20]),
    ],
)
def test_numbers_at_a_logarithmic_axis_are_round(x, expected):
    ticks = x_ticks(Across(np.array(x, dtype=float), unit=float(min(value for value in x if value > 0))))
    assert ticks == expected


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("end", [20.0, 1e5, 123_456.0, 0.7428])
def test_numbers_of_panels_side_by_side_stand_apart(n, end):
    x = [0.0, end / 9.5, end / 2, end]
    axes = {"layer": list(range(1, n + 1)), "head": [0], "position": x}
    for log in (False, True):
        series = Series(np.ones((n, 1, 4)), axes, 0, facet="layer")
        drawn = still(CurvePanel("p", "P", [series], "position", x_log=log))
        found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="middle">([^<]*)<', drawn)
        assert {text for _, _, text in found}
        for foot in {y for _, y, _ in found}:
            row = [(float(at), 5.6 * len(text)) for at, y, text in found if y == foot]
            assert len(row) >= 2
            for (a, wide), (b, other) in pairwise(row):
                assert a + wide / 2 < b - other / 2


def test_weights_of_rows_that_do_not_sum_to_one_are_drawn_as_shares_of_their_row(make_run, tmp_path):
    """Raw masses of 40, shares of .2: uniform attention is a share."""
    scalars = {"sink_mass": 40.0, "sink_mass_max": 50.0, "sink_rate": 100.0, "sink_uniform": 0.1, "sink_epsilon": 0.3}
    shares = {"sink_mass_normalised": 0.15, "sink_mass_normalised_max": 0.18, "sink_rate_normalised": 0.5}
    (run,) = read_runs([make_run(tmp_path / "run", steps=STEPS, **scalars, **shares)])
    rng = np.random.default_rng(1)
    for i, snapshot in enumerate(run.snapshots):
        names = ("sink_mass", "importance", "n_eff")
        shares_by_head = {f"{name}_normalised": rng.random(snapshot.arrays[name].shape) for name in names}
        run.snapshots[i] = dataclasses.replace(snapshot, arrays={**snapshot.arrays, **shares_by_head})
    last = run.snapshots[-1].arrays
    panels = {panel.id: panel for panel in panels_of_runs([run], BIRTH)["sink"]}
    curve, blocks = [series for series in panels["sink-mass"].series if series.look != "control"]
    assert curve.values.tolist() == [0.15] * 3
    assert panels["sink-mass"].unit == panels["sink-heads"].unit == "share of the row"
    for series in (blocks, *panels["sink-heads"].series):
        np.testing.assert_array_equal(series.values[-1], last["sink_mass_normalised"])
    np.testing.assert_allclose(panels["sink-importance"].series[0].values[-1], last["importance_normalised"].mean(1))
    files = csv_texts(sections_over_training(TrainingView([run])))
    drawn_in = {"aggregation-n-eff.csv": "n_eff", "sink-map.csv": "sink_mass", "sink-mass-heads.csv": "sink_mass"}
    for file, name in (*drawn_in.items(), ("sink-keys.csv", "importance")):
        assert {row["quantity"] for row in csv.DictReader(files[file].splitlines())} & {name, f"{name}_normalised"} == {
            f"{name}_normalised"
        }, file
    for file in ("sink-mass.csv", "sink-rate.csv"):
        drawn = {row["quantity"]: float(row["value"]) for row in csv.DictReader(files[file].splitlines())}
        assert {name.removeprefix("bias/") for name in drawn} <= {*shares, "sink_uniform"}
    n_eff = [
        row for row in csv.DictReader(files["aggregation-n-eff.csv"].splitlines()) if row["step"] == str(STEPS[-1])
    ]
    means = last["n_eff_normalised"][..., -1].mean(1)
    assert {row["layer"]: row["value"] for row in n_eff if row["layer"] == "2"} == {"2": str(float(means[1]))}
    assert why_inactive([run], "sink").startswith("no head above 0.180")
    chain, _ = navigation(sections_over_training(TrainingView([run])), run.snapshots[-1:])
    assert ("sink", "Attention sink", "mass of row 0.150") in chain
    # Raw masses are no sink on random tokens: the chain is judged on text, which alone has one.
    text = dict.fromkeys(("sink_mass", "sink_mass_max"), 40.0) | {"sink_uniform": 0.1, "sink_epsilon": 0.3}
    text |= dict.fromkeys(("sink_mass_normalised", "sink_mass_normalised_max"), 0.9)
    run.snapshots[-1].summary["bias_text"] = text
    assert chain_group(run.snapshots[-1]) == "bias_text"
    figures = {title: (value, judged) for title, value, judged in run_figures(run)}
    value, judged = figures["Sink mass (share of the row)"]
    assert value == "0.900"
    assert judged.endswith("uniform 0.100; random tokens 0.150")


def test_tables_show_shares_of_rows_that_do_not_sum_to_one(make_run, tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=STEPS, sink_mass=40.0, sink_mass_normalised=0.15)
    print_table(run, Console(width=200))
    found = capsys.readouterr().out
    assert "(of row)" in found
    assert "0.150" in found
    assert "40.000" not in found
    snapshot = run.snapshots()[-1]
    n_eff = snapshot.arrays["n_eff"]
    raw_and_shares = {"n_eff": 1e9 * n_eff, "n_eff_normalised": np.full_like(n_eff, 7.25)}
    snapshot = dataclasses.replace(snapshot, arrays={**snapshot.arrays, **raw_and_shares})
    columns = [column.title for column in _table(snapshot).columns]
    assert [title for title in columns if title.startswith("n_eff")] == ["n_eff\nat T\nof row"]
    assert layers(snapshot)[-1]["n_eff"] > 1e9
