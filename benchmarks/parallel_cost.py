"""Cost of training through this project against a bare PyTorch loop with the same parallelism.

    python benchmarks/parallel_cost.py [--rounds 3] [--steps 30] [--strategies single ddp fsdp2]

Both train the same newborn model of about 10M parameters (d 256, 8 blocks, V 8192, T 256) on the same text, in float32
with fused AdamW and clipped gradients. Each process has one core; processes communicate by gloo.

*Ours* is ``pretrain`` as it is, without snapshots, at the tokens/s that it logs. *Bare* is a loop by hand around the
same Decoder, with ``DistributedDataParallel``, or with ``fully_shard`` one block at a time. It has the allocator
setting of our runs (``trainer/devices.py``), without which it is slower. The two take turns, launch by launch. The
printed speed is the median over steps, and the printed ratio the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from birthmark.callbacks.config import LogConfig
from birthmark.data.config import DataConfig
from birthmark.data.prepare import prepare
from birthmark.measure.config import SnapshotConfig
from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.records import RunDir
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.trainer.config import OptimConfig, RunConfig, TrainerConfig
from birthmark.trainer.devices import keep_freed_memory
from birthmark.trainer.module import next_token_loss
from birthmark.trainer.run import pretrain

#: Steps that are not counted.
WARM_UP = 5
MICRO = 4


def run_config(strategy: str, n: int, steps: int) -> RunConfig:
    return RunConfig(
        model=ModelConfig(d_model=256, n_layers=8, n_heads=8, vocab_size=8192, max_seq_len=256),
        data=DataConfig(path="stdlib"),
        optim=OptimConfig(),
        trainer=TrainerConfig(
            max_steps=steps,
            micro_batch_size=MICRO,
            global_batch_size=MICRO * n,
            strategy=strategy,  # type: ignore[arg-type]
            device="cpu",
            log_every=1,
            checkpoint_every=10**6,
            val_sequences=2,
        ),
        snapshot=SnapshotConfig(enabled=False),
        log=LogConfig(wandb="off"),
    )


def ours(config: RunConfig, folder: Path) -> float:
    run = pretrain(config, RunDir(folder / "run"), console=Console(quiet=True)).run
    rates = [r["train/tokens_per_s"] for r in read_metrics(run.metrics) if "train/tokens_per_s" in r]
    return statistics.median(rates[WARM_UP:])


def bare(config: RunConfig) -> float:
    strategy, length = config.trainer.strategy, config.model.max_seq_len
    rank, n = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    keep_freed_memory()
    if strategy != "single":
        dist.init_process_group("gloo")
    data = prepare(config.data, vocab_size=config.model.vocab_size, seq_len=length)
    model: torch.nn.Module = born(config.model, 0)
    trained = model
    if strategy == "ddp":
        trained = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    trained.config = config.model  # type: ignore[assignment]
    seconds = []
    for step in range(config.trainer.max_steps):
        start = time.perf_counter()
        batch = torch.from_numpy(data.train.batch((step * n + rank) * MICRO, MICRO))
        optimizer.zero_grad()
        next_token_loss(trained, batch).objective.backward()  # type: ignore[arg-type]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    if strategy != "single":
        dist.barrier()
        dist.destroy_process_group()
    return MICRO * n * length / statistics.median(seconds[WARM_UP:])


def worker(kind: str, strategy: str, steps: int, out: Path) -> None:
    n = int(os.environ.get("WORLD_SIZE", "1"))
    config = run_config(strategy, n, steps)
    rate = ours(config, out.parent) if kind == "ours" else bare(config)
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(rate))


def launch(kind: str, strategy: str, steps: int) -> float:
    """Measure the tokens/s of one launch."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rate.json"
        command = [__file__, "--worker", kind, strategy, str(steps), str(out)]
        spread = [] if strategy == "single" else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *spread, *command], check=True, env=environment, stderr=subprocess.DEVNULL)
        return float(json.loads(out.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--strategies", nargs="+", default=["single", "ddp", "fsdp2"])
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        kind, strategy, steps, out = args.worker
        worker(kind, strategy, int(steps), Path(out))
        return
    table = Table("strategy", "processes", "bare, tokens/s", "ours, tokens/s", "ours / bare: median", "all rounds")
    for strategy in args.strategies:
        pairs = [
            (launch("bare", strategy, args.steps), launch("ours", strategy, args.steps)) for _ in range(args.rounds)
        ]
        ratios = sorted(b / a for a, b in pairs)
        a, b = (statistics.median(rates) for rates in zip(*pairs, strict=True))
        n = "1" if strategy == "single" else "2"
        all_ratios = " ".join(f"{ratio:.3f}" for ratio in ratios)
        table.add_row(strategy, n, f"{a:.0f}", f"{b:.0f}", f"{statistics.median(ratios):.3f}", all_ratios)
    console = Console(width=120)
    console.print(table)
    console.print(f"torch {torch.__version__}, 1 thread per process, {platform.machine()}, float32")


if __name__ == "__main__":
    main()
