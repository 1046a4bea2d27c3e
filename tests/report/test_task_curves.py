"""The section of evaluations: a picture for each text and task, the sink beside them, chance below."""

import csv

from birthmark.findings.run_history import read_runs
from birthmark.measure.records import append_metrics
from birthmark.report.charts.run_panels import panels_of_runs
from birthmark.report.sections.chain import sections_over_training
from birthmark.report.sections.section import csv_texts
from birthmark.report.sections.training_view import TrainingView

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
    panels = panels_of_runs(read_runs([run]))["evaluation"]
    assert [[series.name for series in panel.series] for panel in panels] == [["a task", "chance"], ["held"]]


def test_the_joint_chart_says_whose_chance_each_level_is(make_run, tmp_path):
    run = make_run(tmp_path / "run", steps=(0, 8))
    chance = {"a": 0.25, "b": 0.5, "c": 0.25, "d": None}
    for step in (0, 8):
        line = {f"eval/{name}/acc": 0.5 for name in chance}
        line |= {f"eval/{name}/chance": level for name, level in chance.items() if level}
        append_metrics(run.metrics, step, line)
    (panel,) = panels_of_runs(read_runs([run]))["evaluation"]
    controls = {series.name: series.values.tolist() for series in panel.series if series.look == "control"}
    assert controls == {"chance, a, c": [0.25, 0.25], "chance, b": [0.5, 0.5]}
