"""What W&B is told, and what the environment decides of it (docs/run-directory.md)."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml

import birthmark
from birthmark.api.run import in_its_folder
from birthmark.callbacks.config import LogConfig
from birthmark.callbacks.wandb_run import Identity, wandb_mode, wandb_run
from birthmark.errors import RunError, UsageError
from birthmark.launch.command_table import command_parser
from birthmark.measure.records import RunDir
from birthmark.models.adapter_config import AdapterConfig
from birthmark.trainer.config_file import config_of
from birthmark.trainer.run_callbacks import _identity
from birthmark.trainer.run_folder import RunStart

IDENTITY = Identity("abc123", "demo", "demo", "pretrain")


@pytest.mark.parametrize(
    ("config", "variables", "mode"),
    [
        ({}, {}, "offline"),
        ({}, {"WANDB_API_KEY": "key"}, "online"),
        ({"wandb": "online"}, {"WANDB_MODE": "offline"}, "offline"),
        ({"wandb": "offline"}, {"WANDB_MODE": "online"}, "online"),
        ({"wandb": "offline"}, {"WANDB_MODE": "dryrun"}, "offline"),
        ({"wandb": "online"}, {"WANDB_MODE": "disabled"}, "off"),
        ({"wandb": "online"}, {"WANDB_DISABLED": "true"}, "off"),
        ({"wandb": "online"}, {"WANDB_DISABLED": "false"}, "online"),
        # What is off in the config is not asked for at all.
        ({"wandb": "off"}, {"WANDB_MODE": "online"}, "off"),
        ({"loggers": ["csv"]}, {"WANDB_MODE": "online"}, "off"),
    ],
)
def test_the_mode(config, variables, mode, tmp_path, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wandb_mode(LogConfig(**config)) == mode


def test_auto_is_online_where_the_user_is_logged_in_at_the_host_in_use(tmp_path, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine wandb.example.org login user password key\n")
    assert wandb_mode(LogConfig()) == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org/")
    assert wandb_mode(LogConfig()) == "online"


def test_a_mode_that_is_none_is_one_line(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "of\nline")
    with pytest.raises(UsageError, match=r"^WANDB_MODE is of line: give online, offline or disabled$"):
        wandb_mode(LogConfig())


def test_without_wandb_auto_is_off(monkeypatch):
    monkeypatch.setattr("birthmark.callbacks.wandb_run.importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("WANDB_MODE", "online")
    assert wandb_mode(LogConfig()) == "off"


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text("name: demo\n")
    run.birth.write_text("{}\n")
    return run


@pytest.mark.heavy
def test_the_environment_wins_a_failure_is_an_alert_and_a_run_goes_on_as_itself(
    run, tmp_path, monkeypatch, offline_wandb
):
    variables = {
        "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team", "WANDB_NAME": "named", "WANDB_RUN_GROUP": "band",
        "WANDB_JOB_TYPE": "job", "WANDB_TAGS": "a,b", "WANDB_DIR": str(tmp_path), "WANDB_RUN_ID": "fromsweep",
    }  # fmt: skip
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        logger = wandb_run(LogConfig(wandb="offline", tags=["ours"], group="ours"), run, IDENTITY, {}, 8)
        logger.close(RunError("loss is nan at step 3 (learning rate 1): lower optim.lr"))
    (start,) = offline_wandb(tmp_path)
    assert (start.id, start.run.project, start.run.entity) == ("fromsweep", "theirs", "team")
    assert (start.run.display_name, start.run.run_group, start.run.job_type) == ("named", "band", "job")
    assert list(start.run.tags) == ["a", "b"]
    text = "loss is nan at step 3 (learning rate 1): lower optim.lr"
    assert start.alerts == [("named failed", text, "ERROR")]
    assert start.artifacts == {"birthmark-fromsweep": ["birth.json", "config.yaml"]}
    # Without the variables a start goes on in the W&B run that the first one began.
    logger = wandb_run(LogConfig(wandb="offline", tags=["ours"]), run, IDENTITY, {}, 8)
    logger.close(None)
    (again,) = offline_wandb(run.path)
    assert (again.id, again.run.project, again.run.entity) == ("fromsweep", "theirs", "team")
    assert (again.run.run_group, list(again.run.tags), again.alerts) == ("demo", ["ours"], [])
    # One command sends all of its starts, in their order, and no other run's.
    for other in ("other", "x-fromsweep"):
        (run.path / f"wandb/offline-run-20200101_000000-{other}").mkdir()
    time.sleep(1)  # a start's folder has the second in its name
    logger = wandb_run(LogConfig(wandb="offline"), run, IDENTITY, {}, 8)
    logger.close(None)
    starts = sorted(offline_wandb(run.path), key=lambda start: start.run.start_time.ToNanoseconds())
    assert len(starts) == 2
    folders = " ".join(str(start.files.parent) for start in starts)
    assert logger.where == f"offline, send it with: wandb sync {folders}"


def kill_wandb():
    """Kill the process that W&B works in, as a machine that is out of memory does."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = process.joinpath("stat").read_text().rpartition(")")[2].split()
            is_wandb = process.joinpath("comm").read_text().startswith("wandb-core")
        except OSError:  # ended meanwhile
            continue
        if is_wandb and int(words[1]) == os.getpid():
            os.kill(int(process.name), signal.SIGKILL)
            return
    raise AssertionError("W&B has no process")


