"""Cost of `birthmark audit` on a suite of published size: time, processor time, and peak memory.

    python benchmarks/audit_cost.py [--model pythia-160m] [--checkpoints 50] [--folder /tmp/suite] [--dtype bfloat16]

The suite is a birth and a random walk from it: the audit reads weights and runs no model, so that the way they
came to be costs nothing. Checkpoint k is ``W + drift·Σ sd(W)·noise``, a new draw of noise for each step, written as one
safetensors file beside the config of ``transformers``. The audit is the command, in a process of its own, with and
without ``--quick``. The suite is deleted at the end unless ``--keep`` is given; 50 checkpoints of 162M parameters in
bfloat16 take 16 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import write_page
from safetensors.torch import load_file, save_file

from birthmark.models.exchange.pretrained import save_pretrained
from birthmark.trainer.by_name.model_names import open_source

RESULTS = Path(__file__).parent / "results" / "audit_cost.md"
#: Size of each step of the walk, in standard deviations of a tensor.
DRIFT = 0.05
_FILE = "model.safetensors"


class Cost(NamedTuple):
    """Cost of one audit."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    found: dict[str, Any]


def write_suite(folder: Path, model: str, n: int, dtype: torch.dtype) -> int:
    """Write a birth and its random walk as folders of ``transformers``; return the bytes of one checkpoint."""
    first = folder / "step0"
    save_pretrained(open_source(f"models/{model}@0").load(), first, dtype=dtype, max_shard_bytes=1 << 40)
    tensors = {name: tensor.float() for name, tensor in load_file(first / _FILE).items()}
    numbers = torch.Generator().manual_seed(0)
    # Gains and biases are constant at birth.
    steps = {name: DRIFT * (float(tensor.std()) or 0.2) for name, tensor in tensors.items()}
    for k in range(1, n):
        for name, size in steps.items():
            tensors[name] += size * torch.randn(tensors[name].shape, generator=numbers)
        there = folder / f"step{1000 * k}"
        there.mkdir()
        shutil.copy(first / "config.json", there)
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, there / _FILE, {"format": "pt"})
    return (first / _FILE).stat().st_size


def audit(folder: Path, *options: str) -> Cost:
    """Audit a suite by the command, in a process of its own."""
    with tempfile.TemporaryFile("w+") as out:
        start = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", "birthmark.launch.cli", "audit", str(folder), "--json", *options], stdout=out
        )
        _, status, used = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        return Cost(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, json.loads(out.read()))


def line(options: str, n: int, cost: Cost) -> str:
    """Format a row of the table."""
    read = sum(one["bytes_sampled"] for one in cost.found["checkpoints"])
    total = sum(one["bytes"] for one in cost.found["checkpoints"])
    return (
        f"| {options} | {n} | {cost.seconds:.0f} | {cost.cpu_seconds:.0f} | {cost.peak_bytes / 1e6:,.0f} "
        f"| {100 * read / total:.2f} % | {cost.found['sentence']} |"
    )


def main() -> None:
    """Make the suite, audit it, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="pythia-160m")
    parser.add_argument("--checkpoints", type=int, default=50)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--folder", type=Path, help="where the suite is, or is written")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--beside", default="nothing", help="what else ran on the machine")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="audit-cost-"))
    try:
        if not (folder / "step0").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_suite(folder, options.model, options.checkpoints, getattr(torch, options.dtype))
        bytes_of_one = (folder / "step0" / _FILE).stat().st_size
        load = os.getloadavg()[0]
        costs = {"--quick": audit(folder, "--quick"), "all values": audit(folder)}
        lines = [
            "# What an audit costs",
            "",
            f"`benchmarks/audit_cost.py`: {options.checkpoints} checkpoints of `{options.model}` in {options.dtype}, "
            f"{bytes_of_one / 1e6:,.0f} MB each: a birth and a random walk of {DRIFT:g} standard deviations a step. "
            f"`birthmark audit` in a process of its own; memory is its highest resident size, libraries included. "
            f"Beside it ran {options.beside}.",
            "",
            "| | checkpoints | seconds | seconds of processor time | peak MB | sampled bytes | answer |",
            "|---|---:|---:|---:|---:|---:|---|",
            *(line(name, options.checkpoints, cost) for name, cost in costs.items()),
        ]
        write_page(RESULTS, lines, load)
    finally:
        if not options.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
