"""The table on the terminal: right numbers, no line too long, no crash where the terminal is poor."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from birthmark.files import write_json, write_text
from birthmark.findings.formatting import MISSING, format_p
from birthmark.findings.run_history import read_runs
from birthmark.measure.metrics_log import MetricsLog, append_metrics
from birthmark.measure.records import RunDir, Snapshot
from birthmark.report.run_page import summarise
from birthmark.report.snapshot_table import print_runs, print_table
from birthmark.report.verdicts import lineage_figure, run_figures

BIAS = {
    "alignment": 0.51234, "alignment_stranger": 0.04321, "preference_ratio": 12.3456, "rank_persistence": -0.25,
    "rank_persistence_stranger": 0.031, "sink_mass": 0.125, "sink_uniform": 0.0625, "drift": float("nan"),
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    write_text(run.config, "{}\n")
    write_json(run.birth, {"digest": "0" * 64, "init_seed": 0, "n_params": 1})
    for step in (0, 100, 123456):
        summary = {"step": step, "tokens": step, "bias": BIAS, "top_tokens": [], "vocab_size": 4}
        Snapshot(summary, {"mean_prob": np.full(4, 0.25)}).write(run.snapshot(step))
    append_metrics(run.metrics, 100, {"train/loss": 2.0})
    append_metrics(run.metrics, 100, {"val/loss": 2.5, "val/bits_per_byte": 1.25})
    append_metrics(run.metrics, 150, {"train/loss": 1.5, "val/loss": 1.75})
    return run


def printed(run, **settings):
    console = Console(file=io.StringIO(), **settings)
    print_table(run, console)
    return console.file.getvalue()


def test_a_long_run_has_evenly_spaced_rows_and_many_runs_a_line_each(run):
    for step in range(100, 3101, 100):
        Snapshot({"step": step, "bias": {"alignment": 0.5}}, {}).write(run.snapshot(step))
    text = printed(run, width=100)
    # 33 snapshots, of which each place in 30 equal parts has the nearest.
    steps = [*range(0, 3101, 100), 123456]
    shown = [f"{steps[round(32 * i / 29)]:,}" for i in range(30)]
    assert [line.split()[0] for line in text.splitlines() if line.split()[:1] and line.split()[0] in shown] == shown
    assert text.splitlines()[-1] == "30 of 33 steps: --json prints all"
    (history,) = read_runs([run])
    lines = {n: _printed_runs([history] * n) for n in (1, 6, 7)}
    assert [sum(line == f"{run.path}" for line in lines[n]) for n in lines] == [0, 6, 0]
    said = f"{run.path}: 33 snapshots, step 123,456, val loss 1.750 at step 150"
    assert lines[7] == [said] * 7 + ["a line for each run: --json prints all"]
    # A run that goes on, and one that has nothing.
    empty = replace(history, snapshots=[], rows=[])
    unknown = replace(history, snapshots=history.snapshots[:1], rows=history.rows[:1], metrics=MetricsLog())
    assert _printed_runs([empty, unknown] * 4)[:2] == [
        f"{run.path}: no snapshots yet",
        f"{run.path}: 1 snapshot, step 0",
    ]


def _printed_runs(histories):
    console = Console(file=io.StringIO(), width=100)
    print_runs(histories, console)
    return console.file.getvalue().splitlines()


def test_rows_join_snapshots_and_losses_by_step(run):
    rows = read_runs([run])[0].rows
    assert [(r["step"], r["label"]) for r in rows] == [(0, "birth"), (100, "step"), (123456, "end")]
    assert [r["val_loss"] for r in rows] == [None, 2.5, None]  # never a neighbour's
    assert (rows[1]["train_loss"], rows[1]["val_bits_per_byte"], rows[1]["val_loss_trigger"]) == (2.0, 1.25, None)
    assert all(r[name] == value for r in rows for name, value in BIAS.items() if not math.isnan(value))


def test_the_table_of_a_wide_terminal(run):
    lines = printed(run, width=100).splitlines()
    row = next(line for line in lines if line.split()[:1] == ["100"])
    assert row.split() == ["100", "2.500", "0.512", "(0.043)", "12.35", "-0.250", "(0.031)", "0.125", "(0.062)"]
    assert any("123,456" in line for line in lines)
    head = " ".join(lines[lines.index("") + 1 :][:2])
    assert all(word in head for word in ("loss", "alignment", "(stranger)", "rank persistence", "(uniform)"))


def test_the_lineage_test_comes_first_and_is_said_in_words(run):
    assert "lineage" not in printed(run, width=100)
    tests = (0, 102.33, -2276.06, 2.15), (100, 33.77, -249.58, -1.1), (150, None, None, 0.5)
    for step, z, log10_p, stranger in tests:
        figures = {"seedprint/z": z, "seedprint/log10_p": log10_p, "seedprint/z_stranger": stranger}
        append_metrics(run.metrics, step, figures)
    text = printed(run, width=100)
    row = next(line for line in text.splitlines() if line.split()[:1] == ["100"])
    assert row.split()[:5] == ["100", "2.500", "33.8", "(-1.1)", "0.512"]
    (figure,) = lineage_figure(read_runs([run])[0].rows)  # the newest step with a snapshot
    assert figure == ("Lineage", "z 33.8", "against its own birth; p 2.6·10⁻²⁵⁰; against other births at most -1.1")
    # The newest test could not be made: neither the one before nor its own strangers stand in for it.
    assert "The lineage test could not be made at step 150; strangers at most 0.5." in " ".join(text.split())


def test_a_chance_too_small_for_a_float():
    assert [format_p(p) for p in (-249.58, 0, None)] == ["2.6·10⁻²⁵⁰", "1.000", MISSING]
    assert [format_p(math.log10(p)) for p in (0.0375, 9.97e-5)] == ["0.037", "1.0·10⁻⁴"]


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 20])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_line_is_longer_than_the_terminal(run, width, terminal):
    text = printed(run, width=width, force_terminal=terminal, no_color=True, color_system=None)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    assert "…" not in text  # columns give way, numbers stay whole
    assert sum(line.lstrip().startswith("123,456") for line in lines) == 1


def test_everything_fits_in_eighty_columns(run):
    assert "(stranger)" in printed(run, width=80)


def test_the_text_probe_leads_for_sinks_and_is_the_last_to_give_way(run):
    for folder in run.snapshot_folders():
        old = Snapshot.read(folder)
        text = BIAS | {"sink_mass": 0.702, "sink_mass_max": 0.702, "sink_epsilon": 0.3}
        Snapshot(old.summary | {"bias_text": text}, old.arrays).write(folder)
    lines = printed(run, width=100).splitlines()
    assert any("on text" in line for line in lines)
    row = next(line for line in lines if line.split()[:1] == ["100"])
    assert row.split()[-3:] == ["0.702", "0.125", "(0.062)"]
    narrow = next(line for line in printed(run, width=42).splitlines() if line.split()[:1] == ["100"])
    assert "0.702" in narrow
    assert "0.125" not in narrow
    (figure,) = (figure for figure in run_figures(read_runs([run])[0]) if figure[0] == "Sink mass")
    what = "mean over heads, on position 0, on text; uniform 0.062; random tokens 0.125"
    assert figure == ("Sink mass", "0.702", what)


def test_an_ascii_terminal(run):
    class Ascii(io.StringIO):
        encoding = "ascii"

    console = Console(file=Ascii(), width=100)
    print_table(run, console)
    console.file.getvalue().encode("ascii")


def test_train_loss_stands_in_where_no_validation_was_run(run):
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    run.metrics.write_text("")
    for record in records:
        append_metrics(run.metrics, record.pop("step"), {k: v for k, v in record.items() if k == "train/loss"})
    text = printed(run, width=100)
    assert "train" in text
    assert "2.000" in text


def test_no_snapshots_yet(tmp_path):
    assert "no snapshots yet" in printed(RunDir(tmp_path), width=100)


def ratio_of(run):
    return next(figure[1:] for figure in run_figures(read_runs([run])[0]) if figure[0] == "Preference ratio")


def test_an_arrow_leads_from_a_birth_where_there_is_one(run, tmp_path):
    def take(folder, step, ratio):
        summary = {"step": step, "bias": {"preference_ratio": ratio}, "top_tokens": [], "vocab_size": 4}
        Snapshot(summary, {"mean_prob": np.full(4, 0.25)}).write(folder.snapshot(step))

    assert ratio_of(run) == ("12.35 → 12.35", "V · max p̄, birth → now; 1 is none")
    # What a run with --init_from starts from is no birth.
    write_json(run.birth, {"digest": "0" * 64, "init_seed": 0, "n_params": 1, "init_from": "a/model"})
    assert ratio_of(run) == ("12.35 → 12.35", "V · max p̄, the model it started from → now; 1 is none")
    assert [row["label"] for row in read_runs([run])[0].rows] == ["start", "step", "end"]
    (told,) = summarise([run])["runs"]
    assert (told["init_seed"], told["init_from"], told["rows"][0]["label"]) == (None, "a/model", "start")
    # Attached late: the first snapshot is no birth either.
    late = RunDir(tmp_path / "late")
    for step, ratio in ((500, 9.0), (1000, 11.0)):
        take(late, step, ratio)
    assert ratio_of(late) == ("11.00", "V · max p̄; 1 is none")
    # A step that is not known is later than the birth.
    foreign = RunDir(tmp_path / "foreign")
    for step, ratio in ((-1, 11.0), (0, 2.0)):
        take(foreign, step, ratio)
    assert ratio_of(foreign) == ("2.00 → 11.00", "V · max p̄, the start → now; 1 is none")


def test_of_documents_that_see_themselves_alone_the_figure_is_theirs(run):
    for folder in run.snapshot_folders():
        old = Snapshot.read(folder)
        text = {"sink_mass": 0.1, "sink_uniform": 0.06, "document_sink_mass": 0.9, "document_sink_uniform": 0.25}
        summary = old.summary | {"bias_text": text, "model": {"attention": {"documents": True}}}
        Snapshot(summary, old.arrays).write(folder)
    (figure,) = (figure for figure in run_figures(read_runs([run])[0]) if figure[0] == "Sink mass")
    beside = "uniform within the document 0.250; random tokens 0.125"
    assert figure == ("Sink mass", "0.900", f"mean over heads, on the first token of a document, on text; {beside}")
