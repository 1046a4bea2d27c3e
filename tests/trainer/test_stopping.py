"""Signals, two that would write one run, and readers of the output that leave."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict

import pytest
import yaml
from filelock import FileLock
from quiet_runs import config_file, logged, run, same_weights
from rich.console import Console

from birthmark.callbacks.stop import StopOnSignal
from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.recorder import SnapshotRecorder
from birthmark.measure.records import RunDir
from birthmark.trainer.loop.training_data import TrainingData
from birthmark.trainer.module import PretrainModule
from birthmark.trainer.run import pretrain


def test_two_processes_cannot_write_one_run(tiny, tmp_path, python):
    done = run(tiny({"trainer.max_steps": 2}), tmp_path / "run")
    command = [python, "-m", "birthmark.launch.cli", "pretrain", f"--resume={done.path}"]
    with FileLock(done.path / ".lock"):
        second = subprocess.run(command, check=False, capture_output=True, text=True)
    assert second.returncode == 2
    assert "another process is writing this run" in second.stderr


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("| head -n 1", "nobody reads the output any more"),
        ("> /dev/full", "the output cannot be written any more (No space left on device)"),
        ("2>&1 | head -n 1", ""),
    ],
)
def test_a_run_outlives_the_reader_of_its_output(tiny, tmp_path, python, output, reason):
    config_file(tmp_path / "config.yaml", tiny())
    command = f"{python} -m birthmark.launch.cli pretrain config.yaml --run_dir run {output}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    said = f"birthmark: {reason}; the run goes on, its log is run/metrics.jsonl\n" if reason else ""
    assert (done.returncode, done.stderr) == (0, said)
    whole = RunDir(tmp_path / "run")
    assert (max(whole.checkpoints_by_step()), list(logged(whole, "train/loss"))) == (6, [1, 2, 3, 4, 5, 6])
    assert whole.report.is_file()
    assert whole.metrics_csv.is_file()


def test_a_console_that_fails_takes_no_other_output_with_it(tmp_path, python):
    """A stream of Python's own, as a notebook's, is not the process's output."""
    program = """if True:
        import contextlib, errno, io, os
        from pathlib import Path
        from birthmark.report.terminal import RunConsole
        class Full(io.TextIOBase):
            def write(self, text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with contextlib.redirect_stdout(Full()):
            console = RunConsole(Path("run/metrics.jsonl"))
            console.print("lost")
            console.print("quiet")
        print("heard")
    """
    done = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    said = "birthmark: the output cannot be written any more (No space left on device); the run goes on, its log is"
    assert (done.returncode, done.stdout, done.stderr) == (0, "heard\n", f"{said} run/metrics.jsonl\n")


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signals_end_with_a_checkpoint_and_the_run_goes_on_as_if_nothing_had_been(tiny, tmp_path, first, python):
    long = {"trainer.max_steps": 100000, "trainer.checkpoint_every": 100000, "optim.schedule": "constant"}
    config = tiny(long)
    file = tmp_path / "config.yaml"
    stored = {k: v for k, v in asdict(config).items() if k not in ("name", "run_dir")}
    file.write_text(yaml.safe_dump(stored))
    parts = RunDir(tmp_path / "parts")
    command = [python, "-m", "birthmark.launch.cli", "pretrain"]
    process = subprocess.Popen(
        [*command, "--config", str(file), "--run_dir", str(parts.path)], stdout=subprocess.PIPE, text=True
    )
    while process.poll() is None and len(read_metrics(parts.metrics)) < 20:
        time.sleep(0.02)
    # Launchers send SIGTERM after their own signal: DeepSpeed's a moment after a Ctrl-C, torchrun after SLURM's.
    process.send_signal(first)
    for _ in range(3):
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"stopped by {first.name}" in printed
    assert "--resume" in printed
    (stopped,) = parts.checkpoints()
    step = int(stopped.name[5:])
    assert 0 < step < 100000
    assert parts.report.is_file()
    assert parts.snapshot(step).is_dir()
    end = step + 15
    config = tiny({**long, "trainer.max_steps": end})
    run(config, parts.path, resume=True)
    whole = run(config, tmp_path / "whole")
    assert logged(parts, "train/loss") == logged(whole, "train/loss")
    assert len(logged(whole, "train/loss")) == end
    assert same_weights(parts, whole, end)


