import csv
import io
import json
import os
import signal
import subprocess

import numpy as np
import pytest
import wandb
from lightning.pytorch.loggers import WandbLogger
from matplotlib import image
from rich.console import Console

from birthmark.callbacks.config import LogConfig
from birthmark.callbacks.loggers import CsvLogger, check_installed, log_snapshot
from birthmark.callbacks.wandb_run import WandbRun
from birthmark.errors import UsageError
from birthmark.files import delete_folder
from birthmark.measure.metrics_log import append_metrics, read_metrics, write_metrics_csv
from birthmark.measure.records import RunDir, Snapshot
from birthmark.trainer.run import pretrain

FIELDS = {
    "name": "tiny-3",
    "log.loggers": ["tensorboard", "csv"],
    "log.wandb": "offline",
    "snapshot.probes": ["random", "text"],
}


class _StopsAt(io.StringIO):
    """Takes what a run prints, and stops the run at its line of a step."""

    def __init__(self, step):
        super().__init__()
        self.line = f"step {step:>6}"

    def write(self, text):
        if text.startswith(self.line):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


@pytest.fixture(scope="module")
def printed():
    return _StopsAt(4)


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory, printed, no_snapshot_page):
    """A run that lost its last checkpoint, went on from the one before, then also into W&B, and was stopped."""
    run = RunDir(tmp_path_factory.mktemp("logged") / "run")
    with no_snapshot_page():
        pretrain(tiny(FIELDS | {"trainer.max_steps": 4}), run, console=Console(quiet=True))
    delete_folder(run.checkpoint(4))
    everywhere = {"log.loggers": ["wandb", "tensorboard", "csv"], "trainer.max_steps": 100}
    with no_snapshot_page():
        outcome = pretrain(tiny(FIELDS | everywhere), run, resume=True, console=Console(file=printed))
    assert (outcome.stopped_by, outcome.step) == ("SIGTERM", 5)
    return run


def test_the_csv_file_is_at_any_time_what_is_written_at_the_end(tmp_path):
    lines = [
        (0, {"val/loss": 2.5}),
        (1, {"train/loss": 1.0}),
        (1, {"bias/a": float("nan")}),
        (2, {"train/loss": 0.5, "b": 1}),
        (4, {"b": 2, "=1+1": 3}),
        (5, {"=1+1": -4.5}),
        (6, {"c": 1}),
    ]

    def written_at_the_end(name, before):
        end = RunDir(tmp_path / name)
        end.path.mkdir()
        for step, values in lines:
            if step < before:
                append_metrics(end.metrics, step, values)
        write_metrics_csv(end)
        return end.metrics_csv.read_bytes()

    run = RunDir(tmp_path)
    append_metrics(run.metrics, *lines[0])
    logger = CsvLogger(run)
    for number, (step, values) in enumerate(lines[1:]):
        logger.log_metrics(values, step)
        assert run.metrics_csv.read_bytes() == written_at_the_end(f"after-{number}", before=step)
    logger.finalize("success")
    assert run.metrics_csv.read_bytes() == written_at_the_end("whole", before=7)
    with run.metrics_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["'=1+1"] for row in rows] == ["", "", "", "3", "-4.5", ""]


def test_a_run_that_goes_on_neither_loses_nor_repeats_a_line(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = {
        name: {line["step"]: line[name] for line in read_metrics(run.metrics) if name in line}
        for name in ("train/loss", "bias/sink_mass")
    }
    assert list(logged["train/loss"]) == [1, 2, 3, 4, 5]
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    for name, values in logged.items():
        scalars = events.Scalars(name)
        assert [event.step for event in scalars] == list(values)
        assert [event.value for event in scalars] == pytest.approx(list(values.values()))
    rows = list(csv.DictReader(run.metrics_csv.open(newline="")))
    assert [int(row["step"]) for row in rows] == list(range(6))
    assert [float(row["train/loss"]) for row in rows[1:]] == list(logged["train/loss"].values())
    assert {event.step for event in events.Scalars("by block sink_mass on text/02")} == {0, 2, 4, 5}
    assert [image.step for image in events.Images("bias/sink_heatmap")] == [0, 2, 4, 5]


def test_wandb_has_axes_curves_of_blocks_tables_and_the_files_of_a_run_that_was_stopped(run, printed, offline_wandb):
    """A real offline run, read back from the file that `wandb sync` would send."""
    (start,) = offline_wandb(run.path)
    assert f"W&B: offline, send it with: wandb sync {start.files.parent}\n" in printed.getvalue()
    assert (start.id, start.run.display_name, start.run.run_group) == (run.read_birth()["run_id"], "run", "tiny")
    assert (start.run.project, start.run.job_type, start.config["init_seed"]) == ("birthmark", "pretrain", 3)
    assert start.axes == {"trainer/global_step": "", "train/tokens": "", "*": "trainer/global_step"}
    rows = [line for line in start.history if "train/tokens" in line]
    assert {line["trainer/global_step"] for line in rows} == {3, 4, 5}
    assert all(line["train/tokens"] == 48 * line["trainer/global_step"] for line in rows)
    last, logged = run.snapshots()[-1], start.logged
    for block in (1, 2):
        mass = logged[f"by block sink_mass/0{block}"]
        assert mass == pytest.approx(last.arrays["sink_mass"][block - 1].mean())
        assert logged[f"by block sink_mass on text/0{block}"] == pytest.approx(
            last.arrays["text.sink_mass"][block - 1].mean()
        )
    assert "by block alignment/00" in logged
    assert logged["sink/sink_mass (uniform)"] == last.bias["sink_uniform"]
    # The scalar is of the last block: beside it stands the block where it is lowest.
    ranks = last.arrays["effective_rank"]
    assert logged["dominance/effective_rank (where it stands out)"] == pytest.approx(float(ranks.min()))
    assert logged["dominance/effective_rank (block of that)"] == int(ranks.argmin())

    def table(name):
        return json.loads((start.files / logged[f"bias/{name}/path"]).read_text())

    tokens = table("preferred_tokens_over_steps")
    assert tokens["columns"] == ["step", "rank", "id", "text", "p", "argmax_share", "rank_at_birth"]
    expected = [[s.step, t["rank"], t["id"]] for s in run.snapshots() for t in s.summary["top_tokens"]]
    assert [row[:3] for row in tokens["data"]] == expected
    assert [row[0] for row in table("preferred_tokens")["data"]] == [5] * 5
    assert len(table("sink_mass_by_head")["data"]) == 4
    assert (start.files / logged["report/path"]).read_bytes() == run.report.read_bytes()
    assert start.artifacts == {f"birthmark-{start.id}": ["birth.json", "config.yaml", "metrics.csv", "report.html"]}
    assert start.alerts == []


def test_the_map_of_the_heads_can_be_read(run, offline_wandb):
    (start,) = offline_wandb(run.path)
    picture = image.imread(start.files / start.logged["bias/sink_heatmap/path"])
    height, width = picture.shape[:2]
    assert (width >= 900, height >= 400) == (True, True)
    # Two probes of 2 × 2 heads, a colour bar, labels; no head is in the darkest colour of the scale.
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 50
    assert picture[..., :3].mean() > 0.4


def test_a_wandb_logger_of_the_users_own_is_shown_a_snapshot_too(run, offline_wandb, tmp_path):
    snapshot = run.snapshots()[-1]
    own = wandb.init(project="mine", mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True, console="off"))
    logger = WandbLogger(experiment=own, prefix="mine")
    log_snapshot([logger], snapshot)
    own.finish()
    (start,) = offline_wandb(tmp_path)
    mass = start.logged["mine-by block sink_mass/01"]
    assert mass == pytest.approx(snapshot.arrays["sink_mass"][0].mean())
    assert (start.files / start.logged["mine-bias/sink_heatmap/path"]).is_file()
    assert start.logged["trainer/global_step"] == snapshot.step


