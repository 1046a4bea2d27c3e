"""The command that plans a run."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

import birthmark
from birthmark.errors import UsageError
from birthmark.launch.cli import main
from birthmark.plan.cluster import Cluster
from birthmark.plan.planner import Planner

CONFIGS = Path(birthmark.__file__).parent / "configs"


def planned(capsys, *arguments):
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def file(llama, tmp_path):
    """``file(fields)``: a config file of the run."""

    def write(fields=None):
        config = dataclasses.asdict(llama(fields))
        del config["name"], config["run_dir"]
        path = tmp_path / "llama.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


@pytest.mark.heavy
def test_people_read_whether_it_fits_and_what_is_best(file, capsys):
    path = str(file({"model.n_layers": 1}))
    assert main(["plan", path, "--n_gpus", "8", "--strategy", "zero2", "--price", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(path)
    assert "parameters on 8 × h100-80gb" in out
    assert "zero2, micro-batch 2" in out
    assert "fits: 73.60 GB" in out
    assert "estimated" in out
    assert "Alternatives" in out
    assert "leaves 5 % of that memory free" in out
    assert "best" in out
    for row in ("a checkpoint ", "host copies ", "a snapshot "):
        assert row in out
    assert "at 3 an hour" in out
    assert main(["plan", path, "--n_gpus", "1", "--gpu", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "no peak on CPU is known" in out
    assert "Alternatives" not in out


@pytest.mark.heavy
def test_any_field_of_a_run_can_be_set(file, capsys):
    alone = "--n_gpus", 8, "--alone", "--strategy", "ddp"
    settings = "--set", "init_seed=1", "name=other", "optim.lr=1e-3", "trainer.micro_batch_size=4"
    plain, changed = planned(capsys, file(), *alone), planned(capsys, file(), *alone, *settings)
    assert (plain["plan"]["micro_batch_size"], changed["plan"]["micro_batch_size"]) == (2, 4)
    assert changed["plan"]["estimated"] == ["gradients", "sent"]
    # A seed, a name and a learning rate cost nothing.
    assert changed == planned(capsys, file({"trainer.micro_batch_size": 4}), *alone)


@pytest.mark.heavy
def test_a_plan_has_the_micro_batch_that_its_run_takes(file, capsys):
    # 64 sequences in micro-batches of 2 over 64 processes.
    out = planned(capsys, file({"trainer.strategy": "fsdp2", "model.n_layers": 1}), "--n_gpus", 64)
    assert out["plan"]["micro_batch_size"] == 1
    assert {plan["micro_batch_size"] for plan in out["others"]} == {1}
    assert out["others"][out["best"]]["fits"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--n_gpus", "8", "--gpu", "h100"], "--gpu h100: give cpu or one of"),
        (["--n_gpus", "0"], "--n_gpus 0: give at least 1"),
        (["--n_gpus", "12"], "--n_gpus 12 is not a multiple of --gpus_per_node 8: give a multiple"),
        (["--n_gpus", "8", "--mfu", "40"], "--mfu 40.0: give a share"),
        (["--n_gpus", "8", "--drive", "0"], "--drive 0: give a positive number"),
        (["--n_gpus", "8", "--bandwidth", "0"], "--bandwidth 0: give a positive number"),
        (["--n_gpus", "8", "--strategy", "fsdp"], "--strategy fsdp: give single, ddp"),
        (["--n_gpus", "8", "--tokens", "-1"], "--tokens -1: give at least 0"),
        (["--n_gpus", "65", "--gpus_per_node", "65"], "64 is less than 65 processes: give 65 or more, or start 64"),
        (["--n_gpus", "8", "--set", "trainer.max_stepz=1"], "--set trainer.max_stepz=1: trainer.max_stepz: no such"),
        (["--n_gpus", "8", "--set", "trainer.max_steps"], "--set trainer.max_steps: write FIELD=VALUE"),
        (["--n_gpus", "8", "--set", "trainer.max_steps=many"], "trainer.max_steps: 'many' is not a whole number"),
    ],
)
def test_mistakes_are_one_line(file, capsys, arguments, words):
    path = file({"trainer.strategy": "fsdp2"})
    assert main(["plan", str(path), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_no_plan_inside_a_group(llama):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="a process of its own"):
            Planner(llama(), Cluster(1, "h100-80gb")).plan()
    finally:
        dist.destroy_process_group()
