"""The runs of a study: real runs in real processes, to its table and figure."""

import csv
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from birthmark.files import read_json
from birthmark.launch.cli import main
from birthmark.measure.metrics_log import append_metrics
from birthmark.measure.records import RunDir
from birthmark.models.birth import born, digest
from birthmark.study.arms.trials import arm_trials, read_arm_study
from birthmark.study.runner import _Runner, last_line, last_logged_step, process_environment, study_console
from birthmark.trainer.config_file import read_config
from birthmark.trainer.saved_config import write_config


def weights(run):
    return (run.checkpoints()[-1] / "tensors.safetensors").read_bytes()


@pytest.fixture
def no_figure(monkeypatch):
    """The study's figure is looked at where the command has drawn it; drawing takes longer than these runs."""
    monkeypatch.setattr("birthmark.study.arms.run.draw_study", lambda study, results, out: [])


@pytest.fixture(scope="module")
def ready(tmp_path_factory, study_file, arms, python, no_page):
    """A small study that has been run: its file, its folder, the finished command."""
    folder = tmp_path_factory.mktemp("study")
    # An arm that a config alone does not show to be impossible: the task needs 8 tokens.
    broken = arms | {"broken": {"model.vocab_size": 4}}
    file = study_file(folder, {"trainer.checkpoint_every": 3}, name=None, arms=broken)
    # The first run of each arm is there already: starting a process takes longer than training so little.
    study = read_arm_study(file)
    for trial in arm_trials(study.only(list(arms)), folder / "out"):
        if trial.seed == study.init_seeds[0]:
            write_config(trial.config, folder / "trial.yaml")
            with no_page():
                assert main(["pretrain", f"--config={folder / 'trial.yaml'}"]) == 0
    command = [python, "-m", "birthmark.launch.cli", "ablate", str(file), "--out", str(folder / "out")]
    wide = os.environ | {"COLUMNS": "300"}
    done = subprocess.run([*command, "--jobs=2"], capture_output=True, text=True, env=wide, check=False)
    return file, folder / "out", done, command


def test_a_study_runs_all_arms_and_names_those_that_failed(ready):
    _, out, done, _ = ready
    assert done.returncode == 1
    errors = done.stderr.splitlines()
    assert [line.split(": ")[2] for line in errors] == ["broken/seed-0", "broken/seed-1"]
    assert all("birthmark: error: " in line and "seed-" in line and ".log" in line for line in errors)
    assert "model.vocab_size: 4 is too small" in errors[0]
    for arm in ("plain", "headnorm"):
        for seed in (0, 1):
            run = RunDir(out / arm / f"seed-{seed}")
            assert run.checkpoints()[-1].name == "step-00000006"
        assert "step      6" in run.path.with_suffix(".log").read_text()
        assert read_config(run.path.with_suffix(".yaml")) == read_config(run.config)
    assert "2 of 6 runs are finished already" in done.stdout
    assert {"table.md", "table.csv", "figure.png", "figure.svg"} <= {file.name for file in out.iterdir()}
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "headnorm" in (out / "figure.svg").read_text()
    assert "headnorm" in done.stdout
    assert "sink" in done.stdout


def test_births_are_paired(ready, arms):
    file, out, _, _ = ready
    study = read_arm_study(file)
    # An arm without parameters of its own has the birth of the plain one; another has what they share.
    calibrated = dataclasses.replace(study, arms={"calibrated": {"model.attention.aggregation": "calibrated"}})
    for twin in arm_trials(calibrated, out):
        births = {arm: read_json(out / arm / f"seed-{twin.seed}" / "birth.json") for arm in arms}
        assert digest(born(twin.config.model, twin.seed)) == births["plain"]["digest"] != births["headnorm"]["digest"]
        plain, headnorm = (
            dict(born(trial.config.model, trial.seed).named_parameters())
            for trial in arm_trials(study.only(list(arms)), out)
            if trial.seed == twin.seed
        )
        assert set(plain) < set(headnorm)
        assert all(torch.equal(plain[name], headnorm[name]) for name in plain)
        assert births["plain"]["parameters"].items() <= births["headnorm"]["parameters"].items()


