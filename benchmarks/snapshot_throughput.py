"""Throughput of a training with snapshots: a LLaMA of the 160M shape, a snapshot of 256 × 512 every 500 steps.

    python benchmarks/snapshot_throughput.py [--seq-len 512] [--micro-batch 2] [--json]

The model is ``configs/models/llama-160m.yaml`` (134M parameters, called 160M where it comes from), trained by Lightning
and our own module in bf16 on random tokens. Snapshots are whole ones: the pass in float32, eigenvalues, rank
correlations, files. One is taken in the middle of a few optimizer steps, and each micro-batch is timed.

The cost of 500 steps is computed from the times of a micro-batch, of an optimizer's update and of a snapshot: for a
global batch of G tokens, ``500 · (G / micro-batch · micro + update)``. Published runs of this size take half a million
to a million tokens a step; with smaller batches the snapshot weighs more. The micro-batches after the snapshot are
compared with those before it: this shows that a snapshot costs no more than its own time.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from birthmark.data.probes import random_probe
from birthmark.measure.config import SnapshotConfig
from birthmark.measure.measurement import birth_reference
from birthmark.measure.recorder import SnapshotRecorder
from birthmark.models.birth import born
from birthmark.trainer.config import OptimConfig, TrainerConfig
from birthmark.trainer.config_file import read_config
from birthmark.trainer.devices import keep_freed_memory
from birthmark.trainer.module import PretrainModule

PRESET = Path(__file__).parent.parent / "configs/models/llama-160m.yaml"
EVERY, KEEPS = 500, 0.99
GLOBAL_BATCHES = [2**15, 2**17, 2**19, 2**20]


class Clock(L.Callback):
    """Clock of every micro-batch, and of the one snapshot between two optimizer steps."""

    def __init__(self, recorder: SnapshotRecorder, at: int) -> None:
        self.recorder, self.at = recorder, at
        self.seconds: list[float] = []
        self.snapshot = 0.0
        self.taken_after = 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        if trainer.global_step == self.at and not self.taken_after:
            start = time.perf_counter()
            self.recorder.take(pl_module.model, self.at)
            self.snapshot, self.taken_after = time.perf_counter() - start, len(self.seconds)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train ``2 · steps + 1`` optimizer steps; the first one warms up, the snapshot comes in the middle."""
    keep_freed_memory()  # as a run does
    config = read_config(PRESET, {"model.max_seq_len": args.seq_len}).model
    model = born(config, 0)
    # Its figures do not matter here, and one of a whole probe takes long.
    birth = birth_reference(model, random_probe(config.vocab_size, 2, args.probe_len, 0), 2)
    recorder = SnapshotRecorder(
        folder, SnapshotConfig(n_sequences=args.sequences, seq_len=args.probe_len, batch_size=args.batch), birth=birth
    )
    clock, steps = Clock(recorder, at=args.steps + 1), 2 * args.steps + 1
    shape = steps * args.accumulate, args.micro_batch, args.seq_len + 1
    tokens = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    settings = TrainerConfig(
        max_steps=steps,
        micro_batch_size=args.micro_batch,
        global_batch_size=args.micro_batch * args.accumulate,
        precision="bf16",
        device="cpu",
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=args.accumulate,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(PretrainModule(model, OptimConfig(), settings), DataLoader(tokens, batch_size=None))
    # The last micro-batch of each step includes the optimizer's update.
    plain = [(i, s) for i, s in enumerate(clock.seconds) if (i + 1) % args.accumulate and i >= args.accumulate]
    last = [s for i, s in enumerate(clock.seconds) if not (i + 1) % args.accumulate and i >= args.accumulate]
    before = [s for i, s in plain if i < clock.taken_after]
    after = [s for i, s in plain if i >= clock.taken_after]
    micro = statistics.median(s for _, s in plain)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "micro_batch_tokens": args.micro_batch * args.seq_len,
        "micro_batch_s": micro,
        "update_s": max(statistics.median(last) - micro, 0.0),
        "snapshot_s": clock.snapshot,
        "before_s": statistics.median(before),
        "after_s": statistics.median(after),
        "first_after_s": after[0],
        "slowest_before_s": max(before),
    }


def shares(found: dict[str, Any]) -> list[dict[str, float]]:
    """Return the remaining share of the throughput, by global batch."""
    rows = []
    for tokens in GLOBAL_BATCHES:
        step = tokens / found["micro_batch_tokens"] * found["micro_batch_s"] + found["update_s"]
        kept = EVERY * step / (EVERY * step + found["snapshot_s"])
        rows.append({"global_batch_tokens": tokens, "step_s": step, "kept": kept})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=512, help="tokens in a training sequence")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches in each of the timed steps")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps before the snapshot, and after it")
    parser.add_argument("--sequences", type=int, default=256, help="of the probe")
    parser.add_argument("--probe-len", type=int, default=512, help="tokens in one of them")
    parser.add_argument("--batch", type=int, default=64, help="probe sequences in one pass")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    with tempfile.TemporaryDirectory() as folder:
        found = run(args, Path(folder))
    rows = shares(found)
    if args.json:
        print(json.dumps({**found, "rows": rows}, indent=2))
        return
    table = Table("global batch, tokens", "step, s", f"{EVERY} steps, s", "snapshot, s", "throughput kept", "≥ 99 %")
    for row in rows:
        table.add_row(
            f"{row['global_batch_tokens']:,}",
            f"{row['step_s']:,.1f}",
            f"{EVERY * row['step_s']:,.0f}",
            f"{found['snapshot_s']:.1f}",
            f"{row['kept']:.3%}",
            "kept" if row["kept"] >= KEEPS else "MISSED",
        )
    console = Console(width=130)
    console.print(table)
    rate = found["micro_batch_tokens"] / found["micro_batch_s"]
    console.print(
        f"{found['parameters']:,} parameters; micro-batch {args.micro_batch} × {args.seq_len}, bf16: "
        f"{found['micro_batch_s']:.2f} s, {rate:,.0f} tokens/s; update {found['update_s']:.2f} s; probe "
        f"{args.sequences} × {args.probe_len}, float32\n"
        f"micro-batches before the snapshot {found['before_s']:.2f} s (slowest {found['slowest_before_s']:.2f}), the "
        f"first after it {found['first_after_s']:.2f} s, all after it {found['after_s']:.2f} s (medians): "
        f"{found['after_s'] / found['before_s']:.3f} ×\n"
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}",
        highlight=False,
    )


if __name__ == "__main__":
    main()
