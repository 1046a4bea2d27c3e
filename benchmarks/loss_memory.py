"""Peak memory of a training step on the CPU, over that of an earlier commit: this tree's peak divided by it.

    python benchmarks/loss_memory.py [--commit c4b66f9] [--seq-len 2048] [--micro-batch 4] [--dtype bf16]

A step is forward, loss and backward of 134M parameters (LLaMA-like, V 32000). Each side runs in processes of its own,
in turn, with an allocator that gives freed memory back at once, so that the resident size is what tensors hold. At most
.6 × the earlier peak is wanted. Linux only; the earlier commit is read from git.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import machine
from libraries import Shape
from record import Record, limit

HERE = Path(__file__).parent
SMALLER = 0.6
SHAPE = Shape(d_ff=2048, vocab_size=32000, tie_embeddings=False)
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

#: Program that takes shape and bf16 flag as JSON, and prints the resident bytes at rest and at most, the latter twice.
STEP = """
import json, sys
import torch
from device import Peak, _resident
from libraries import Shape, model_fields
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.trainer import module

shape, bf16 = json.loads(sys.argv[1])
shape = Shape(**shape)
model, batch = born(ModelConfig(**model_fields(shape)), 0).train(), shape.batch()

def step(batch):
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        if hasattr(module, "next_token_loss"):
            loss = module.next_token_loss(model, batch).objective
        else:
            loss = module.next_token_losses(model, batch).mean()
    loss.backward()
    model.zero_grad(set_to_none=True)

step(batch[:, :17])  # what is loaded once
rest, peak = _resident("VmRSS"), Peak("cpu")
peak.start()
step(batch)
print(json.dumps([rest, peak.above()]))
"""


def step_bytes(tree: Path, shape: Shape, bf16: bool) -> tuple[int, int]:
    """Return the bytes at rest, and the most that a step takes above them, for the package in ``tree``."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "birthmark").symlink_to(tree.resolve(), target_is_directory=True)
        path = os.pathsep.join([folder, str(HERE)])
        command = [sys.executable, "-c", STEP, json.dumps([asdict(shape), bf16])]
        environment = {**os.environ, **GIVE_BACK, "PYTHONPATH": path}
        # Elsewhere than in this tree, whose package would come first.
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tree}: {done.stderr[-2000:]}")
    rest, above = json.loads(done.stdout.splitlines()[-1])
    return rest, above


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="c4b66f9", help="what this tree is compared with")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=SHAPE.n_layers)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16" if machine.cpu_has_bf16() else "fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "loss_memory", help="without a suffix")
    args = parser.parse_args()
    shape = replace(SHAPE, seq_len=args.seq_len, micro_batch=args.micro_batch, n_layers=args.layers)
    record = Record(args.out, f"Peak memory of a training step, over that of {args.commit}")
    part = f"{args.micro_batch} × {args.seq_len} tokens, V {shape.vocab_size}, {args.layers} blocks, {args.dtype}"
    command = f"python benchmarks/loss_memory.py --micro-batch {args.micro_batch} --seq-len {args.seq_len}"
    record.begin(part, f"{command} --dtype {args.dtype}", machine.describe("cpu"), [part])
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", args.commit], cwd=machine.ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        trees = {args.commit: Path(folder), "this tree": machine.ROOT}
        found = {name: [] for name in trees}
        for _ in range(args.rounds):
            for name, tree in trees.items():
                found[name].append(step_bytes(tree, shape, args.dtype == "bf16"))
    above = {name: statistics.median(a for _, a in values) for name, values in found.items()}
    whole = {name: statistics.median(r + a for r, a in values) for name, values in found.items()}
    for name in trees:
        record.add(part, {"case": name, "above the model, MiB": above[name] / 2**20, "whole, MiB": whole[name] / 2**20})
    for case, values in (("above the model", above), ("whole process", whole)):
        ratio = values["this tree"] / values[args.commit]
        record.add(part, {"case": f"ratio, {case}", "ratio": ratio, **limit(ratio, SMALLER, at_most=True)})
    record.done(part, part)
    print(record.markdown())


if __name__ == "__main__":
    main()