def test_the_table_is_what_the_run_folders_say(ready, arms):
    _, out, _, _ = ready
    table = {row["arm"]: row for row in csv.DictReader((out / "table.csv").open())}
    for arm in arms:
        sinks, random, largest, losses, outliers = [], [], [], [], []
        for seed in (0, 1):
            run = out / arm / f"seed-{seed}"
            summary = json.loads((run / "snapshots/step-00000006/summary.json").read_text())
            sinks.append(summary["bias_text"]["sink_mass"])
            largest.append(summary["bias_text"]["sink_mass_max"])
            random.append(summary["bias"]["sink_mass"])
            outliers.append(summary["bias_text"]["residual_inf_norm"])
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            (loss,) = (line["val/loss_trigger"] for line in lines if line["step"] == 6 and "val/loss_trigger" in line)
            losses.append(loss)
        row = table[arm]
        assert (row["runs"], row["step"]) == ("2", "6")
        for name, values in (
            ("sink_mass", sinks), ("sink_mass_largest_head", largest), ("sink_mass_random", random),
            ("trigger_loss", losses), ("largest_value", outliers),
        ):  # fmt: skip
            mean = (values[0] + values[1]) / 2
            sd = abs(values[0] - values[1]) / 2**0.5
            columns = [float(row[f"{name}_{part}"]) for part in ("mean", "sd", "min", "max", "n")]
            assert columns == pytest.approx([mean, sd, min(values), max(values), 2])
        mean, sd = np.mean(sinks), np.std(sinks, ddof=1)
        cell = f"{mean:.3f} ± {sd:.3f} ({min(sinks):.3f}–{max(sinks):.3f})"
        assert f"| {arm} | 2/2 | 6 | {cell} |" in (out / "table.md").read_text()


def test_finished_runs_are_left_alone_and_interrupted_ones_go_on_to_the_same_end(ready, python, no_figure, monkeypatch):
    file, out, _, _ = ready
    finished, interrupted = RunDir(out / "plain" / "seed-0"), RunDir(out / "plain" / "seed-1")
    expected = weights(interrupted)
    untouched = {f: f.stat().st_mtime_ns for f in finished.path.rglob("*") if f.is_file()}
    # As a crash after the checkpoint at step 3 leaves it, in a folder of the version before: no config beside the run.
    interrupted.path.with_suffix(".yaml").unlink()
    for folder in (interrupted.checkpoint(6), interrupted.snapshot(6)):
        shutil.rmtree(folder)
    monkeypatch.setattr(sys, "executable", python)
    assert main(["ablate", str(file), f"--out={out}", "--arms=plain"]) == 0
    assert weights(interrupted) == expected
    assert "resumed at step 3" in interrupted.path.with_suffix(".log").read_text()
    assert {f: f.stat().st_mtime_ns for f in finished.path.rglob("*") if f.is_file()} == untouched


