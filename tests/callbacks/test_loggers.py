import sys

import numpy as np
import pytest

from birthmark.callbacks.config import LogConfig
from birthmark.callbacks.loggers import JsonLinesLogger, log_snapshot, wandb_logger, wandb_mode
from birthmark.errors import RunError, UsageError
from birthmark.measure.records import RunDir, Snapshot, read_metrics

SNAPSHOT = Snapshot(
    {
        "step": 4,
        "bias": {"alignment": 0.5},
        "top_tokens": [{"rank": 1, "id": 7, "text": "self", "p": 0.1, "argmax_share": 0.2, "rank_at_birth": 3}],
    },
    {"sink_mass": np.array([[0.25, 0.75]])},
)


def test_lines_hold_the_step_and_the_names(tmp_path):
    logger = JsonLinesLogger(RunDir(tmp_path))
    logger.log_metrics({"train/loss": 1.5}, 3)
    logger.log_metrics({"val/loss": 2.5}, 3)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 3, "train/loss": 1.5}, {"step": 3, "val/loss": 2.5}]


def test_auto_is_offline_unless_logged_in(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode(LogConfig()) == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert wandb_mode(LogConfig()) == "online"
    (tmp_path / "netrc").write_text("machine example.org login user password key\n")
    assert wandb_mode(LogConfig()) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert wandb_mode(LogConfig()) == "online"
    assert wandb_mode(LogConfig(wandb="off")) == "off"


def test_without_wandb_auto_is_off_and_asking_for_it_names_the_install_line(tmp_path, monkeypatch):
    monkeypatch.setattr("birthmark.callbacks.loggers.importlib.util.find_spec", lambda name: None)
    assert wandb_logger(LogConfig(), RunDir(tmp_path), "id", {}) is None
    with pytest.raises(UsageError, match=r"pip install 'birthmark\[wandb\]'"):
        wandb_mode(LogConfig(wandb="offline"))


def test_wandb_receives_the_same_names_and_native_objects(tmp_path, offline_wandb):
    """A real offline run, read back from the file that `wandb sync` would send."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    logger = wandb_logger(LogConfig(wandb="offline"), run, "abc123", {"init_seed": 3})
    logger.log_metrics({"train/loss": 1.5}, 2)
    logger.log_metrics(SNAPSHOT.scalars(), 4)
    log_snapshot([JsonLinesLogger(run), logger], SNAPSHOT)
    logger.experiment.finish()
    ((run_id, history, config),) = offline_wandb(run.path)
    assert run_id == "abc123"
    merged = {key: value for line in history for key, value in line.items()}
    assert merged["train/loss"] == 1.5
    assert merged["bias/alignment"] == 0.5
    assert merged["bias/preferred_tokens/_type"] == "table-file"
    assert merged["bias/sink_heatmap/_type"] == "image-file"
    assert [line["trainer/global_step"] for line in history] == [2, 4, 4]
    assert config["init_seed"] == 3


def test_a_wandb_that_does_not_start_is_one_line(tmp_path):
    with pytest.raises(RunError, match=r"log\.wandb offline: W&B did not start .*--log\.wandb off") as error:
        wandb_logger(LogConfig(wandb="offline", project="no/such/name"), RunDir(tmp_path), "abc123", {})
    assert "\n" not in str(error.value)


def test_nothing_of_wandb_is_loaded_where_it_is_off(tmp_path):
    import subprocess

    code = (
        "import sys, pathlib; from birthmark.callbacks.loggers import *;"
        "from birthmark.callbacks.config import LogConfig;"
        "from birthmark.measure.records import RunDir;"
        "assert wandb_logger(LogConfig(wandb='off'), RunDir(pathlib.Path('.')), 'id', {}) is None;"
        "assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
