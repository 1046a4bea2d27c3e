"""A run goes on from what another strategy, over another number of processes, has saved, as if nothing had been."""

import shutil
from dataclasses import asdict

import pytest
import yaml
from rich.console import Console

from birthmark.measure.records import RunDir, read_metrics
from birthmark.trainer.run import pretrain

# One launch for several runs, because starting takes longer than they do. Each looks like a launch of its own.
SCRIPT = """
import os, sys
from birthmark.launch.cli import main
from birthmark.trainer import run as training

training._write_report = lambda run: None  # takes longer than these runs
file, out = sys.argv[1:]

def run(name, *flags):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = name
    assert main(["pretrain", *flags]) == 0, (name, flags)

run("whole", f"--config={file}", f"--run_dir={out}/fsdp2", "--trainer.strategy=fsdp2")
run("single to fsdp2", f"--resume={out}/single-fsdp2", "--trainer.strategy=fsdp2")
run("single to replicas", f"--resume={out}/single-replicas", "--trainer.strategy=fsdp2", "--trainer.replicas=2")
run("single to ddp", f"--resume={out}/single-ddp", "--trainer.strategy=ddp")
"""


def losses(run):
    return {r["step"]: r["train/loss"] for r in read_metrics(run.metrics) if "train/loss" in r}


def half(source, path):
    """A copy of a run as it was after ten of its steps."""
    shutil.copytree(source.path, path)
    for folder in [*(path / "checkpoints").iterdir(), *(path / "snapshots").iterdir()]:
        if int(folder.name[5:]) > 10:
            shutil.rmtree(folder)
    return RunDir(path)


@pytest.fixture(scope="module")
def config(tiny):
    return tiny({"optim.schedule": "constant", "trainer.max_steps": 20, "trainer.checkpoint_every": 10})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def single(config, folder):
    return pretrain(config, RunDir(folder / "single"), console=Console(quiet=True)).run


@pytest.fixture(scope="module")
def gone_on(config, single, folder, launched):
    """The runs of the script."""
    for other in ("fsdp2", "replicas", "ddp"):
        half(single, folder / f"single-{other}")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(asdict(config)))
    launched(folder / "script.py", folder / "tiny.yaml", folder)


@pytest.mark.parametrize("other", ["fsdp2", "replicas", "ddp"])
def test_two_processes_go_on_from_what_one_has_saved(single, gone_on, folder, other):
    run = RunDir(folder / f"single-{other}")
    assert losses(run) == pytest.approx(losses(single), rel=1e-5)
    assert len(losses(run)) == 20
    parts = sorted(f.name for f in run.checkpoint(20).glob("*.safetensors"))
    # Each what it holds; of equal copies one.
    assert len(parts) == (2 if other == "fsdp2" else 1)


def test_one_process_goes_on_from_what_two_have_saved(config, single, gone_on, folder):
    run = half(RunDir(folder / "fsdp2"), folder / "fsdp2-single")
    assert len(list(run.checkpoint(10).glob("*.safetensors"))) == 2
    pretrain(config, run, resume=True, console=Console(quiet=True))
    assert losses(run) == pytest.approx(losses(single), rel=1e-5)
    assert len(losses(run)) == 20