def test_an_interrupt_stops_the_runs_with_a_checkpoint_and_they_can_be_summarised(ready, no_figure, tmp_path):
    *_, command = ready
    out = tmp_path / "out"
    settings = ["--set", "trainer.max_steps=20000", "trainer.checkpoint_every=20000"]
    process = subprocess.Popen(
        [*command[:-1], str(out), "--arms=plain", *settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    run = RunDir(out / "plain" / "seed-0")
    try:
        while process.poll() is None and last_logged_step(run.metrics) < 20:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "the same command resumes them later" in output
    assert error.splitlines() == ["birthmark: interrupted"]
    (stopped,) = run.checkpoints()
    assert 0 < int(stopped.name[5:]) < 20000
    assert not (out / "plain" / "seed-1").exists()
    # A summary reads what the runs were made with from the study's folder; what it is given itself must fit.
    summary = ["ablate", command[4], f"--out={out}", "--arms=plain", "--summary"]
    assert main(summary) == 0
    assert "| plain | 1/2 |" in (out / "table.md").read_text()
    assert main([*summary, "--set", "trainer.max_steps=10"]) == 2


@pytest.mark.parametrize("under_nohup", [False, True])
def test_a_lost_terminal_stops_a_study_and_under_nohup_does_not(tmp_path, under_nohup):
    """It killed the study's process alone, and its runs trained on."""
    runner, missed = _Runner([], 1, study_console(tmp_path), tmp_path, 0, wait=False), []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else lambda *_: missed.append(1))
    try:
        with runner._signals_caught():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (runner.signals, missed) == (not under_nohup, [])


def test_a_study_goes_on_and_kills_no_run_when_its_terminal_cannot_be_written(tmp_path, python):
    program = """if True:
        import os, sys
        from pathlib import Path
        from birthmark.study.runner import _Runner, study_console
        terminal, inner = os.openpty()
        os.dup2(inner, int(sys.argv[1]))
        os.close(inner)
        os.close(terminal)
        runner = _Runner([], 1, study_console(Path("out")), Path("out"), 0, wait=False)
        for console in (runner.console, runner.bar.console):
            console.print("a line")
        print("as")
        print("before", file=sys.stderr)
    """
    said = "birthmark: the output cannot be written any more (Input/output error); its log is out/*/*.log\n"
    for lost, expected in (("1", ("", f"a line\n{said}before\n")), ("2", ("a line\nas\n", ""))):
        done = subprocess.run([python, "-c", program, lost], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, expected[0]), done.stderr
        assert sorted(done.stderr.splitlines()) == sorted(expected[1].splitlines())


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_jobs_share_the_cores_and_the_gpus_that_were_named(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    environments = [process_environment(3, slot) for slot in range(3)]
    assert [t["OMP_NUM_THREADS"] for t in environments] == ["2"] * 3
    assert [t["CUDA_VISIBLE_DEVICES"] for t in environments] == ["2", "5", "2"]
    assert "CUDA_VISIBLE_DEVICES" not in process_environment(1, 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert process_environment(4, 0)["OMP_NUM_THREADS"] == "1"


def test_the_last_line_of_a_process(tmp_path):
    log = tmp_path / "log"
    for text, expected in (
        ("step 1\nbirthmark: error: no space left\n\n", "no space left"),
        ("Traceback\nMemoryError\n", "MemoryError"),
        ("", "no output"),
    ):
        log.write_text(text)
        assert last_line(log) == expected


def test_the_step_of_a_run_is_read_from_the_end_of_its_metrics(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert last_logged_step(metrics) == 0
    for step in range(500):
        append_metrics(metrics, step, {"train/loss": 1.0})
    with metrics.open("a") as f:
        f.write('{"step": 500, "tra')
    assert last_logged_step(metrics) == 499


def test_the_ends_of_runs_are_compared_as_the_command_compares_them(ready, no_figure, monkeypatch, capsys):
    monkeypatch.setattr("birthmark.report.compared_models.save_png", lambda figure, path: path.touch())
    file, out, _, _ = ready
    asked = file.with_name("compared.yaml")
    asked.write_text(file.read_text() + "compare: random\n")
    summary = ["ablate", str(asked), "--summary", "--out", str(out)]
    assert main(summary) == 0
    written = out / "compare" / "compare.json"
    found = json.loads(written.read_text())
    labels = [f"{arm}/seed-{seed}" for seed in (0, 1) for arm in ("plain", "headnorm")]
    assert found["probe"]["checkpoints"] == dict.fromkeys(labels, 6)
    assert found["compared"][0]["models"] == labels
    probe = [f"--{name}={found['probe'][name]}" for name in ("n_sequences", "seq_len", "probe_seed")]
    # Products round by the number of sequences at once: those of the study's snapshots.
    probe.append("--batch_size=4")
    capsys.readouterr()
    assert main(["compare", *(str(out / label) for label in labels), *probe, "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["compared"]
    for name in ("cka", "kl"):
        np.testing.assert_allclose(found["compared"][0][name], said[name], rtol=1e-9, atol=1e-12)
    # Nothing new: nothing is done again.
    before = written.stat().st_mtime_ns
    assert main(summary) == 0
    assert written.stat().st_mtime_ns == before
    assert "compare.json" in {path.name for path in (out / "compare").iterdir()}
    asked.write_text(file.read_text() + "compare: images\n")
    assert main(summary) == 2
    assert "compare is 'images': write random or text" in capsys.readouterr().err