class Rows:
    """In W&B's place: keeps of every table the rows that W&B would keep."""

    def __init__(self):
        self.tables = {}

    def log(self, objects):
        tables = {name: value for name, value in objects.items() if isinstance(value, wandb.Table)}
        self.tables |= {name: table._to_table_json(warn=False)["data"] for name, table in tables.items()}


def test_no_table_is_too_long_for_wandb(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb.Table, "MAX_ROWS", 20)
    run, rows, said = RunDir(tmp_path / "run"), Rows(), []
    tokens = [{"rank": k, "id": k, "text": "a", "p": 0.1, "argmax_share": 0.0} for k in range(1, 6)]
    mass = np.arange(24.0).reshape(3, 8)
    for step in range(0, 70, 10):
        snapshot = Snapshot({"step": step, "bias": {}, "top_tokens": tokens}, {"sink_mass": mass})
        snapshot.write(run.snapshot(step))
        # The end needs no arrays.
        (run.snapshot(step) / "arrays.safetensors").unlink()
    logger = WandbRun(rows, "offline", run, lambda step: step, said.append)
    logger._log_end()
    found = rows.tables["bias/preferred_tokens_over_steps"]
    assert [row[:2] for row in found] == [[step, k] for step in (0, 20, 40, 60) for k in range(1, 6)]
    words = "a table has 20 rows at most; preferred_tokens_over_steps has 4 of 7 snapshots, 5 of 5 tokens of each"
    assert [words in line for line in said] == [True]
    log_snapshot([logger], snapshot)
    first, second = (rows.tables[f"bias/sink_mass_by_head_blocks_{part}"] for part in ("1_to_2", "3_to_3"))
    assert first + second == [[layer, head, 8.0 * (layer - 1) + head] for layer in (1, 2, 3) for head in range(8)]
    monkeypatch.setattr(wandb.Table, "MAX_ROWS", 8)  # not even two snapshots fit
    logger._log_end()
    found = rows.tables["bias/preferred_tokens_over_steps"]
    assert [row[:2] for row in found] == [[step, k] for step in (0, 60) for k in range(1, 5)]
    monkeypatch.setattr(wandb.Table, "MAX_ROWS", 35)
    logger._log_end()
    assert (len(rows.tables["bias/preferred_tokens_over_steps"]), len(said)) == (35, 2)


def test_loggers_that_are_missing_name_their_install_line(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("birthmark.callbacks.loggers.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"log\.loggers has tensorboard.*pip install tensorboard"):
        pretrain(tiny({"log.loggers": ["tensorboard"]}), RunDir(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    check_installed(LogConfig(loggers=["csv"], wandb="offline"))
    with pytest.raises(UsageError, match=r"pip install wandb"):
        check_installed(LogConfig(wandb="offline"))


def test_a_logger_named_twice_is_refused(tiny):
    with pytest.raises(UsageError, match=r"log\.loggers has 'csv' twice: give it once"):
        tiny({"log.loggers": ["csv", "wandb", "csv"]})


def test_nothing_of_wandb_is_loaded_where_it_is_off(python):
    code = (
        "import sys; from birthmark.callbacks.config import LogConfig; from birthmark.callbacks.wandb_run import *;"
        "off = [LogConfig(wandb='off'), LogConfig(loggers=['csv'])];"
        "assert [wandb_run(config, None, None, {}, 1) for config in off] == [None, None];"
        "assert 'wandb' not in sys.modules"
    )
    subprocess.run([python, "-c", code], check=True)