@pytest.mark.skipif(shutil.which("setsid") is None, reason="needs setsid, of util-linux")
@pytest.mark.parametrize("action", ["SIG_DFL", "SIG_IGN"])
def test_a_lost_terminal_is_a_stop_and_under_nohup_none(tiny, tmp_path, action, python):
    long = {"trainer.max_steps": 100000, "trainer.checkpoint_every": 100000, "optim.schedule": "constant"}
    config_file(tmp_path / "config.yaml", tiny(long))
    script = f"import signal, sys; from birthmark.launch.cli import main; signal.signal(1, signal.{action}); main()"
    arguments = ["pretrain", "--config", "config.yaml", "--run_dir", "run"]
    done, (terminal, inner) = RunDir(tmp_path / "run"), os.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", python, "-c", script, *arguments], cwd=tmp_path, stdin=inner, stdout=inner, stderr=inner
    )
    os.close(inner)
    os.set_blocking(terminal, False)

    def wait_for(n_lines):
        while process.poll() is None and len(read_metrics(done.metrics)) < n_lines:
            with suppress(OSError):  # nothing to read, or closed
                os.read(terminal, 1 << 16)
            time.sleep(0.02)

    wait_for(20)
    os.close(terminal)
    if action == "SIG_IGN":
        wait_for(before := len(read_metrics(done.metrics)) + 20)
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    ((step, _),) = done.checkpoints_by_step().items()
    assert step == max(logged(done, "train/loss")) < 100000
    assert action == "SIG_DFL" or step > before - 5
    assert done.report.is_file()


def test_a_stop_saves_before_it_measures(tiny, tmp_path, monkeypatch):
    whole, parts = RunDir(tmp_path / "whole"), RunDir(tmp_path / "parts")
    step, take, there = PretrainModule.training_step, SnapshotRecorder.take_if_possible, {}

    def signalled(self, batch, index):
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(self, batch, index)

    def seen(self, model, step, **more):
        there[step] = RunDir(self.run.path).checkpoint(step).is_dir()
        return take(self, model, step, **more)

    monkeypatch.setattr(SnapshotRecorder, "take_if_possible", seen)
    run(tiny(), whole.path)
    assert there == {0: False, 2: False, 4: False, 6: False}
    monkeypatch.setattr(PretrainModule, "training_step", signalled)
    before = signal.getsignal(signal.SIGUSR1)
    outcome = pretrain(tiny(), parts, console=Console(quiet=True))
    assert (outcome.stopped_by, outcome.step) == ("SIGUSR1", 3)
    assert there[3]
    assert [snapshot.step for snapshot in parts.snapshots()] == [0, 2, 3]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_while_a_run_is_set_up_is_a_stop_too(tiny, tmp_path, monkeypatch):
    """When Lightning has taken the signal over, and the run has not yet taken it back."""
    batches = TrainingData.train_dataloader

    def signalled(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return batches(self)

    monkeypatch.setattr(TrainingData, "train_dataloader", signalled)
    outcome = pretrain(tiny({"snapshot.enabled": False}), RunDir(tmp_path / "run"), console=Console(quiet=True))
    assert (outcome.stopped_by, outcome.step) == ("SIGTERM", 1)
    assert outcome.run.checkpoint(1).is_dir()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_signal_before_the_first_step_of_a_start_says_how_to_go_on(tiny, tmp_path, resumed, python):
    """While the run's data is prepared."""
    config_file(tmp_path / "config.yaml", tiny({"trainer.max_steps": 2}))
    if resumed:
        run(tiny({"trainer.max_steps": 2}), tmp_path / "run")
    program = """if True:
        import os, signal, sys
        from birthmark.launch.cli import main
        import birthmark.trainer.run as training
        training.prepare = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(main())
    """
    words = ["--resume", "run"] if resumed else ["--config", "config.yaml", "--run_dir", "run"]
    done = subprocess.run([python, "-c", program, "pretrain", *words], cwd=tmp_path, capture_output=True, text=True)
    again = "birthmark pretrain --resume run" if resumed else "the same command"
    line = f"birthmark: stopped by SIGTERM before this start's first step; go on with: {again}\n"
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, line)


@pytest.mark.heavy
def test_only_a_second_ctrl_c_after_a_pause_means_at_once():
    stop, before = StopOnSignal(), signal.getsignal(signal.SIGINT)
    with stop.listen():
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        time.sleep(2.1)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
