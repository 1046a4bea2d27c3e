"""Clean suites have no finding: runs of every optimizer, resumed runs, runs of every strategy, and runs handed on."""

import importlib.util
import json
from dataclasses import replace

import pytest
from quiet_runs import config_file, run

from birthmark.launch.cli import main
from birthmark.trainer.optimizers.table import OPTIMIZERS
from birthmark.trainer.strategies.table import STRATEGIES

STEPS, EVERY = 90, 10
#: Rates at which a small model learns the task: of most optimizers AdamW's.
RATES = {"sgd": 0.01, "lion": 1e-3, "muon": 0.01}
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
NAMES = [name for name in OPTIMIZERS if name != "soap" or importlib.util.find_spec("pytorch_optimizer") is not None]


@pytest.fixture(scope="module")
def config(tiny):
    fields = {"model.d_model": 32, "optim.lr": 3e-3, "optim.warmup_steps": 10, "snapshot.enabled": False}
    fields |= {"trainer.max_steps": STEPS, "trainer.checkpoint_every": EVERY, "trainer.keep_last": 100}
    return tiny(fields | {"trainer.global_batch_size": 8, "trainer.log_every": 10})


@pytest.fixture
def findings(capsys):
    def audited(path):
        capsys.readouterr()
        status = main(["audit", str(path), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert len(found["checkpoints"]) == STEPS // EVERY + 1
        assert (status == 0) == (not any(one["findings"] for one in found["checkpoints"]))
        assert found["direction"]["towards"] == "as labelled"
        cosine = found["checkpoints"][-1]["cosine_with_first"]
        print(path.name, status, cosine)
        return {one["step"]: one["findings"] for one in found["checkpoints"] if one["findings"]}

    return audited


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("name", NAMES)
def test_no_optimizer_makes_a_finding(config, findings, tmp_path, name, schedule):
    optim = replace(config.optim, name=name, lr=RATES.get(name, config.optim.lr), schedule=schedule)
    assert findings(run(replace(config, optim=optim), tmp_path / name).path) == {}


@pytest.mark.slow
def test_no_strategy_and_no_stop_makes_a_finding(config, findings, tmp_path, launch_runs):
    strategies = [name for name, its in STRATEGIES.items() if its.launched and (HAS_DEEPSPEED or not its.engine)]
    config_file(file := tmp_path / "config.yaml", config)
    runs = [(tmp_path / name, False, [f"--trainer.strategy={name}"]) for name in strategies]
    for leg, (name, stop) in enumerate(zip(strategies[:3], (30, 60, STEPS), strict=True)):
        runs.append((tmp_path / "handed", leg > 0, [f"--trainer.strategy={name}", f"--trainer.max_steps={stop}"]))
        # And of a single process.
        run(replace(config, trainer=replace(config.trainer, max_steps=stop)), tmp_path / "resumed", resume=leg > 0)
    launch_runs(file, runs)
    for name in [*strategies, "handed", "resumed"]:
        assert findings(tmp_path / name) == {}, name