@pytest.mark.heavy
def test_a_run_goes_on_without_a_wandb_that_was_killed(run, offline_wandb):
    said = []
    logger = wandb_run(LogConfig(wandb="offline"), run, IDENTITY, {}, lambda step: 8 * step, said.append)
    logger.log_metrics({"train/loss": 2.0}, 1)
    kill_wandb()
    until = time.monotonic() + 30
    while not said:
        assert time.monotonic() < until
        logger.log_metrics({"train/loss": 1.0}, 2)
        time.sleep(0.05)
    logger.alert("loss is nan")
    logger.close(None)
    assert len(said) == 1
    assert re.fullmatch(r"W&B: its process is gone \(.+\); the run goes on and logs to .*metrics\.jsonl; .*", said[0])
    # One that goes on starts W&B again; what the killed process wrote has no end.
    shutil.rmtree(run.path / "wandb")
    again = wandb_run(LogConfig(wandb="offline"), run, IDENTITY, {}, lambda step: 8 * step, said.append)
    again.log_metrics({"train/loss": 0.5}, 3)
    again.close(None)
    assert len(said) == 1
    (start,) = offline_wandb(run.path)
    assert (start.logged["train/loss"], start.logged["train/tokens"]) == (0.5, 24)


def test_a_wandb_that_does_not_start_is_one_line(tmp_path):
    config = LogConfig(wandb="offline", project="no/such/name")
    with pytest.raises(RunError, match=r"log\.wandb offline: W&B did not start .*--log\.wandb off") as error:
        wandb_run(config, RunDir(tmp_path), IDENTITY, {}, 8)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("folder", "fields", "name", "group", "job_type"),
    [
        ("runs/demo", {"name": "demo"}, "demo", "demo", "pretrain"),
        ("runs/mine", {"name": "demo-3"}, "mine", "demo", "pretrain"),
        ("runs/mine", {"name": "demo-seed3"}, "mine", "demo", "pretrain"),
        ("runs/mine", {"name": "gpt3"}, "mine", "gpt3", "pretrain"),
        ("runs/more", {"name": "demo", "init_from": "runs/demo"}, "more", "demo", "continue"),
        (
            "runs/more",
            {"name": "demo", "init_from": "runs/demo", "adapter": AdapterConfig("lora")},
            "more",
            "demo",
            "adapt",
        ),
        ("studies/sinks/softmax/seed-3", {"name": "sinks-softmax-3"}, "sinks-softmax-3", "sinks-softmax", "pretrain"),
    ],
)
def test_what_a_run_is_called(tiny, folder, fields, name, group, job_type):
    start = RunStart(None, 0, {"run_id": "id"})
    assert _identity(tiny(fields), RunDir(Path(folder)), start) == Identity("id", name, group, job_type)


# ---------------------------------------------------------------- the documented sweep


@pytest.fixture(scope="module")
def sweep():
    page = (Path(birthmark.__file__).parent / "docs" / "run-directory.md").read_text()
    (text,) = [block for block in page.split("```yaml\n")[1:] if block.startswith("# sweep.yaml")]
    return yaml.safe_load(text.partition("```")[0])


def test_what_wandb_makes_of_the_documented_sweep_is_a_run(sweep):
    # Takes longer to load than all of these tests.
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    for pick in (0, -1):
        chosen = {name: {"value": spec["values"][pick]} for name, spec in sweep["parameters"].items()}
        arguments = create_sweep_command_args({"args": chosen})["args"]
        words = [
            w for word in create_sweep_command(sweep["command"]) for w in (arguments if word == "${args}" else [word])
        ]
        assert words[:2] == ["birthmark", "pretrain"]
        config = config_of(command_parser("pretrain").parse_args(words[2:]))
        assert config.optim.lr == chosen["optim.lr"]["value"]
        assert config.init_seed == chosen["init_seed"]["value"]
        assert config.snapshot.enabled is chosen["snapshot.enabled"]["value"]


def test_each_run_of_a_sweep_has_a_folder_of_its_own(tiny, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "x1")
    assert in_its_folder(tiny({"run_dir": ""}), "demo").run_dir == "runs/tiny"
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    assert in_its_folder(tiny({"run_dir": ""}), "demo").run_dir == "runs/tiny-x1"
    assert in_its_folder(tiny({"run_dir": "here"}), "demo").run_dir == "here"
    monkeypatch.setenv("HOME", "/home/me")
    assert in_its_folder(tiny({"run_dir": "~/runs/a"}), "demo").run_dir == "/home/me/runs/a"
