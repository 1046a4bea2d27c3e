"""The first real study: arms of one birth, trained side by side on text until the part's time is over.

Runs lie in ``build/gpu-study``. A signal ends them in time, with a checkpoint, and the next call goes on with them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from machine import ROOT
from record import FAILED, OK, SKIPPED

from birthmark.measure.metrics_log import metrics_by_step
from birthmark.measure.records import RunDir, Snapshot

from ..case import Case, Setting

#: The packed corpus (``research/sink_at_60m/corpus.py``), and the folder of corpus and runs on the machine.
PACKED, HOME = ROOT / "gpu-corpus", ROOT / "build" / "gpu-study"
BASE = ROOT / "research" / "sink_at_60m" / "base.yaml"
#: Starts the runs.
PYTHON = sys.executable
#: Arms by name, all from one seed; the slow one learns at a third of the rate.
ARMS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "headnorm": ("--model.attention.aggregation=headnorm",),
    "plain_slow": ("--optim.lr=3e-4",),
    "correlated": ("--model.attention.aggregation=calibrated", "--model.attention.calibration.correlation=estimated"),
}
#: Seconds before the deadline at which runs are told to end: for the last snapshot, a checkpoint and the page.
_ENDING = 15.0
#: Columns of the table, from the last snapshot on text.
_SHOWN = ("sink_mass", "sink_mass_max", "sink_rate", "massive_max", "alignment", "rank_persistence")


def command(arm: str, folder: Path, setting: Setting) -> list[str]:
    """Build the command that starts an arm's run, or continues it."""
    words = [PYTHON, "-m", "birthmark.launch.cli", "pretrain"]
    if RunDir.is_run(folder):
        return [*words, f"--resume={folder}"]
    if not setting.tiny:
        return [*words, f"--config={BASE}", f"--run_dir={folder}", f"--trainer.device={setting.device}", *ARMS[arm]]
    small = ["--trainer.max_steps=6", "--trainer.checkpoint_every=6", "--trainer.val_sequences=4"]
    small += ["--snapshot.n_sequences=8", "--snapshot.factor=2.0", "--snapshot.fingerprint.n_inputs=100"]
    small.append(f"--trainer.device={setting.device}")
    return [*words, "--config=tiny_demo", f"--run_dir={folder}", *small, *ARMS[arm]]


def milestones(run: RunDir) -> Iterator[dict[str, Any]]:
    """Yield a row for each snapshot of a run: its step, its losses, and the measurements on text."""
    metrics, folders = metrics_by_step(run), run.snapshot_folders()
    for folder in folders:
        snapshot = Snapshot.read(folder)
        text = snapshot.summary.get("bias_text", {})
        row: dict[str, Any] = {"step": snapshot.step, "val loss": metrics.get(snapshot.step, {}).get("val/loss")}
        random_probe = {f"{name}, random": snapshot.bias.get(name) for name in _SHOWN}
        yield row | {f"{name}, text": text.get(name) for name in _SHOWN} | random_probe


def _side_by_side(arms: tuple[str, ...], home: Path, setting: Setting) -> Iterator[dict[str, Any]]:
    if not setting.tiny and not (home / "corpus" / "tokens.bin").is_file():
        if not PACKED.is_dir():
            yield {"table": "Runs", "status": SKIPPED, "note": f"{PACKED.name}/ is not here: make it with corpus.py"}
            return
        unpack = [sys.executable, str(BASE.with_name("corpus.py")), "unpack", str(PACKED), str(home / "corpus")]
        subprocess.run(unpack, check=True, cwd=ROOT)
    started, processes = time.monotonic(), {}
    for arm in arms:
        log = home / f"{arm}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            line = command(arm, home / arm, setting)
            environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // len(arms)))}
            processes[arm] = subprocess.Popen(line, cwd=ROOT, stdout=out, stderr=out, env=environment)
    _wait(processes, setting.deadline - _ENDING)
    for arm, process in processes.items():
        tail = (home / f"{arm}.log").read_text(errors="replace").strip().splitlines()[-1:]
        row = {"table": "Runs", "arm": arm, "seconds": time.monotonic() - started}
        if process.returncode not in (0, 128 + signal.SIGTERM):
            note = f"ended with status {process.returncode}: {''.join(tail)[:300]}"
            yield row | {"status": FAILED, "note": note}
            continue
        run = RunDir(home / arm)
        birth = run.read_birth()
        logged = [entry for entry in metrics_by_step(run).values() if "train/tokens" in entry]
        last: Mapping[str, float] = logged[-1] if logged else {}
        yield row | {
            "birth": birth["digest"][:12],
            "parameters": birth["n_params"],
            "tokens": last.get("train/tokens"),
            "loss": last.get("train/loss"),
            "tokens/s": last.get("train/tokens_per_s"),
            "status": OK,
        }
        for point in milestones(run):
            yield {"table": f"Milestones of {arm}", **point}


def _wait(processes: Mapping[str, subprocess.Popen[bytes]], deadline: float) -> None:
    """Wait for all processes; at the deadline ask the running ones to end, and kill those that do not."""
    told = False
    while any(process.poll() is None for process in processes.values()):
        if time.monotonic() > deadline and not told:
            told = True
            for process in processes.values():
                process.terminate()
        if time.monotonic() > deadline + 3 * _ENDING:
            for process in processes.values():
                process.kill()
        time.sleep(0.2)


def cases(setting: Setting) -> list[Case]:
    """Return one case with all requested arms at once: the device has no gaps then, and the start of a run is paid for
    once.

    Raises:
        ValueError: an arm that is none.
    """
    if unknown := [arm for arm in setting.arms if arm not in ARMS]:
        raise ValueError(f"--arms has {unknown[0]!r}: give some of {', '.join(ARMS)}")
    home = HOME.with_name("gpu-study-rehearsal") if setting.tiny else HOME
    return [Case("side by side: " + ", ".join(setting.arms), partial(_side_by_side, setting.arms, home), 120)]
