"""Whether every strategy trains on the device: one process under torchrun, its losses beside those without torchrun."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from machine import ROOT
from record import FAILED, NOT_INSTALLED, OK

from ..case import Case, Setting

#: Starts the runs.
PYTHON = sys.executable
#: Fields beside ``trainer.strategy``. One process reduces over itself alone, through the same calls as many would.
WAYS: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "fsdp2": (),
    "fsdp2, compiled": ("--trainer.compile=blocks",),
    "fsdp2, checkpointed": ("--trainer.activation_checkpointing=full",),
    "zero1": (),
    "zero2": (),
    "zero3": (),
    "zero2, offload cpu": ("--trainer.offload=cpu",),
    "zero3, offload cpu": ("--trainer.offload=cpu",),
}
#: Largest relative difference of a loss from a single process's: order of float32 sums, over a few steps.
TOLERANCE = 1e-3


def _losses(run: Path) -> list[float]:
    file = run / "metrics.jsonl"
    entries = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [entry["train/loss"] for entry in entries if "train/loss" in entry]


def _train(strategy: str, fields: tuple[str, ...], run: Path, setting: Setting) -> tuple[int, list[float], str]:
    """Status, losses and the last line of standard error of a run of a few steps and its checkpoint."""
    steps = 4 if setting.tiny else 24
    command = [PYTHON, "-m"]
    if strategy != "single":
        command += ["birthmark.launch.torchrun_agent", "--standalone", "--nproc-per-node=1", "-m"]
    command += [
        "birthmark.launch.cli",
        "pretrain",
        "--config",
        "tiny_demo" if setting.tiny else "demo",
        "--run_dir",
        str(run),
    ]
    command += [f"--trainer.device={setting.device}", f"--trainer.strategy={strategy}", f"--trainer.max_steps={steps}"]
    command += [f"--trainer.checkpoint_every={steps}", "--trainer.log_every=2", "--snapshot.n_sequences=16", *fields]
    limit_s = max(setting.deadline - time.monotonic(), 10)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return 124, [], f"not over after {limit_s:.0f} s"
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], flush=True)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("birthmark: ") or "Error: " in line]
    return done.returncode, _losses(run), (ours or lines or [""])[-1][:300]


def _strategies(names: tuple[str, ...], setting: Setting) -> Iterator[dict[str, Any]]:
    table = f"Strategies, one process on {setting.device} under torchrun, float32, beside a single one"
    with tempfile.TemporaryDirectory() as folder:
        status, expected, why = _train("single", (), Path(folder) / "single", setting)
        if status or not expected:
            yield {"table": table, "strategy": "single", "status": FAILED, "note": f"ended with status {status}: {why}"}
            return
        for name in names:
            strategy = name.split(",")[0]
            if strategy.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
                yield {"table": table, "strategy": name, "status": NOT_INSTALLED, "note": "deepspeed"}
                continue
            start = time.monotonic()
            status, losses, why = _train(strategy, WAYS[name], Path(folder) / name.replace(", ", "-"), setting)
            row = {"table": table, "strategy": name, "seconds": time.monotonic() - start}
            if status or len(losses) != len(expected):
                yield row | {"status": FAILED, "note": f"ended with status {status}: {why}"}
                continue
            worst = max(abs(got / wanted - 1) for got, wanted in zip(losses, expected, strict=True))
            note = "" if worst <= TOLERANCE else f"more than {TOLERANCE:g}"
            yield row | {"largest difference of a loss": worst, "status": FAILED if note else OK, "note": note}


def cases(setting: Setting) -> list[Case]:
    """Torch's strategies, then DeepSpeed's."""
    torchs = tuple(name for name in WAYS if not name.startswith("zero"))
    if setting.tiny:
        return [Case("strategies", partial(_strategies, ("fsdp2",)))]
    return [
        Case("strategies of torch", partial(_strategies, torchs), 120),
        Case("strategies of DeepSpeed", partial(_strategies, tuple(name for name in WAYS if name not in torchs)), 150),
    ]
