"""Training under every strategy on the device: one process under torchrun, with its losses beside those without
torchrun.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from machine import ROOT
from record import FAILED, NOT_INSTALLED, OK

from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.records import RunDir
from birthmark.trainer.strategies.table import STRATEGIES, StrategyName

from ..case import Case, Setting

#: Starts the runs.
PYTHON = sys.executable


class Way(NamedTuple):
    """A strategy, with other fields of ``trainer``."""

    strategy: StrategyName
    fields: tuple[str, ...] = ()


SINGLE = Way("single")
#: One process reduces over itself alone, through the same calls as many processes would.
WAYS: dict[str, Way] = {
    **{name: Way(name) for name, facts in STRATEGIES.items() if facts.launched},
    "fsdp2, compiled": Way("fsdp2", ("--trainer.compile=blocks",)),
    "fsdp2, checkpointed": Way("fsdp2", ("--trainer.activation_checkpointing=full",)),
    "zero2, offload cpu": Way("zero2", ("--trainer.offload=cpu",)),
    "zero3, offload cpu": Way("zero3", ("--trainer.offload=cpu",)),
}
#: Largest relative difference of a loss from a single process's: order of float32 sums, over a few steps.
TOLERANCE = 1e-3


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference; NaN if a loss is NaN."""
    return float(np.max(np.abs(np.divide(losses, expected) - 1)))


def _train(way: Way, run: Path, setting: Setting) -> tuple[int, list[float], str]:
    """Train a run of a few steps with its checkpoint, and return status, losses and the last line of standard error."""
    steps, config = (4, "tiny_demo") if setting.tiny else (24, "demo")
    agent = ["birthmark.launch.torchrun_agent", "--standalone", "--nproc-per-node=1", "-m"]
    command = [PYTHON, "-m", *(agent if STRATEGIES[way.strategy].launched else []), "birthmark.launch.cli", "pretrain"]
    command += [f"--config={config}", f"--run_dir={run}", f"--trainer.device={setting.device}"]
    command += [f"--trainer.strategy={way.strategy}", f"--trainer.max_steps={steps}"]
    command += [
        f"--trainer.checkpoint_every={steps}",
        "--trainer.log_every=2",
        "--snapshot.n_sequences=16",
        *way.fields,
    ]
    limit_s = max(setting.deadline - time.monotonic(), 10)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return 124, [], f"not over after {limit_s:.0f} s"
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], flush=True)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("birthmark: ") or "Error: " in line]
    losses = [entry["train/loss"] for entry in read_metrics(RunDir(run).metrics) if "train/loss" in entry]
    return done.returncode, losses, (ours or lines or [""])[-1][:300]


def _beside(way: Way, expected: list[float], run: Path, setting: Setting) -> dict[str, Any]:
    """Return the columns of one way: its time, and its losses beside those of a single process."""
    if STRATEGIES[way.strategy].engine and importlib.util.find_spec("deepspeed") is None:
        return {"status": NOT_INSTALLED, "note": "deepspeed"}
    start = time.monotonic()
    status, losses, why = _train(way, run, setting)
    seconds = time.monotonic() - start
    if status or len(losses) != len(expected):
        return {"seconds": seconds, "status": FAILED, "note": f"ended with status {status}: {why}"}
    worst = largest_difference(losses, expected)
    fine = worst <= TOLERANCE
    row = {"seconds": seconds, "largest difference of a loss": worst}
    return row | {"status": OK if fine else FAILED, "note": "" if fine else f"more than {TOLERANCE:g}"}


def _strategies(names: Sequence[str], setting: Setting) -> Iterator[dict[str, Any]]:
    table = f"Strategies, one process on {setting.device} under torchrun, float32, beside a single one"
    with tempfile.TemporaryDirectory() as folder:
        status, expected, why = _train(SINGLE, Path(folder) / "single", setting)
        if status or not expected:
            yield {"table": table, "strategy": "single", "status": FAILED, "note": f"ended with status {status}: {why}"}
            return
        for number, name in enumerate(names):
            row = _beside(WAYS[name], expected, Path(folder) / str(number), setting)
            yield {"table": table, "strategy": name, **row}


def cases(setting: Setting) -> list[Case]:
    """Return the cases of torch's strategies, then those of DeepSpeed."""
    if setting.tiny:
        return [Case("strategies", partial(_strategies, ["fsdp2"]))]
    by_engine = {
        engine: [name for name, way in WAYS.items() if STRATEGIES[way.strategy].engine is engine]
        for engine in (False, True)
    }
    return [
        Case("strategies of torch", partial(_strategies, by_engine[False]), 120),
        Case("strategies of DeepSpeed", partial(_strategies, by_engine[True]), 150),
    ]
