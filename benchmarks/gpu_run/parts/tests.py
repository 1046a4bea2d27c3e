"""Basic checks: the CUDA tests, births on the device, and the commands."""

from __future__ import annotations

import subprocess
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from machine import ROOT
from record import FAILED, NOT_REACHED, OK

from birthmark.launch.cli import main
from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.records import RunDir
from birthmark.models.birth import born, digest
from birthmark.trainer.config_file import read_config

from ..case import Case, Setting
from . import strategies

MARK = "mark.cuda"
BIRTHS = ("demo", "sinks_headnorm", "models/gpt2-124m", "models/llama-160m", "models/pythia-160m", "models/qwen3-0.6b")


def _marked_files() -> list[Path]:
    """List the test files with a test for a GPU: the others need not be importable here."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [file for file in files if MARK in file.read_text(encoding="utf-8")]


def _pytest(file: Path, setting: Setting) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [strategies.PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cuda and not slow"]
        command += [f"--junit-xml={report}", str(file)]
        limit_s = max(setting.deadline - time.monotonic(), 10)
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            note = f"not over after {limit_s:.0f} s"
            yield {"table": "Tests marked cuda", "status": NOT_REACHED, "note": note}
            return
        print(done.stdout[-2000:], done.stderr[-2000:], flush=True)
        cases = list(ET.parse(report).iter("testcase")) if report.is_file() else []
    broken = {
        f"{case.get('classname', '')}::{case.get('name', '')}": node
        for case in cases
        for node in [*case.findall("failure"), *case.findall("error")]
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    fine = not broken and done.returncode in (0, 5)  # 5: none was chosen
    yield {
        "table": "Tests marked cuda",
        "passed": len(cases) - len(broken) - skipped,
        "failed": len(broken),
        "skipped": skipped,
        "seconds": sum(float(case.get("time", 0)) for case in cases),
        "status": OK if fine else FAILED,
        "note": "" if fine or broken else f"pytest ended with status {done.returncode}: {_last(done)}",
    }
    for name, node in broken.items():
        why = (node.get("message") or "").strip().splitlines()
        row = {"table": "Tests that failed", "test": name, "status": FAILED, "note": why[0][:300] if why else ""}
        yield row | {"trace": (node.text or "")[-4000:]}


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1][:300] if lines else ""


def _birth(name: str, setting: Setting) -> Iterator[dict[str, Any]]:
    config = read_config(ROOT / "configs" / f"{name}.yaml").model
    here, there = (digest(born(config, 0, device)) for device in ("cpu", setting.device))
    same = here == there
    row = {"table": f"Birth digests, CPU and {setting.device}", "same": same, "status": OK if same else FAILED}
    yield row | {"digest": here[:12], "note": "" if same else f"there {there[:12]}"}


def _commands(setting: Setting) -> Iterator[dict[str, Any]]:
    """Start a run, its resumption and its page, as a user would."""
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        steps = 4 if setting.tiny else 40
        common = ["--trainer.device", setting.device, "--trainer.checkpoint_every", str(steps)]
        common += ["--trainer.log_every", "2", "--run_dir", run]
        config = "tiny_demo" if setting.tiny else "demo"
        bf16 = [] if setting.tiny else ["--trainer.precision", "bf16", "--trainer.compile", "blocks"]
        lines = {
            "pretrain": ["pretrain", "--config", config, *common, *bf16, "--trainer.max_steps", str(steps)],
            "resume": ["pretrain", "--resume", run, "--trainer.max_steps", str(2 * steps)],
            "snapshot": ["snapshot", run],
        }
        for name, line in lines.items():
            start = time.perf_counter()
            try:
                status = main(line)
            except SystemExit as error:  # argparse's
                status = error.code
            row = {"table": "Commands", "command": name, "seconds": time.perf_counter() - start}
            entries = read_metrics(RunDir(Path(run)).metrics)
            speeds = [entry["train/tokens_per_s"] for entry in entries if "train/tokens_per_s" in entry]
            row["tokens/s"] = speeds[-1] if speeds else None
            yield row | {
                "status": OK if not status else FAILED,
                "note": f"ended with status {status}" if status else "",
            }


def cases(setting: Setting) -> list[Case]:
    """Return the cases: births by config, the commands, the strategies, then tests by file."""
    files = _marked_files()[:1] if setting.tiny else _marked_files()
    births = ("tiny_demo",) if setting.tiny else BIRTHS
    return [
        *(Case(f"birth of {name}", partial(_birth, name), 40) for name in births),
        Case("commands", _commands, 120),
        *strategies.cases(setting),
        *(Case(file.relative_to(ROOT).as_posix(), partial(_pytest, file), 45) for file in files),
    ]
